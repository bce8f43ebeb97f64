# SPDX-License-Identifier: Apache-2.0
"""One step's rows as the actor trains them: split into updates, counted, timed and measured. No IO, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_core.api.batch import Ragged, RowBatch, RowId
from relax_core.api.bus import Account, Claim
from relax_core.api.clock import Clock
from relax_core.api.trainer import UpdateOutcome, UpdateResult
from relax_core.api.version import Version
from relax_core.learn.counts import count
from relax_core.learn.gradient import rows_with_gradient
from relax_core.learn.metrics import mean, merge_metrics


@dataclass(frozen=True, slots=True)
class StepPart:
    """The rows of one update."""

    rows: RowBatch
    """Those with a gradient."""
    skipped: int
    denominators: Mapping[str, float]
    """Global counts over all rows of the update, skipped ones included."""


class StepRows:
    """All rows of a step and the updates they are split into, by whole groups."""

    def __init__(self, rows: RowBatch, claim: Claim, num_updates: int, zero_advantage_skips: bool = True) -> None:
        self.rows, self.claim, self._num_updates = rows, claim, num_updates
        self._useful = set(rows_with_gradient(rows) if zero_advantage_skips else range(len(rows)))

    @property
    def without_gradient(self) -> tuple[RowId, ...]:
        return tuple(row for index, row in enumerate(self.rows.ids) if index not in self._useful)

    def outdated(self, column: str, version: Version) -> list[int]:
        """Rows to train whose column is missing, or was computed under other weights than `version`."""
        if column not in self.rows.columns:
            return sorted(self._useful)
        made = self.claim.versions.get(column, {})
        return [index for index in sorted(self._useful) if made.get(self.rows.ids[index].group) != version]

    def fill(self, column: str, indices: Sequence[int], values: Ragged) -> None:
        """Put values in place of these rows' own; rows that never had the column get zeros."""
        own = self.rows.columns.get(column)
        tokens = self.rows.columns["tokens"]
        filled = np.zeros(len(tokens.values), np.float32) if own is None else own.values.copy()
        starts = tokens.offsets()
        for index, row in zip(indices, values.rows(), strict=True):
            filled[starts[index] : starts[index + 1]] = row
        self.rows = self.rows.with_columns({column: Ragged(filled, tokens.lengths)})

    def parts(self) -> list[StepPart]:
        """One an update; a step that was closed short may have fewer groups than updates."""
        groups = sorted({row.group for row in self.rows.ids})
        updates = max(1, min(self._num_updates, len(groups)))
        return [self._part(set(groups[i::updates])) for i in range(updates)]

    def _part(self, groups: set[int]) -> StepPart:
        mine = [index for index, row in enumerate(self.rows.ids) if row.group in groups]
        kept = [index for index in mine if index in self._useful]
        return StepPart(self.take(kept), len(mine) - len(kept), count(self.take(mine)))

    def take(self, indices: list[int]) -> RowBatch:
        return self.rows if len(indices) == len(self.rows) else self.rows.take(indices)


def _row_sums(rows: RowBatch, column: str) -> np.ndarray:
    return _sums(rows.columns[column].values, rows.columns[column].lengths)


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sum of each row's part of `values`; rows may be empty."""
    totals = np.concatenate(([0], np.cumsum(values.astype(np.int64))))
    ends = np.cumsum(lengths)
    return np.asarray(totals[ends] - totals[ends - lengths])


def masked(rows: RowBatch, before: int) -> RowBatch:
    """The rows with tokens sampled by a step earlier than `before` taken out of the loss; 0 takes none."""
    if not before:
        return rows
    mask, versions = rows.columns["loss_mask"], rows.columns["weight_versions"].values
    return rows.with_columns({"loss_mask": Ragged(mask.values * (versions >= before), mask.lengths)})


def moved(result: UpdateResult) -> bool:
    """Whether an update must have changed the weights."""
    return result.outcome is UpdateOutcome.APPLIED and result.grad_norm > 0 and result.lr > 0


class StepTimes:
    """Where a step's seconds went, by phase, in the order they were marked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.start = self._last = clock.now()
        self.spans: dict[str, tuple[float, float]] = {}

    def mark(self, phase: str) -> None:
        """The phase that ends now began where the last one ended."""
        now = self._clock.now()
        self.spans[phase] = (self._last, now)
        self._last = now

    def seconds(self) -> dict[str, float]:
        times = {f"time/{phase}_s": end - start for phase, (start, end) in self.spans.items()}
        return {"time/step_s": self._last - self.start, **times}


def step_metrics(
    step: StepRows, version: Version, results: Sequence[UpdateResult], times: StepTimes, account: Account,
    statistics: Mapping[str, Any],
) -> dict[str, float]:  # fmt: skip
    """The documented keys of one step."""
    return {
        **_reward_metrics(step.claim),
        **_lag_metrics(step.rows, version),
        **_length_metrics(step.rows),
        **_trainer_metrics(results),
        **times.seconds(),
        **_ledger_metrics(account),
        "bus/rows": float(statistics.get("rows", 0)),
        "bus/bytes": float(statistics.get("bytes", 0)),
    }


def _reward_metrics(claim: Claim) -> dict[str, float]:
    seals = [seal for seal in claim.samples.values() if seal.outcome.judged]
    rewards = np.array([seal.reward for seal in seals] or [0.0])
    names = sorted({name for seal in seals for name in seal.parts})
    parts = {f"reward/{name}": float(np.mean([s.parts[name] for s in seals if name in s.parts])) for name in names}
    return {**parts, "reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}


def _lag_metrics(rows: RowBatch, version: Version) -> dict[str, float]:
    trained = rows.columns["loss_mask"].values.astype(bool)
    lag = version.step - rows.columns["weight_versions"].values[trained]
    if not len(lag):
        return {"lag/mean": 0.0, "lag/max": 0.0}
    return {"lag/mean": float(lag.mean()), "lag/max": float(lag.max())}


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
    merged = merge_metrics(*(result.metrics for result in results))
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
