# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run: the registry of keys, how several reports of one step combine, and the totals in `summary.json`.

Keys are `group/name[_unit]`, stable, with one line of documentation each; `<...>` in a key stands for a name. Keys that are
not here (a plugin's, under a group of its own) pass as they are and combine as means.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from relax_core.api.events import EvalFinished

Combine = Literal["mean", "max", "sum", "last"]
WEIGHT = "samples/scored"
"""Reports of one step are averaged with this as their weight, where they have it."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One documented key."""

    key: str
    help: str
    combine: Combine = "mean"
    """Rule by which two reports for the same step combine."""

    def matches(self, key: str) -> bool:
        parts = re.split(r"(<[^>]+>)", self.key)
        return re.fullmatch("".join("[^/]+" if p.startswith("<") else re.escape(p) for p in parts), key) is not None


GROUPS = {
    "reward": "What the samples of the step earned, before the update.",
    "eval": "Held-out sets, judged without training on them.",
    "pairs": "Rows that were compared beforehand.",
    "lag": "Completed steps between the weights that sampled a token and those that train on it.",
    "time": "Seconds of the step, which lasts from commit to commit; roles overlap, so only a role's own parts add up.",
    "tokens": "Tokens of the step, and their rate.",
    "samples": "The ledger: running totals, so that issued = trained + dropped + in_flight at every step.",
    "length": "Sampled tokens an attempt.",
    "policy": "How the updated policy relates to the one that sampled.",
    "distill": "How far the policy is from its teacher, where it learns from one.",
    "train": "The optimizer step.",
    "routing": "Which experts tokens visited, where their routes are replayed.",
    "critic": "The critic's step, which trains on the rows of the actor's.",
    "weights": "Publishing weights to engines.",
    "bus": "Rows between roles.",
    "memory": "Of devices that several worker groups share.",
    "restarts": "Roles and workers that were replaced; running totals.",
    "guards": "Guards that fired; running totals. What they look at are the numbers above.",
    "retries": "Work that was done once more after a fault that was not its own; running totals.",
    "events": "The record of the run itself.",
}

METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "Mean reward of the step's judged samples"),
    Metric("reward/std", "Standard deviation of those rewards"),
    Metric("reward/greedy", "Mean reward of the samples at temperature 0 that others are compared with"),
    Metric("reward/<component>", "Mean of one reward, before its weight"),
    Metric("reward/<component>/<part>", "Mean of a part that its scores name"),
    Metric("reward/<reward>/verdicts/unreadable",
           "Share of a judge's answers that could not be read, those asked for again included"),
    Metric("reward/<reward>/verdicts/unanimous", "Share of samples on which all votes of the judge were the same"),
    Metric("reward/<reward>/verdicts/agreement", "Share of pairs of a sample's votes that were the same, mean over samples"),
    Metric("reward/<reward>/verdicts/variance", "Variance of a sample's votes, mean over samples"),
    Metric("reward/<reward>/verdicts/<key>", "Mean of one key of the judge's verdicts, from 0 to 1"),
    Metric("eval/<set>/mean", "Mean reward on a held-out set", "last"),
    Metric("eval/<set>/loss", "Loss of a held-out set whose rows were given", "last"),
    Metric("eval/<set>/accuracy", "Share of its pairs whose chosen row is ahead", "last"),
    Metric("eval/<set>/margin", "By how much, on average", "last"),
    Metric("eval/<set>/count", "Samples it was judged on", "last"),
    Metric("eval/<set>/standard_error", "Of that mean; samples of one task are not taken for independent", "last"),
    Metric("eval/<set>/best_of_<k>", "Best of k samples of a task, mean over tasks: pass@k where rewards are 0 or 1", "last"),
    Metric("eval/<set>/<name>", "A further number of that set", "last"),
    Metric("pairs/accuracy", "Share of the step's pairs whose chosen row has the higher reward"),
    Metric("pairs/margin", "Mean difference of the rewards of chosen and rejected rows"),
    Metric("pairs/chosen", "Mean reward of chosen rows: a reward model's, or DPO's implicit one"),
    Metric("pairs/rejected", "Mean reward of rejected rows"),
    Metric("lag/mean", "Mean lag over trained tokens"),
    Metric("lag/max", "Largest lag of a trained token", "max"),
    Metric("lag/p50", "Median lag of trained tokens"),
    Metric("lag/share_<lag>", "Share of trained tokens with this lag, 0 to 4"),
    Metric("lag/samples/<lag>", "Samples of the step whose lag (of their oldest trained token) is this; 16 is 16 or "
           "more", "sum"),
    Metric("time/step_s", "From the last step's commit to this one's", "last"),
    Metric("time/rollout_s", "Generating and judging"),
    Metric("time/sample/queue_s", "Time of a sample, on average, in which its turns waited for an engine. Pauses of the "
           "engines, for devices or weights, are in none of these"),
    Metric("time/sample/queue_max_s", "Of the sample that waited longest", "max"),
    Metric("time/sample/generate_s", "Time in which engines had its turns; of branches that run side by side the sum"),
    Metric("time/sample/generate_max_s", "Of the sample with the most", "max"),
    Metric("time/sample/environment_s", "Time in its environment with tools and programs, while no turn was awaited"),
    Metric("time/sample/environment_max_s", "Of the sample with the most", "max"),
    Metric("time/sample/reward_s", "Time until it was judged, from when its group was generated and delivered"),
    Metric("time/sample/reward_max_s", "Of the sample with the most", "max"),
    Metric("time/train_s", "Forward, backward and update", "last"),
    Metric("time/wait_rows_s", "The actor waited for rows", "last"),
    Metric("time/wait_turn_s", "The actor waited for devices that it shares", "last"),
    Metric("time/critic_s", "The critic learnt from the step, with its wait for devices that it shares", "last"),
    Metric("time/publish_s", "Publishing the new weights", "last"),
    Metric("time/<role>/busy_s", "The role worked. One whose work goes on beside its waits (rollout) counts as busy "
           "then", "last"),
    Metric("time/<role>/wait_s", "It waited, and did nothing else", "last"),
    Metric("time/<role>/wait/<debtor>_s", "Of that, by whoever owed it", "last"),
    Metric("time/<role>/idle_s", "It did neither; busy, wait and idle are the whole step", "last"),
    Metric("time/bubble_fraction", "Share of the step's device time in which a device did no work of the step: no "
           "forward, backward or update on a trainer's, no running request on an engine's. Moving weights, saving, "
           "sleeping and waking are no work", "last"),
    Metric("time/bubble_fraction/<role>", "The same over the devices of one role: `actor`, `rollout`", "last"),
    Metric("time/generate_s", "Seconds in which an engine ran requests, summed over the engines' devices", "last"),
    Metric("time/publish/<part>_s", "Of the last publish that was answered: `gather`, `hash`, `write` by the sender, "
           "`wire`, `load`, `proof` by its slowest receiver", "last"),
    Metric("time/<part>_s", "Another part of the step, by name"),
    Metric("tokens/generated", "Tokens sampled since the last report", "sum"),
    Metric("tokens/discarded/<reason>", "Of those, tokens that are never trained: of a turn that nobody read, for one", "sum"),
    Metric("tokens/trained", "Tokens with a loss in the step", "sum"),
    Metric("tokens/per_s", "Sampled tokens a second of the step", "last"),
    Metric("tokens/per_busy_s", "Sampled tokens a second of `time/generate_s`: how fast one device generates while "
           "it does", "last"),
    Metric("samples/scored", "Samples judged since the last report", "sum"),
    Metric("samples/filtered/<filter>", "Of those, samples of groups that this filter dropped", "sum"),
    Metric("samples/issued", "Attempts issued so far", "last"),
    Metric("samples/trained", "Attempts trained so far", "last"),
    Metric("samples/no_gradient", "Of those, attempts whose gradient is zero", "last"),
    Metric("samples/dropped", "Attempts dropped so far", "last"),
    Metric("samples/dropped/<reason>", "Attempts dropped so far for one reason", "last"),
    Metric("samples/balanced", "1 where the ledger agrees with the holders, id by id", "last"),
    Metric("samples/in_flight", "Attempts now in flight, counted from their holders", "last"),
    Metric("samples/per_s", "Samples trained a second", "last"),
    Metric("length/mean", "Mean number of sampled tokens"),
    Metric("length/max", "Most sampled tokens", "max"),
    Metric("length/truncated", "Share of samples cut by a limit"),
    Metric("policy/entropy", "Mean entropy of the policy's tokens"),
    Metric("policy/approx_kl", "Estimated KL to the policy that the ratio is taken to, a token"),
    Metric("policy/ref_kl", "Estimated KL to the reference, a token"),
    Metric("policy/clip_fraction", "Share of tokens where a bound of the surrogate is active"),
    Metric("policy/ratio_max", "Largest ratio of a token", "max"),
    Metric("policy/importance_weight", "Mean weight of the off-policy correction; 1 where nothing lags"),
    Metric("policy/importance_weight_max", "The largest, before it is truncated or masked", "max"),
    Metric("policy/importance_clipped", "Share of tokens whose weight was truncated or masked"),
    Metric("policy/sequence_masked", "Share of tokens in sequences that were left out as too far off-policy"),
    Metric("policy/<name>", "A further number of the algorithm"),
    Metric("distill/kl", "KL from the policy to its teacher, a token; of sampled tokens alone an estimate, which may "
           "be below 0"),
    Metric("distill/agreement", "Probability that both give to the same tokens: 1 less their total variation, a token"),
    Metric("distill/divergence", "The divergence that is trained, a token, before its weight"),
    Metric("routing/replayed", "Share of the tokens that were fed whose routes were replayed; others went their own "
           "way"),
    Metric("routing/differs", "Share of those that the trainer would have sent to other experts in some layer"),
    Metric("train/loss", "Loss as reduced by the trainer", "last"),
    Metric("train/loss/<term>", "One term of it", "last"),
    Metric("train/grad_norm", "Gradient norm before clipping", "last"),
    Metric("train/lr", "Learning rate", "last"),
    Metric("train/rollout_log_prob_diff", "Mean |engine - trainer| log-prob on the same tokens, at the step's start",
           "last"),
    Metric("train/rollout_log_prob_diff_max", "The largest", "max"),
    Metric("train/rollout_log_prob_diff_p99", "99 % of tokens are at most this far apart, by counts in buckets that "
           "are 4 % wide", "last"),
    Metric("train/rollout_log_prob_diff_lag0", "The same mean over tokens without lag: engine against trainer, "
           "without learning between", "last"),
    Metric("train/rollout_log_prob_diff_lag0_max", "The largest of those", "max"),
    Metric("train/rollout_log_prob_diff_lag0_p99", "Their 99 %", "last"),
    Metric("train/rollout_kl", "KL of engine to trainer a token, estimated as exp(d) - 1 - d with d = trainer - "
           "engine (k3)", "last"),
    Metric("train/rollout_kl_lag0", "The same over tokens without lag", "last"),
    Metric("train/rollout_ratio_max", "Largest importance ratio trainer / engine of a token, at the step's start",
           "max"),
    Metric("train/rollout_ratio_min", "The smallest", "last"),
    Metric("train/rollout_ratio_lag0_max", "The largest over tokens without lag", "max"),
    Metric("train/rollout_ratio_lag0_min", "The smallest of those", "last"),
    Metric("train/<name>", "A further number of the trainer", "last"),
    Metric("critic/loss", "Loss of the values as reduced by the trainer", "last"),
    Metric("critic/loss/<term>", "One term of it", "last"),
    Metric("critic/explained_variance", "1 - Var(returns - values) / Var(returns), of the values that the advantages "
           "were made with; 1 is perfect", "last"),
    Metric("critic/value_mean", "Mean of those values", "last"),
    Metric("critic/return_mean", "Mean of the returns", "last"),
    Metric("critic/clip_fraction", "Share of tokens whose value left the bounds around the old one", "last"),
    Metric("critic/grad_norm", "Gradient norm before clipping", "last"),
    Metric("critic/lr", "Learning rate", "last"),
    Metric("critic/<name>", "A further number of the critic", "last"),
    Metric("weights/publishes", "Versions published so far", "last"),
    Metric("weights/publish_bytes", "Size of the last published version", "last"),
    Metric("bus/rows", "Rows on the bus", "last"),
    Metric("bus/bytes", "Their payload", "last"),
    Metric("bus/<name>", "A further number of the bus", "last"),
    Metric("memory/freed_bytes", "Bytes that others really freed for the trainer's turn", "last"),
    Metric("memory/trainer_freed_bytes", "Bytes that the trainer really freed when it slept last", "last"),
    Metric("restarts/<role>", "Replacements so far; `restarts/run`: of the whole run, from its last checkpoint", "last"),
    Metric("retries/<role>", "Units of its work (samples, requests, steps, publishes) that were done once more so far, after "
           "a fault that was not theirs", "last"),
    Metric("guards/<guard>", "Times so far that this guard found evidence that training diverges", "last"),
    Metric("events/dropped", "Events so far that nobody wrote in time: files of the run lack them", "last"),
)  # fmt: skip


