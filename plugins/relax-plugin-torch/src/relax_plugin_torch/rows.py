# SPDX-License-Identifier: Apache-2.0
"""Rows that this model can't read are refused by name, before torch would fail with an index or go on with nonsense."""

from __future__ import annotations

import numpy as np

from relax_core.api import RowBatch


def check_rows(rows: RowBatch, vocab_size: int, max_context: int) -> None:
    """Raise ValueError for an empty row, one longer than the model's context, or a token it does not have."""
    column = rows.columns["tokens"]
    if not len(column):
        return
    length = np.asarray(column.lengths)
    for row in (int(length.argmin()), int(length.argmax())):
        if not 0 < length[row] <= (max_context or length[row]):
            raise ValueError(
                f"row {tuple(rows.ids[row])}: got {length[row]} tokens; the model reads 1 to {max_context}"
            )
    wrong = (column.values < 0) | (column.values >= vocab_size)
    if wrong.any():
        at = int(np.argmax(wrong))
        row = int(np.searchsorted(column.offsets(), at, side="right")) - 1
        raise ValueError(
            f"row {tuple(rows.ids[row])}: got token {int(column.values[at])}; the model has 0 to {vocab_size - 1}"
        )
