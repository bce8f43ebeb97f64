# SPDX-License-Identifier: Apache-2.0
"""Running totals of a run, and `summary.json` made of them. They can be rebuilt from `metrics.jsonl` alone.

Built from metrics and events only; the ledger's last account may be laid over it by whoever ends the run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_core.api.events import EvalFinished

MEASURES = ("mean", "loss")
"""Measures of a held-out set: mean reward, or the loss of rows that were given."""
WINDOW = 10
"""Steps that `reward_first` and `reward_last` are means of."""
_DROPPED = "samples/dropped/"
_RESTARTS = "restarts/"
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

    @classmethod
    def replay(cls, records: Iterable[Mapping[str, Any]]) -> Totals:
        """Rebuild totals from the lines of `metrics.jsonl`."""
        totals = cls()
        for record in records:
            metrics = {key: value for key, value in record.items() if "/" in key and value is not None}
            for name, measure in {tuple(key.split("/")[1:3]) for key in metrics if key.startswith("eval/")}:
                if measure in MEASURES and f"eval/{name}/count" in metrics:
                    totals._evaluated(name, record["step"], metrics, measure)
            if totals.steps and record["step"] <= totals.steps:
                totals.measured(record["step"], metrics)
            elif any(not key.startswith("eval/") for key in metrics):
                totals.stepped(record["step"], metrics)
                totals.publishes = int(metrics.get("weights/publishes", 0))
                counted = {
                    key.removeprefix(_RESTARTS): int(metrics[key]) for key in metrics if key.startswith(_RESTARTS)
                }
                totals.restarts = Counter(counted)
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
        return counted | {f"{_RESTARTS}{role}": float(count) for role, count in self.restarts.items()}

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


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None