def metric(key: str) -> Metric | None:
    """Return the documented metric of a key; a literal one before a pattern."""
    matching = [known for known in METRICS if known.matches(key)]
    return min(matching, key=lambda known: known.key.count("<"), default=None)


class MeasuredMetric:
    """Several reports for one step, combined as the registry says; means by the weight `samples/scored` of the reports."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, report: Mapping[str, float]) -> None:
        weight = max(float(report.get(WEIGHT, 1.0)), 1e-9)
        for key, number in report.items():
            value, known = float(number), metric(key)
            before, had = self._values.get(key), self._weights.get(key, 0.0)
            self._weights[key] = had + weight
            if before is not None:
                match known.combine if known else "mean":
                    case "mean":
                        value = (before * had + value * weight) / (had + weight)
                    case "max":
                        value = max(before, value)
                    case "sum":
                        value = before + value
            self._values[key] = value

    def values(self) -> dict[str, float]:
        return dict(self._values)


MEASURES = ("mean", "loss")
"""Measures of a held-out set: mean reward, or the loss of rows that were given."""
WINDOW = 10
"""Steps that `reward_first` and `reward_last` are means of."""
_DROPPED = "samples/dropped/"
_RESTARTS, _RETRIES, _GUARDS = "restarts/", "retries/", "guards/"
_EVENTS_DROPPED = "events/dropped"
_LAGS = "lag/samples/"


@dataclass(slots=True)
class Totals:
    """The totals of a run so far."""

    steps: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step."""
    rewards_first: list[float] = field(default_factory=list)
    rewards_last: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    evals: dict[str, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)
    """First and last judgement of each set."""
    max_lag: float = 0
    lags: Counter[int] = field(default_factory=Counter)
    """Trained samples by lag."""
    tokens_generated: float = 0
    publishes: int = 0
    restarts: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    guards: Counter[str] = field(default_factory=Counter)
    events_dropped: int = 0

    @classmethod
    def replay(cls, records: Iterable[Mapping[str, Any]]) -> Totals:
        """Rebuild totals from the lines of `metrics.jsonl`."""
        totals = cls()
        for record in records:
            metrics = {key: value for key, value in record.items() if "/" in key and value is not None}
            for name, measure in evaluations(metrics):
                totals._evaluated(name, record["step"], metrics, measure)
            if totals.steps and record["step"] <= totals.steps:
                totals.measured(record["step"], metrics)
            elif any(not key.startswith("eval/") for key in metrics):
                totals.stepped(record["step"], metrics)
                totals.publishes = int(metrics.get("weights/publishes", 0))
                totals.restarts, totals.retries = _counts(metrics, _RESTARTS), _counts(metrics, _RETRIES)
                totals.guards = _counts(metrics, _GUARDS)
                totals.events_dropped = int(metrics.get(_EVENTS_DROPPED, 0))
        return totals

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a committed step."""
        self.steps = max(self.steps, step)
        self.latest = dict(metrics)
        reward = metrics.get("reward/mean")
        if reward is not None:
            self.rewards_last.append(reward)
            if len(self.rewards_first) < WINDOW:
                self.rewards_first.append(reward)
        self.max_lag = max(self.max_lag, metrics.get("lag/max", 0))
        for key in metrics:
            if key.startswith(_LAGS):
                self.lags[int(key.removeprefix(_LAGS))] += int(metrics[key])
        self.tokens_generated += metrics.get("tokens/generated", 0)

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add more metrics of a step that was counted."""
        if step == self.steps:
            self.latest |= {key: value for key, value in metrics.items() if not key.startswith("eval/")}

    def evaluated(self, event: EvalFinished) -> dict[str, float]:
        """Add the scores of a held-out set; return its metrics under their keys."""
        group = f"eval/{event.set_name}"
        metrics = {f"{group}/{key}": float(value) for key, value in event.metrics.items()} | {
            f"{group}/{event.measure}": event.mean,
            f"{group}/count": float(event.count),
        }
        if event.measure == "mean":
            metrics[f"{group}/temperature"] = event.temperature
        self._evaluated(event.set_name, event.step, metrics, event.measure)
        return metrics

    def counters(self) -> dict[str, float]:
        """Return what each step's record carries so that a replay finds it."""
        counted = {"weights/publishes": float(self.publishes)}
        if self.events_dropped:
            counted[_EVENTS_DROPPED] = float(self.events_dropped)
        for prefix, counts in ((_RESTARTS, self.restarts), (_RETRIES, self.retries), (_GUARDS, self.guards)):
            counted |= {f"{prefix}{role}": float(count) for role, count in counts.items()}
        return counted

    def summary(self) -> dict[str, Any]:
        """Return the fields of `summary.json` that come from totals."""
        eval_first, eval_last = next(iter(self.evals.values()), (None, None))
        return {
            "steps": self.steps,
            "reward_first": _mean(self.rewards_first),
            "reward_last": _mean(self.rewards_last),
            "eval_first": eval_first,
            "eval_last": eval_last,
            "evals": {name: {"first": first, "last": last} for name, (first, last) in self.evals.items()},
            "samples_issued": self._count("samples/issued"),
            "samples_trained": self._count("samples/trained"),
            "samples_dropped": self._dropped(),
            "samples_in_flight": self._count("samples/in_flight"),
            "max_lag": int(self.max_lag),
            "lag_histogram": {str(lag): count for lag, count in sorted(self.lags.items())},
            "tokens_generated": int(self.tokens_generated),
            "weight_publishes": self.publishes,
            "restarts": dict(self.restarts),
            "retries": dict(self.retries),
            "guards": dict(self.guards),
            "events_dropped": self.events_dropped,
        }

    def _evaluated(self, name: str, step: int, metrics: Mapping[str, float], measure: str = "mean") -> None:
        group = f"eval/{name}"
        judged = {
            "set": name,
            "step": step,
            measure: metrics[f"{group}/{measure}"],
            "n": int(metrics.get(f"{group}/count", 0)),
            "temperature": metrics.get(f"{group}/temperature"),
        }
        first = self.evals.get(name, (judged, judged))[0]
        self.evals[name] = (first if measure in first else judged, judged)  # a later stage may judge by something else

    def _count(self, key: str) -> int:
        return int(self.latest.get(key, 0))

    def _dropped(self) -> dict[str, int]:
        by_reason = {
            key.removeprefix(_DROPPED): int(self.latest[key]) for key in self.latest if key.startswith(_DROPPED)
        }
        total = self._count("samples/dropped")
        unnamed = total - sum(by_reason.values())
        return by_reason | ({"unnamed": unnamed} if unnamed > 0 else {})


