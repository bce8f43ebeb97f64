# SPDX-License-Identifier: Apache-2.0
"""Which rows have a gradient where a zero advantage means there is none (`Algorithm.zero_advantage_skips`). No torch."""

from __future__ import annotations

import numpy as np

from relax_core.api.batch import RowBatch


def rows_with_gradient(rows: RowBatch) -> tuple[int, ...]:
    """Indices of rows in which some trained token has an advantage other than 0 (NaN is other than 0)."""
    column = rows.columns["advantages"]
    moved = (column.values != 0) & rows.columns["loss_mask"].values.astype(bool)
    row_of_token = np.repeat(np.arange(len(rows)), column.lengths)
    counts = np.bincount(row_of_token[moved], minlength=len(rows))
    return tuple(np.flatnonzero(counts).tolist())
