# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run: the registry of keys, the combination of reports for one step, and the totals in `summary.json`.

Keys have the form `group/name[_unit]` and are stable; `<...>` in a key stands for a name. Unregistered keys, such as
keys of plugins, are recorded too and combine as means.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from relax_core.api.events import EvalFinished
from relax_core.api.run_commands import USER

Combine = Literal["mean", "max", "sum", "last"]
WEIGHT = "samples/scored"
"""Key of a report's weight in a mean over the reports of one step; a report without this key has weight 1."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A registered metric key with its documentation and rule of combination."""

    key: str
    help: str
    combine: Combine = "mean"
    """Rule by which two reports for the same step combine."""

    def matches(self, key: str) -> bool:
        parts = re.split(r"(<[^>]+>)", self.key)
        return re.fullmatch("".join("[^/]+" if p.startswith("<") else re.escape(p) for p in parts), key) is not None


METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "Mean reward of the step's judged samples"),
    Metric("reward/std", "Standard deviation of the rewards of the step's judged samples"),
    Metric("reward/no_advantage", "Share of the step's groups in which every advantage is 0, mostly because all samples "
           "earned the same; a KL term may still give them a gradient, so that `samples/no_gradient` misses them"),
    Metric("reward/greedy", "Mean reward of the greedy baseline samples (temperature 0)"),
    Metric("reward/<component>", "Mean of one reward, before its weight"),
    Metric("reward/<component>/<part>", "Mean of one named part of one reward's scores"),
    Metric("reward/<reward>/verdicts/unreadable", "Share of a judge's answers that could not be parsed, including "
           "answers to repeated requests"),
    Metric("reward/<reward>/verdicts/unanimous", "Share of samples on which all votes of the judge were equal"),
    Metric("reward/<reward>/verdicts/agreement", "Share of equal pairs among the votes on a sample, mean over samples"),
    Metric("reward/<reward>/verdicts/variance", "Variance of the votes on a sample, mean over samples"),
    Metric("reward/<reward>/verdicts/position_bias", "Preference of a judge of pairs for a position: 1 always the response "
           "that it reads first, -1 always the second, 0 if both orders agree"),
    Metric("reward/<reward>/verdicts/consistent", "1 minus the mean size of `position_bias` over a sample's comparisons"),
    Metric("reward/<reward>/verdicts/<key>", "Mean of one key of the judge's verdicts, from 0 to 1"),
    Metric("eval/<set>/mean", "Mean reward on a held-out set", "last"),
    Metric("eval/<set>/loss", "Loss on a held-out set of given rows", "last"),
    Metric("eval/<set>/accuracy", "Share of the set's pairs whose chosen row has the higher reward", "last"),
    Metric("eval/<set>/margin", "Mean difference of the rewards of chosen and rejected rows of the set", "last"),
    Metric("eval/<set>/count", "Number of judged samples of the set", "last"),
    Metric("eval/<set>/standard_error", "Standard error of `eval/<set>/mean`, clustered by task", "last"),
    Metric("eval/<set>/best_of_<k>", "Best of k samples of a task, mean over tasks; pass@k for 0/1 rewards", "last"),
    Metric("eval/<set>/<name>", "An additional metric of the set", "last"),
    Metric("pairs/accuracy", "Share of the step's pairs whose chosen row has the higher reward"),
    Metric("pairs/margin", "Mean difference of the rewards of chosen and rejected rows"),
    Metric("pairs/chosen", "Mean reward of chosen rows, from a reward model or implicit as in DPO"),
    Metric("pairs/rejected", "Mean reward of rejected rows, from a reward model or implicit as in DPO"),
    Metric("lag/mean", "Mean lag over trained tokens"),
    Metric("lag/max", "Largest lag of a trained token", "max"),
    Metric("lag/p50", "Median lag of trained tokens"),
    Metric("lag/share_<lag>", "Share of trained tokens with this lag, 0 to 4"),
    Metric("lag/samples/<lag>", "Number of the step's samples whose oldest trained token has this lag; 16 means 16 or "
           "more", "sum"),
    Metric("time/step_s", "The actor's step: wait for rows and devices, training, commit and publish", "last"),
    Metric("time/rollout_s", "Mean time of a group from the start of its generation until its last sample ended"),
    Metric("time/sample/queue_s", "Mean time that the turns of a sample waited for an engine; pauses of the engines, "
           "for devices or weights, count in no `time/sample` metric"),
    Metric("time/sample/queue_max_s", "Longest time that the turns of one sample waited for an engine", "max"),
    Metric("time/sample/generate_s", "Mean time in which engines ran the turns of a sample, summed over its branches"),
    Metric("time/sample/generate_max_s", "Longest time in which engines ran the turns of one sample", "max"),
    Metric("time/sample/environment_s", "Mean time that a sample spent in its environment, including tools and "
           "programs, excluding waits for a turn"),
    Metric("time/sample/environment_max_s", "Longest time that one sample spent in its environment", "max"),
    Metric("time/sample/reward_s", "Mean time from the delivery of a sample's generated group until it was judged"),
    Metric("time/sample/reward_max_s", "Longest time from the delivery of a generated group until it was judged",
           "max"),
    Metric("time/train_s", "The actor's forward, backward and update", "last"),
    Metric("time/wait_rows_s", "The actor's wait for rows", "last"),
    Metric("time/wait_turn_s", "The actor's wait for its shared devices", "last"),
    Metric("time/critic_s", "The critic's training on the step, including its wait for shared devices", "last"),
    Metric("time/publish_s", "Committing the step and publishing the new weights", "last"),
    Metric("time/<role>/busy_s", "Time during which the role worked; the rollout may wait at the same time", "last"),
    Metric("time/<role>/wait_s", "Time during which the role only waited", "last"),
    Metric("time/<role>/wait/<blocker>_s", "Part of `time/<role>/wait_s` in which the role waited for this blocker",
           "last"),
    Metric("time/<role>/idle_s", "Time of the step in which the role neither worked nor waited", "last"),
    Metric("time/bubble_fraction", "Share of the step's device time without work. Work is a trainer's forward, "
           "backward and update, and an engine's running requests, but not saving, moving, offloading or loading "
           "weights", "last"),
    Metric("time/bubble_fraction/<role>", "`time/bubble_fraction` of one role's devices: `actor`, `rollout`", "last"),
    Metric("time/generate_s", "Time during which engines ran requests, summed over the engines' devices", "last"),
    Metric("time/publish/<part>_s", "Part of the last publish that engines confirmed: `gather`, `hash`, `write` at the "
           "sender; `wire`, `load`, `proof` at the slowest receiver", "last"),
    Metric("time/<part>_s", "An additional part of the step, by name"),
    Metric("tokens/generated", "Tokens sampled since the last report", "sum"),
    Metric("tokens/discarded/<reason>", "The part of `tokens/generated` that is never trained, by reason", "sum"),
    Metric("tokens/trained", "Tokens with a loss in the step", "sum"),
    Metric("tokens/per_s", "Sampled tokens per second of the step", "last"),
    Metric("tokens/per_busy_s", "Sampled tokens per second of `time/generate_s`: speed of one busy device", "last"),
    Metric("samples/scored", "Samples judged since the last report", "sum"),
    Metric("samples/filtered/<filter>", "The part of `samples/scored` whose groups this filter rejected", "sum"),
    Metric("samples/issued", "Attempts issued so far", "last"),
    Metric("samples/trained", "Attempts trained so far", "last"),
    Metric("samples/no_gradient", "The part of `samples/trained` whose gradient was zero", "last"),
    Metric("samples/dropped", "Attempts dropped so far", "last"),
    Metric("samples/dropped/<reason>", "Attempts dropped so far for this reason", "last"),
    Metric("samples/balanced", "1 if the ledger's attempts in flight are exactly those that roles report", "last"),
    Metric("samples/in_flight", "Attempts in flight now, as reported by the roles that hold them", "last"),
    Metric("samples/per_s", "Samples trained per second of the step", "last"),
    Metric("length/mean", "Mean number of trained tokens of a row"),
    Metric("length/max", "Largest number of trained tokens of a row", "max"),
    Metric("length/truncated", "Share of samples that a token or turn limit cut"),
    Metric("length/completion_p50", "Median number of tokens that a sample's turns sampled"),
    Metric("length/completion_p90", "90th percentile of the number of tokens that a sample's turns sampled"),
    Metric("length/completion_max", "Largest number of tokens that a sample's turns sampled", "max"),
    Metric("length/completion_finished", "Mean number of sampled tokens of the samples that no limit cut"),
    Metric("length/repeated", "Share of a turn's sequences of 8 tokens that had occurred before in the turn, mean over "
           "samples; a policy that loops comes near 1"),
    Metric("length/repeated_max", "Largest `length/repeated` of a sample", "max"),
    Metric("policy/entropy", "Mean entropy of the policy, in nats, at trained tokens of rows with a gradient"),
    Metric("policy/approx_kl", "Estimated KL per token to the policy in the denominator of the ratio"),
    Metric("policy/ref_kl", "Estimated KL per token to the reference model"),
    Metric("policy/ref_kl_clamped", "Share of tokens whose log ratio of reference to policy is above 20; their divergence "
           "is that of 20, without a gradient"),
    Metric("policy/clip_fraction", "Share of tokens at which the surrogate is clipped"),
    Metric("policy/ratio_max", "Largest ratio of a token", "max"),
    Metric("policy/importance_weight", "Mean weight of the off-policy correction; 1 without lag and mismatch"),
    Metric("policy/importance_weight_max", "Largest weight of the off-policy correction, before truncation or masking",
           "max"),
    Metric("policy/importance_clipped", "Share of tokens whose off-policy weight was truncated or masked"),
    Metric("policy/sequence_masked", "Share of tokens in sequences masked as too far off-policy"),
    Metric("policy/sequences_clipped_<sign>", "Share of sequences with a positive or negative advantage that are clipped "
           "whole, so that they have no gradient; of algorithms with one ratio per sequence"),
    Metric("policy/<name>", "An additional metric of the algorithm"),
    Metric("distill/kl", "KL per token from the policy to its teacher; an estimate from sampled tokens may be below 0"),
    Metric("distill/agreement", "Probability mass per token that policy and teacher share: 1 - their total variation"),
    Metric("distill/divergence", "The trained divergence per token, before its weight"),
    Metric("routing/replayed", "Share of processed tokens whose routed experts were replayed; the trainer chose the rest"),
    Metric("routing/differs", "Share of replayed tokens for which the trainer would choose other experts in some layer"),
    Metric("train/loss", "Loss as reduced by the trainer", "last"),
    Metric("train/loss/<term>", "One term of the loss", "last"),
    Metric("train/grad_norm", "Gradient norm before clipping", "last"),
    Metric("train/lr", "Learning rate", "last"),
    Metric("train/rollout_log_prob_diff", "Mean |engine - trainer| log-prob on the same tokens, at the step's start",
           "last"),
    Metric("train/rollout_log_prob_diff_max", "Largest |engine - trainer| log-prob of a token", "max"),
    Metric("train/rollout_log_prob_diff_p99", "99th percentile of |engine - trainer| log-prob, from a histogram with "
           "buckets 4 % wide", "last"),
    Metric("train/rollout_log_prob_diff_lag0", "Mean |engine - trainer| log-prob over tokens without lag: the mismatch "
           "of engine and trainer with equal weights", "last"),
    Metric("train/rollout_log_prob_diff_lag0_max", "Largest |engine - trainer| log-prob of a token without lag", "max"),
    Metric("train/rollout_log_prob_diff_lag0_p99", "99th percentile of |engine - trainer| log-prob over tokens without "
           "lag", "last"),
    Metric("train/rollout_kl", "KL per token from engine to trainer, estimated as exp(d) - 1 - d with d = trainer - "
           "engine (k3)", "last"),
    Metric("train/rollout_kl_lag0", "`train/rollout_kl` over tokens without lag", "last"),
    Metric("train/rollout_ratio_max", "Largest importance ratio trainer / engine of a token, at the step's start",
           "max"),
    Metric("train/rollout_ratio_min", "Smallest importance ratio trainer / engine of a token", "last"),
    Metric("train/rollout_ratio_lag0_max", "Largest importance ratio trainer / engine of a token without lag", "max"),
    Metric("train/rollout_ratio_lag0_min", "Smallest importance ratio trainer / engine of a token without lag", "last"),
    Metric("train/<name>", "An additional metric of the trainer", "last"),
    Metric("trainer/flops", "Floating-point operations of the step's updates, of all ranks", "last"),
    Metric("trainer/forward_flops", "Floating-point operations of the actor's passes without gradient in the step, such as "
           "recomputed log-probs, of all ranks", "last"),
    Metric("trainer/padding", "Share of padding among the tokens that the actor computed", "last"),
    Metric("trainer/tflops_per_s", "10^12 operations of `trainer/flops` and `trainer/forward_flops` per device and second of "
           "`time/train_s`", "last"),
    Metric("trainer/mfu", "Model FLOPs utilization: `trainer/tflops_per_s` as a share of the device's peak. Only where the "
           "peak is known: see `trainer.peak_tflops`", "last"),
    Metric("trainer/slowest_rank", "Number of the actor's rank with the longest forward and backward passes in the step",
           "last"),
    Metric("trainer/slowest_rank_ratio", "Time of that rank's forward and backward passes as a multiple of the median rank's; "
           "ranks that share weights wait for one another within the passes, and so are alike", "last"),
    Metric("critic/loss", "Loss of the values as reduced by the trainer", "last"),
    Metric("critic/loss/<term>", "One term of the critic's loss", "last"),
    Metric("critic/explained_variance", "1 - Var(returns - values) / Var(returns) for the values behind the "
           "advantages; 1 is perfect", "last"),
    Metric("critic/value_mean", "Mean of the values behind the advantages", "last"),
    Metric("critic/return_mean", "Mean of the returns", "last"),
    Metric("critic/clip_fraction", "Share of tokens whose value left the clipping range around the old value", "last"),
    Metric("critic/grad_norm", "The critic's gradient norm before clipping", "last"),
    Metric("critic/lr", "The critic's learning rate", "last"),
    Metric("critic/<name>", "An additional metric of the critic", "last"),
    Metric("weights/publishes", "Versions published so far", "last"),
    Metric("weights/publish_bytes", "Size of the last published version in bytes", "last"),
    Metric("bus/rows", "Rows on the bus", "last"),
    Metric("bus/bytes", "Bytes of the rows on the bus", "last"),
    Metric("bus/<name>", "An additional metric of the bus", "last"),
    Metric("memory/freed_bytes", "Device bytes that offloading freed for the trainer's device lease", "last"),
    Metric("memory/trainer_freed_bytes", "Device bytes that the trainer freed at its last offload", "last"),
    Metric("engines/serving", "Mean number of engines that serve requests", "last"),
    Metric("engines/running", "Mean number of requests that run on engines", "last"),
    Metric("engines/waiting", "Mean number of requests that wait for an engine", "last"),
    Metric("engines/oldest_wait_s", "Longest time that a waiting request had waited", "last"),
    Metric("engines/busy", "Mean share of the engines that run at least one request", "last"),
    Metric("engines/slot_use", "Mean share of the engines' request slots (`placement.rollout.requests_per_engine`) in "
           "use", "last"),
    Metric("engines/kv_use", "Mean share of the engines' KV caches in use by running requests, if caches are counted",
           "last"),
    Metric("engines/prefix_hits", "Share of the prompt tokens that engines found in their prefix caches, if engines count "
           "them", "last"),
    Metric("engines/draft_acceptance", "Share of the tokens that engines drafted ahead and kept, if they draft tokens "
           "(`engine.draft_tokens`)", "last"),
    Metric("engines/staleness_wait", "Share of the time in which the staleness bound kept groups from starting", "last"),
    Metric("restarts/<role>", "Replacements so far; `restarts/run` counts restarts of the whole run", "last"),
    Metric("retries/<role>", "Number of samples, requests, steps or publishes of the role that were repeated so far "
           "after a fault that they did not cause", "last"),
    Metric("guards/<guard>", "Number of times that the guard has found training to diverge", "last"),
    Metric("user/<name>", "A value that a program logged for the step with `log_metrics` or the metrics service", "last"),
    Metric("events/dropped", "Events dropped so far because they were not recorded in time; the run's files lack them",
           "last"),
)  # fmt: skip