def _counts(metrics: Mapping[str, float], prefix: str) -> Counter[str]:
    return Counter({key.removeprefix(prefix): int(metrics[key]) for key in metrics if key.startswith(prefix)})


def evaluations(metrics: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return name and measure of each held-out set that a line of `metrics.jsonl` judges."""
    found = {
        (name, measure) for group, name, measure, *_ in (f"{key}//".split("/") for key in metrics) if group == "eval"
    }
    return {(name, measure) for name, measure in found if measure in MEASURES and f"eval/{name}/count" in metrics}


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None


def reference(metrics: Iterable[Metric] = METRICS) -> str:
    """Return the documentation page, in Markdown."""
    by_group: dict[str, list[Metric]] = {group: [] for group in GROUPS}
    for known in metrics:
        by_group.setdefault(known.key.partition("/")[0], []).append(known)
    lines = ["# Metrics", "", _INTRODUCTION]
    for group, members in by_group.items():
        lines += ["", f"## {group}", "", GROUPS.get(group, ""), "", "| key | what it is |", "|---|---|"]
        lines += [f"| `{member.key}` | {member.help} |" for member in members]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """\
Each line of `metrics.jsonl` has `schema`, `step`, `time` (Unix seconds), `elapsed_s` (of the run) and some of these keys.
Lines of one step belong together: `relax_core.open_run(DIR).metrics()` merges them. A value that is not finite is null.
Keys are stable. Plugins add keys under a group of their own."""
