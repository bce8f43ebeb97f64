# SPDX-License-Identifier: Apache-2.0
"""What is told of one step: where its time went, and the documented metrics of what it trained. No IO, no torch.

What is told of one step of the critic: its loss, and how much of the returns its values explained. No IO, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relax_core.api.batch import RowBatch
from relax_core.api.bus import Account, Sealed
from relax_core.api.clock import Clock
from relax_core.api.trainer import UpdateOutcome, UpdateResult
from relax_core.api.weights import Version
from relax_core.learn.counts import mean, merge_metrics, with_quantiles
from relax_core.roles.step import TrainingStep

SHARES = 4
"""Lags whose share of the tokens is told."""
MOST_LAG = 16
"""Where staleness is unbounded: what is older is counted here."""


class StepTimes:
    """Where a step's seconds went, by phase; a streamed step waits and trains in turn."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.start = self._last = clock.now()
        self._phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """The phase that ends now began where the last one ended."""
        now = self._clock.now()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        times = {f"time/{phase}_s": seconds for phase, seconds in self._phases.items()}
        return {"time/step_s": self._last - self.start, **times}


def step_metrics(
    step: TrainingStep, times: StepTimes, account: Account, statistics: Mapping[str, Any]
) -> dict[str, float]:
    """The documented keys of one step, over all of its rows however they came. Rows that nobody sampled have neither
    rewards nor lag."""
    rows = step.rows
    sampled = "weight_versions" in rows.columns
    return {
        **(_reward_metrics(step.samples) if sampled else {}),
        **(_lag_metrics(rows, step.version) if sampled else {}),
        **_length_metrics(rows),
        **_trainer_metrics(step.results),
        **times.seconds(),
        **_ledger_metrics(account),
        "bus/rows": float(statistics.get("rows", 0)),
        "bus/bytes": float(statistics.get("bytes", 0)),
    }


def _reward_metrics(samples: Sequence[Sealed]) -> dict[str, float]:
    seals = [seal for seal in samples if seal.outcome.judged and not seal.baseline]
    greedy = [seal.reward for seal in samples if seal.outcome.judged and seal.baseline]
    rewards = np.array([seal.reward for seal in seals] or [0.0])
    names = sorted({name for seal in seals for name in seal.parts})
    parts = {f"reward/{name}": float(np.mean([s.parts[name] for s in seals if name in s.parts])) for name in names}
    compared = {"reward/greedy": float(np.mean(greedy))} if greedy else {}
    return {**parts, **compared, "reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}


def _lag_metrics(rows: RowBatch, version: Version) -> dict[str, float]:
    trained = rows.columns["loss_mask"].values.astype(bool)
    lag = version.step - rows.columns["weight_versions"].values[trained]
    if not len(lag):
        return {"lag/mean": 0.0, "lag/max": 0.0}
    shares = np.bincount(lag.clip(0, SHARES + 1).astype(np.int64)) / len(lag)
    return {
        "lag/mean": float(lag.mean()),
        "lag/p50": float(np.median(lag)),
        "lag/max": float(lag.max()),
        **{f"lag/share_{at}": float(share) for at, share in enumerate(shares[: SHARES + 1])},
        **{f"lag/samples/{at}": float(count) for at, count in sorted(_sample_lags(rows, trained, version).items())},
    }


def _sample_lags(rows: RowBatch, trained: np.ndarray, version: Version) -> Counter[int]:
    """Samples by the lag of their oldest trained token, over all of their rows."""
    versions, places = rows.columns["weight_versions"], dict[tuple[int, int], int]()
    samples = [places.setdefault((row.group, row.sample), len(places)) for row in rows.ids]
    oldest = np.full(len(places), version.step + 1, np.int64)
    np.minimum.at(oldest, np.repeat(samples, versions.lengths)[trained], versions.values[trained])
    return Counter(min(version.step - step, MOST_LAG) for step in oldest.tolist() if step <= version.step)


def _length_metrics(rows: RowBatch) -> dict[str, float]:
    trained = _row_sums(rows, "loss_mask")
    if not len(trained):
        return {"tokens/trained": 0.0}
    return {
        "tokens/trained": float(trained.sum()),
        "length/mean": float(trained.mean()),
        "length/max": float(trained.max()),
    }


def _trainer_metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    merged = with_quantiles(merge_metrics(*(result.metrics for result in results)))
    skipped = sum(result.outcome is not UpdateOutcome.APPLIED for result in results)
    return {
        **{name: mean(metric) for name, metric in merged.items()},
        "train/grad_norm": float(np.mean([result.grad_norm for result in results])),
        "train/lr": results[-1].lr,
        "train/skipped_updates": float(skipped),
    }


def _ledger_metrics(account: Account) -> dict[str, float]:
    return {
        "samples/issued": float(account.issued),
        "samples/trained": float(account.trained),
        "samples/no_gradient": float(account.trained_without_gradient),
        "samples/dropped": float(sum(account.dropped.values())),
        **{f"samples/dropped/{reason}": float(count) for reason, count in account.dropped.items()},
        "samples/in_flight": float(account.in_flight),
        "samples/balanced": float(account.balanced),
    }


def _row_sums(rows: RowBatch, column: str) -> np.ndarray:
    return _sums(rows.columns[column].values, rows.columns[column].lengths)


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sum of each row's part of `values`; rows may be empty."""
    totals = np.concatenate(([0], np.cumsum(values.astype(np.int64))))
    ends = np.cumsum(lengths)
    return np.asarray(totals[ends] - totals[ends - lengths])


def critic_metrics(step: TrainingStep, seconds: float) -> dict[str, float]:
    merged = merge_metrics(*(result.metrics for result in step.results))
    return {
        **{name: mean(metric) for name, metric in merged.items()},
        **_explained(step),
        "critic/grad_norm": float(np.mean([result.grad_norm for result in step.results])),
        "critic/lr": step.results[-1].lr,
        "time/critic_s": seconds,
    }


def _explained(step: TrainingStep) -> dict[str, float]:
    """Of the values that the advantages were made with, before this step's updates."""
    columns = step.rows.columns
    if not {"values", "returns"} <= columns.keys():
        return {}
    trained = columns["loss_mask"].values.astype(bool)
    values, returns = columns["values"].values[trained], columns["returns"].values[trained]
    if not len(returns):
        return {}
    spread = float(returns.var())
    explained = {"critic/explained_variance": 1.0 - float((returns - values).var()) / spread} if spread > 0 else {}
    return {**explained, "critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