@lru_cache(maxsize=1024)
def metric(key: str) -> Metric | None:
    """Return the registered metric of a key, or None; a literal key takes precedence over a pattern."""
    matching = [known for known in METRICS if known.matches(key)]
    return min(matching, key=lambda known: known.key.count("<"), default=None)


class MeasuredMetric:
    """Reports for one step, combined by the rules of the registry; a mean weights each report by its `WEIGHT`."""

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
"""Measures of a held-out set: mean reward, or the loss of given rows."""
WINDOW = 10
"""Number of steps averaged in `reward_first` and `reward_last`."""
WHOLE_RUN = "run"
"""Name under which restarts of the whole run are counted; restarts of roles and workers have their own names."""
_DROPPED = "samples/dropped/"
_LAGS = "lag/samples/"


class EventCounts(Counter[str]):
    """Counts of the events of a run by metric key, over all its starts; a rollback does not reduce them."""

    def count(self, record: Mapping[str, Any]) -> None:
        """Count a record of `events.jsonl`."""
        match record["event"]:
            case "weights published":
                self["weights/publishes"] += 1
            case "run restarted":
                self[f"restarts/{WHOLE_RUN}"] += 1
            case "role recovered" if record["role"] != WHOLE_RUN:  # a run that recovered was counted at its restart
                self[f"restarts/{record['role']}"] += 1
            case "work retried":
                self[f"retries/{record['role']}"] += record["count"]
            case "guard fired":
                self[f"guards/{record['guard']}"] += 1
            case "events dropped":
                self["events/dropped"] += record["count"]

    def by_name(self, group: str) -> dict[str, int]:
        """Return the counts of a group of metrics, such as `restarts`, by the rest of their keys."""
        return {key.removeprefix(f"{group}/"): self[key] for key in self if key.startswith(f"{group}/")}

    def summary(self) -> dict[str, object]:
        """Return the fields of `summary.json` that come from counts."""
        return {
            "weight_publishes": self["weights/publishes"],
            **{group: self.by_name(group) for group in ("restarts", "retries", "guards")},
            "events_dropped": self["events/dropped"],
        }


