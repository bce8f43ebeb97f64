# SPDX-License-Identifier: Apache-2.0
"""The rows of one claim on their way to the trainer: masked, counted, and filled where a column is outdated. No IO."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from relax_core.api.batch import Ragged, RowBatch, RowId
from relax_core.api.bus import Claim
from relax_core.api.version import Version
from relax_core.learn.gradient import rows_with_gradient


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
