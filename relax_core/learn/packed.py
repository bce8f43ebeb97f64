# SPDX-License-Identifier: Apache-2.0
"""Rows packed without padding as torch tensors (`LossBatch`), and the outputs of a forward pass by name.

Losses are not reduced here, but in `counts`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from relax_core.api.algorithm import Algorithm
from relax_core.api.batch import SAMPLE_TOKENS, Ragged, RowBatch
from relax_core.learn.counts import charged_to, sample_tokens


class PackedBatch:
    """The rows of this rank's chunk as tensors without padding, in the order of `rows`.

    Invariants:
    - a column is converted to a tensor when it is first read, and then cached;
    - float token columns are 0 at tokens with `loss_mask` 0, so that their NaN or Inf can't reach a gradient;
    - `loss_mask` is 0 at the first token of a row, which no token precedes.
    """

    def __init__(self, rows: RowBatch, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.rows = rows
        self.num_rows = len(rows)
        self.dtype, self.device = dtype, device
        self._token_lengths = rows.columns["tokens"].lengths
        self.lengths = torch.from_numpy(np.array(self._token_lengths, dtype=np.int64)).to(device)
        self.row_of_token = torch.repeat_interleave(torch.arange(self.num_rows, device=device), self.lengths)
        self.tokens = self._tensor("tokens").long()
        self.loss_mask = self._tensor("loss_mask").bool()
        self._columns: dict[str, Tensor] = {}
        starts = (self.lengths.cumsum(0) - self.lengths)[self.lengths > 0]
        mask = self.loss_mask
        if bool(mask[starts].any()):
            row = int(self.row_of_token[starts[mask[starts]]][0])
            raise ValueError(
                f"loss_mask of row {tuple(rows.ids[row])}: got 1 at position 0, which no token precedes; "
                "begin the row with a given token"
            )

    @property
    def advantages(self) -> Tensor:
        return self.column("advantages")

    def has(self, name: str) -> bool:
        return name in self._columns or name in self.rows.columns

    def column(self, name: str) -> Tensor:
        if name not in self._columns:
            self.put(name, self._tensor(name))
        return self._columns[name]

    def put(self, name: str, values: Tensor) -> None:
        """Add a column that the trainer made, [tokens, ...] or [rows, ...]."""
        if values.is_floating_point() and len(values) == len(self.tokens):
            mask = self.loss_mask.reshape(-1, *[1] * (values.dim() - 1))
            values = torch.where(mask, values.to(self.dtype), 0.0)
        self._columns[name] = values

    def sequence_sum(self, values: Tensor) -> Tensor:
        trained = torch.where(self.loss_mask, values, 0.0)
        return trained.new_zeros(self.num_rows).index_add(0, self.row_of_token, trained)

    def sequence_mean(self, values: Tensor) -> Tensor:
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values)).clamp(min=1)

    def sample_mean(self, values: Tensor) -> Tensor:
        if not self.has(SAMPLE_TOKENS.name):  # each sample has one row, or no step has divided its rows
            self.put(SAMPLE_TOKENS.name, torch.from_numpy(sample_tokens(self.rows).values).to(self.device))
        return self.sequence_sum(values) / self.column(SAMPLE_TOKENS.name).to(values.dtype).clamp(min=1)

    def broadcast(self, values: Tensor) -> Tensor:
        return values.index_select(0, self.row_of_token)

    def pair(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split values [rows] of pairs into chosen and rejected, [pairs]: samples 0 and 1 of each group."""
        at = {(row.group, row.sample): index for index, row in enumerate(self.rows.ids)}
        groups = sorted({row.group for row in self.rows.ids})
        if sorted(at) != [(group, sample) for group in groups for sample in (0, 1)] or len(at) != self.num_rows:
            raise ValueError(
                f"pairs: got rows {sorted(at)}; every group needs exactly the samples 0 and 1 in one micro-batch"
            )
        chosen, rejected = ([at[group, sample] for group in groups] for sample in (0, 1))
        return values[chosen], values[rejected]

    def _tensor(self, name: str) -> Tensor:
        if name not in self.rows.columns:
            raise KeyError(
                f"column {name!r} is not in the batch; name it in Algorithm.columns() (have: {list(self.rows.columns)})"
            )
        column = self.rows.columns[name]
        per_row = len(column) == self.num_rows and (column.lengths == 1).all()
        if not per_row and not np.array_equal(column.lengths, self._token_lengths):
            raise ValueError(
                f"column {name!r}: got row lengths {column.lengths.tolist()[:8]}; give one value per token or per row"
            )
        values = column.values
        if values.dtype == np.uint16:
            values = values.astype(np.int32)
        elif not values.flags.writeable:  # arrays from another process are read-only
            values = values.copy()
        return torch.from_numpy(values).to(self.device)


def columns_of(batch: PackedBatch, values: Mapping[str, Tensor]) -> dict[str, Ragged]:
    """Convert tensors [tokens, ...] or [rows, ...] to columns of the bus: float32, or int32 for integers."""
    per_token, per_row = np.asarray(batch.rows.columns["tokens"].lengths), np.ones(batch.num_rows, np.int64)
    columns = {}
    for name, value in values.items():
        own = (value.float() if value.is_floating_point() else value.int()).detach().cpu().numpy()
        columns[name] = Ragged(np.asarray(own), per_token if len(own) == len(batch.tokens) else per_row)
    return columns


class Outputs:
    """The trainers' `PolicyOutputs`: differentiable outputs of a packed chunk by name, usually [tokens]."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = dict(values)

    @property
    def log_probs(self) -> Tensor:
        return self.output("log_probs")

    def output(self, name: str) -> Tensor:
        if name not in self._values:
            raise KeyError(
                f"output {name!r} was not computed; name it in Algorithm.outputs() (have: {list(self._values)})"
            )
        return self._values[name]


def prepared_columns(algorithm: Algorithm, rows: RowBatch) -> dict[str, Ragged]:
    """Return the columns that `Algorithm.prepare` makes from all rows of a step, before the first update.

    Raises PluginError unless `prepare` returns exactly the columns that `prepared` names, with a value for each token.
    """
    if not len(rows):
        return {}
    batch = PackedBatch(rows, dtype=torch.float64)
    with charged_to(algorithm):
        made = algorithm.prepare(batch)
        wanted = {column.name for column in algorithm.prepared()}
        if made.keys() != wanted or any(len(values) != len(batch.tokens) for values in made.values()):
            raise ValueError(f"prepare: got {sorted(made)}; give {sorted(wanted)}, a value for each token")
        return columns_of(batch, made)