@dataclass(slots=True)
class Totals:
    """The totals of a run's steps so far, without steps that were undone."""

    steps: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step."""
    rewards_first: list[float] = field(default_factory=list)
    rewards_last: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    evals: dict[str, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)
    """First and last result of each held-out set."""
    max_lag: float = 0
    lags: Counter[int] = field(default_factory=Counter)
    """Number of trained samples by lag."""
    tokens_generated: float = 0

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
            elif any(not key.startswith(("eval/", USER)) for key in metrics):
                totals.stepped(record["step"], metrics)
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
        """Add more metrics of the newest step; metrics of earlier steps change no total."""
        if step == self.steps:
            self.latest |= {key: value for key, value in metrics.items() if not key.startswith("eval/")}

    def evaluated(self, event: EvalFinished) -> dict[str, float]:
        """Add the result of a held-out set; return its metrics by key."""
        group = f"eval/{event.set_name}"
        metrics = {f"{group}/{key}": float(value) for key, value in event.metrics.items()} | {
            **({f"{group}/{event.measure}": event.mean} if event.count else {}),  # absent if no sample was judged
            f"{group}/count": float(event.count),
        }
        if event.measure == "mean":
            metrics[f"{group}/temperature"] = event.temperature
        self._evaluated(event.set_name, event.step, metrics, event.measure)
        return metrics

    def summary(self) -> dict[str, object]:
        """Return the fields of `summary.json` that come from totals."""
        eval_first, eval_last = next(iter(self.evals.values()), (None, None))
        dropped = [key for key in self.latest if key.startswith(_DROPPED)]
        by_reason = {key.removeprefix(_DROPPED): self._count(key) for key in dropped}
        unnamed = self._count("samples/dropped") - sum(by_reason.values())
        return {
            "steps": self.steps,
            "reward_first": mean(self.rewards_first),
            "reward_last": mean(self.rewards_last),
            "eval_first": eval_first,
            "eval_last": eval_last,
            "evals": {name: {"first": first, "last": last} for name, (first, last) in self.evals.items()},
            "samples_issued": self._count("samples/issued"),
            "samples_trained": self._count("samples/trained"),
            "samples_dropped": by_reason | ({"unnamed": unnamed} if unnamed > 0 else {}),
            "samples_in_flight": self._count("samples/in_flight"),
            "max_lag": int(self.max_lag),
            "lag_histogram": {str(lag): count for lag, count in sorted(self.lags.items())},
            "tokens_generated": int(self.tokens_generated),
        }

    def _evaluated(self, name: str, step: int, metrics: Mapping[str, float], measure: str = "mean") -> None:
        group = f"eval/{name}"
        judged = {
            "set": name,
            "step": step,
            measure: metrics.get(f"{group}/{measure}"),
            "n": int(metrics.get(f"{group}/count", 0)),
            "temperature": metrics.get(f"{group}/temperature"),
        }
        first = self.evals.get(name, (judged, judged))[0]
        self.evals[name] = (first if measure in first else judged, judged)  # a later stage may use a different measure

    def _count(self, key: str) -> int:
        return int(self.latest.get(key, 0))


def evaluations(metrics: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return (name, measure) of each held-out set with a result in a line of `metrics.jsonl`."""
    named = {
        (name, measure) for group, name, measure, *_ in (f"{key}//".split("/") for key in metrics) if group == "eval"
    }
    return {(name, measure) for name, measure in named if measure in MEASURES and f"eval/{name}/count" in metrics}


def mean(values: Collection[float]) -> float | None:
    """Return the mean, or None of no values."""
    return sum(values) / len(values) if values else None
