# SPDX-License-Identifier: Apache-2.0
"""One step of a trained role as data: its claims, the parts of updates that they make, and its metrics. No IO, no torch.

A streamed step is one update in several parts, each trained while later groups are still being generated; otherwise one
claim brings all groups, and each part is a whole update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_core.api.batch import Ragged, RowBatch, RowId
from relax_core.api.bus import Account, Claim, Sealed
from relax_core.api.errors import StaleFence
from relax_core.api.role import Clock
from relax_core.api.trainer import UpdateOutcome, UpdateResult
from relax_core.api.weights import Version
from relax_core.learn.counts import count, mean, merge_metrics, nominal, rows_with_gradient, total, with_quantiles

SHARES = 4
"""Lags whose share of the tokens is told."""
MOST_LAG = 16
"""Where staleness is unbounded: what is older is counted here."""


class ClaimedRows:
    """Rows of whole groups under one lease."""

    def __init__(self, claim: Claim, rows: RowBatch, zero_advantage_skips: bool = True) -> None:
        self.claim, self.rows = claim, masked(rows, claim.mask_before)
        self.useful = frozenset(rows_with_gradient(self.rows) if zero_advantage_skips else range(len(rows)))
        """Indices of the rows to train."""

    @property
    def without_gradient(self) -> tuple[RowId, ...]:
        return tuple(row for index, row in enumerate(self.rows.ids) if index not in self.useful)

    def outdated(self, column: str, version: Version) -> list[int]:
        """Rows to train whose column is missing, or was computed under other weights than `version`."""
        if column not in self.rows.columns:
            return sorted(self.useful)
        made = self.claim.versions.get(column, {})
        return [index for index in sorted(self.useful) if made.get(self.rows.ids[index].group) != version]

    def fill(self, column: str, indices: Sequence[int], values: Ragged) -> None:
        """Put values in place of these rows' own; rows that never had the column get zeros."""
        own = self.rows.columns.get(column)
        tokens = self.rows.columns["tokens"]
        shape, dtype = (len(tokens.values), *values.values.shape[1:]), values.values.dtype
        filled = np.zeros(shape, dtype) if own is None else own.values.copy()
        starts = tokens.offsets()
        for index, row in zip(indices, values.rows(), strict=True):
            filled[starts[index] : starts[index + 1]] = row
        self.rows = self.rows.with_columns({column: Ragged(filled, tokens.lengths)})

    def of(self, groups: Iterable[int]) -> list[int]:
        """Indices of the rows of these groups."""
        wanted = set(groups)
        return [index for index, row in enumerate(self.rows.ids) if row.group in wanted]

    def take(self, indices: list[int]) -> RowBatch:
        return self.rows if len(indices) == len(self.rows) else self.rows.take(indices)


def masked(rows: RowBatch, before: int) -> RowBatch:
    """The rows with tokens sampled by a step earlier than `before` taken out of the loss; 0 takes none."""
    if not before:
        return rows
    mask, versions = rows.columns["loss_mask"], rows.columns["weight_versions"].values
    return rows.with_columns({"loss_mask": Ragged(mask.values * (versions >= before), mask.lengths)})


@dataclass(frozen=True, slots=True)
class StepPart:
    """Rows of one update that go to the trainer together."""

    rows: RowBatch
    """Those with a gradient."""
    skipped: int
    denominators: Mapping[str, float]
    """Global counts over all rows of the update, skipped ones included: true where the part ends it, nominal before."""
    opens: bool = True
    """It is the first of its update."""
    ends: bool = True
    """It is the last."""


class TrainingStep:
    """The step that starts at `version` and trains up to `wanted` groups."""

    def __init__(self, version: Version, wanted: int, num_updates: int = 1, streams: bool = False) -> None:
        self.version = version
        self.chunks: list[ClaimedRows] = []
        self.results: list[UpdateResult] = []
        """Of the updates that are over."""
        self._wanted, self._num_updates, self._streams = wanted, num_updates, streams
        self._closed = False

    @property
    def left(self) -> int:
        """Groups still wanted."""
        return 0 if self._closed else self._wanted - len(self.groups)

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(group for claim in self.claims for group in claim.groups)

    def add(self, chunk: ClaimedRows) -> list[StepPart]:
        """Take rows; return the parts that may be trained now. Raises StaleFence where one of the groups came before."""
        if again := set(self.groups) & set(chunk.claim.groups):
            raise StaleFence(
                f"group {min(again)} was claimed twice in one step: its first lease is over; begin it anew"
            )
        self.chunks.append(chunk)
        self._closed = not self._streams or not self.left
        if self._num_updates > 1:
            return self._updates(chunk)
        useful = sorted(chunk.useful)
        skipped = len(chunk.rows) - len(useful)
        return [StepPart(chunk.take(useful), skipped, self._denominators(), len(self.chunks) == 1, self._closed)]

    def close(self) -> list[StepPart]:
        """End the open update as it is: no more rows come."""
        self._closed = True
        return [StepPart(self.chunks[-1].take([]), 0, self._denominators(), opens=False)]

    def _denominators(self) -> dict[str, float]:
        """Count rows; before the end, as if the groups to come were like those that are there."""
        counts = total(count(chunk.rows) for chunk in self.chunks)
        return counts if self._closed else nominal(counts, len(self.groups) / self._wanted)

    def _updates(self, chunk: ClaimedRows) -> list[StepPart]:
        """Split rows by whole groups; a step that was closed short may have fewer groups than updates."""
        groups = sorted({row.group for row in chunk.rows.ids})
        updates = max(1, min(self._num_updates, len(groups)))
        return [_update(chunk, chunk.of(groups[i::updates])) for i in range(updates)]

    # -- all of it ----------------------------------------------------------------------------------------------

    @property
    def claims(self) -> list[Claim]:
        return [chunk.claim for chunk in self.chunks]

    @property
    def rows(self) -> RowBatch:
        """All rows, with the columns that every chunk has, in the order they came."""
        batches = [chunk.rows for chunk in self.chunks]
        if len(batches) == 1:
            return batches[0]
        names = set.intersection(*(set(batch.columns) for batch in batches))
        columns = {name: Ragged.concatenate([batch.columns[name] for batch in batches]) for name in sorted(names)}
        return RowBatch(tuple(row for batch in batches for row in batch.ids), columns)

    @property
    def samples(self) -> list[Sealed]:
        return [sealed for claim in self.claims for sealed in claim.samples.values()]

    @property
    def without_gradient(self) -> tuple[RowId, ...]:
        return tuple(row for chunk in self.chunks for row in chunk.without_gradient)


def _update(chunk: ClaimedRows, indices: list[int]) -> StepPart:
    kept = [index for index in indices if index in chunk.useful]
    return StepPart(chunk.take(kept), len(indices) - len(kept), count(chunk.take(indices)))


def moved(result: UpdateResult) -> bool:
    """Tell whether an update must have changed the weights."""
    return result.outcome is UpdateOutcome.APPLIED and result.grad_norm > 0 and result.lr > 0


class StepTimes:
    """Seconds of a step by phase; a streamed step waits and trains in turn."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.start = self._last = clock.now()
        self._phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """End a phase, which began where the last one ended."""
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
    """Compare the values that the advantages were made with, before this step's updates, with the returns."""
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
