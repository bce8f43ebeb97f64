# SPDX-License-Identifier: Apache-2.0
"""What an algorithm makes of all rows of a step before its first update: `Algorithm.prepare`, from rows to columns."""

from __future__ import annotations

import torch

from relax_core.api.algorithm import Algorithm
from relax_core.api.batch import Ragged, RowBatch
from relax_core.learn.packed import PackedBatch, columns_of


def prepared_columns(algorithm: Algorithm, rows: RowBatch) -> dict[str, Ragged]:
    """Raises ValueError where it does not give what it said, or not for every token."""
    if not len(rows):
        return {}
    batch = PackedBatch(rows, dtype=torch.float64)
    made = algorithm.prepare(batch)
    wanted = {column.name for column in algorithm.prepared()}
    if made.keys() != wanted or any(len(values) != len(batch.tokens) for values in made.values()):
        raise ValueError(f"prepare: got {sorted(made)}; give {sorted(wanted)}, a value for each token")
    return columns_of(batch, made)
