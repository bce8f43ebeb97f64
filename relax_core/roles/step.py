# SPDX-License-Identifier: Apache-2.0
"""One step as the actor trains it: its claims as they come, and the parts of updates that they make. No IO, no torch.

A streamed step is one update in several parts, each trained while later groups are still being generated; otherwise one
claim brings all groups, and each part is a whole update.

The rows of one claim on their way to the trainer: masked, counted, and filled where a column is outdated. No IO.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relax_core.api.batch import Ragged, RowBatch, RowId
from relax_core.api.bus import Claim, Sealed
from relax_core.api.errors import StaleFence
from relax_core.api.trainer import UpdateOutcome, UpdateResult
from relax_core.api.weights import Version
from relax_core.learn.counts import count, nominal, rows_with_gradient, total


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
        """What may be trained now that these rows are there. Raises StaleFence where one of the groups came before."""
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
        """No more rows come: what is open ends as it is."""
        self._closed = True
        return [StepPart(self.chunks[-1].take([]), 0, self._denominators(), opens=False)]

    def _denominators(self) -> dict[str, float]:
        """Before the end, as if the groups to come were like those that are there."""
        counts = total(count(chunk.rows) for chunk in self.chunks)
        return counts if self._closed else nominal(counts, len(self.groups) / self._wanted)

    def _updates(self, chunk: ClaimedRows) -> list[StepPart]:
        """By whole groups; a step that was closed short may have fewer groups than updates."""
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
    """Whether an update must have changed the weights."""
    return result.outcome is UpdateOutcome.APPLIED and result.grad_norm > 0 and result.lr > 0
