# SPDX-License-Identifier: Apache-2.0
"""Layout of packed rows in the rectangle that a model reads, and the feature of it that predicts each token.

`by_row`: a row a line, padded on the right. Attention is causal, so no real token looks at padding and no mask is needed.
`PrefixTree`: a group a line, and a prefix that rows have in common (their prompt) stands there once; a mask lets every
token see its own row only, so each gets exactly what it would get alone. A row's last token predicts nothing: left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_core.learn import PackedBatch


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a batch: what the model is given, and where to read its outputs."""

    ids: Tensor
    """[lines, width]."""
    before: Tensor
    """[tokens]: flat place of the token before each; meaningless at position 0, which is never trained."""
    positions: Tensor | None = None
    """[lines, width], where they are not 0, 1, 2, ..."""
    mask: Tensor | None = None
    """[lines, 1, width, width] bool: who sees whom, where that is not simply causal."""

    @property
    def lines(self) -> int:
        return self.ids.shape[0]

    @property
    def width(self) -> int:
        return self.ids.shape[1]


def by_row(batch: PackedBatch) -> Layout:
    offset = _offsets(batch)
    width = max(1, int(batch.lengths.max()) - 1)
    place = batch.row_of_token * width + offset
    inputs = offset < batch.lengths[batch.row_of_token] - 1
    ids = batch.tokens.new_zeros(batch.num_rows * width)
    ids[place[inputs]] = batch.tokens[inputs]
    return Layout(ids.view(batch.num_rows, width), place - 1)


def one_line(batch: PackedBatch) -> Layout:
    """All rows one after another; where positions begin anew, attention does too."""
    offset = _offsets(batch)
    inputs = offset < batch.lengths[batch.row_of_token] - 1
    place = inputs.cumsum(0) - inputs.long()
    ids, positions = batch.tokens[inputs], offset[inputs]
    if not len(ids):  # rows of one token alone: nothing is read, but a model wants something
        ids, positions = batch.tokens[:1], offset[:1]
    return Layout(ids[None], place - 1, positions[None])


def whole_rows(batch: PackedBatch) -> Layout:
    """As `by_row`, each row's last token with it: for what is said of a whole row."""
    offset = _offsets(batch)
    width = max(1, int(batch.lengths.max()))
    place = batch.row_of_token * width + offset
    ids = batch.tokens.new_zeros(batch.num_rows * width)
    ids[place] = batch.tokens
    return Layout(ids.view(batch.num_rows, width), place - 1)


class PrefixTree:
    """Rows of a group as a tree of tokens: a node a distinct prefix, numbered along the line of its group.

    Building it is cheap and tells the size of the layout; the mask is made only when asked for.
    """

    def __init__(self, batch: PackedBatch, beside: np.ndarray | None = None) -> None:
        """`beside` [tokens, bytes]: what tokens must have in common as well."""
        self._batch = batch
        self._rows, self._order, self._line = _sorted_inputs(batch)
        self._fresh = _fresh(self._rows, self._line, self._sorted(beside))
        nodes_in_line = np.bincount(self._line, weights=self._fresh.sum(1)).astype(np.int64)
        self.lines, self.width = len(nodes_in_line), max(1, int(nodes_in_line.max()))
        # a shared token is the node of the row above it, so every column carries its last fresh node downwards
        numbers = np.where(self._fresh, np.cumsum(self._fresh).reshape(self._fresh.shape) - 1, -1)
        first = np.cumsum(nodes_in_line) - nodes_in_line
        self._node = np.maximum.accumulate(numbers, axis=0) - first[self._line][:, None]

    def _sorted(self, beside: np.ndarray | None) -> np.ndarray | None:
        """[rows, longest, bytes], as the rows are."""
        if beside is None:
            return None
        lengths = np.asarray(self._batch.rows.columns["tokens"].lengths)
        longest = max(int(lengths.max()), self._rows.shape[1])
        whole = np.zeros((len(lengths), longest, beside.shape[1]), np.uint8)
        whole[np.arange(longest) < lengths[:, None]] = beside
        return whole[self._order, : self._rows.shape[1]]

    def layout(self) -> Layout:
        owner, column = np.nonzero(self._fresh)
        place = self._line[owner] * self.width + self._node[owner, column]
        ids, positions = np.zeros((2, self.lines, self.width), np.int64)
        ids.reshape(-1)[place] = self._rows[owner, column]
        positions.reshape(-1)[place] = column
        arrays = (ids, self._before(), positions, self._mask(owner, column, place))
        return Layout(*(torch.from_numpy(array).to(self._batch.tokens.device) for array in arrays))

    def _before(self) -> np.ndarray:
        batch, longest = self._batch, self._rows.shape[1]
        places = np.zeros((batch.num_rows, longest + 1), np.int64)
        places[self._order, 1:] = self._line[:, None] * self.width + self._node
        before: np.ndarray = places[batch.row_of_token.cpu().numpy(), _offsets(batch).cpu().numpy()]
        return before

    def _mask(self, owner: np.ndarray, column: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Every node sees itself and the nodes before it in its row; padding sees itself, so that softmax is defined."""
        mask = np.broadcast_to(np.eye(self.width, dtype=bool), (self.lines, self.width, self.width)).copy()
        query, ancestor = np.nonzero(np.arange(self._rows.shape[1]) <= column[:, None])
        mask.reshape(-1, self.width)[place[query], self._node[owner[query], ancestor]] = True
        return mask[:, None]


def _offsets(batch: PackedBatch) -> Tensor:
    """[tokens]: position of each token in its row."""
    starts = batch.lengths.cumsum(0) - batch.lengths
    return torch.arange(len(batch.tokens), device=starts.device) - starts[batch.row_of_token]


def _sorted_inputs(batch: PackedBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows without their last token [rows, longest], -1 behind the end, such that like prefixes are neighbours.

    Also the order (index of each sorted row in the batch) and the line (number of its group).
    """
    column = batch.rows.columns["tokens"]
    lengths = np.asarray(column.lengths)
    rows = np.full((len(lengths), max(1, int(lengths.max()))), -1, np.int64)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = column.values
    rows[np.arange(len(lengths)), np.maximum(lengths - 1, 0)] = -1
    rows = rows[:, : max(1, rows.shape[1] - 1)]
    groups = np.unique([row.group for row in batch.rows.ids], return_inverse=True)[1]
    order = np.lexsort((*rows.T[::-1], groups))
    return rows[order], order, groups[order]


def _fresh(rows: np.ndarray, line: np.ndarray, beside: np.ndarray | None = None) -> np.ndarray:
    """[rows, longest] bool: tokens whose prefix the row above does not have."""
    same = np.zeros(rows.shape, bool)
    same[1:] = (rows[1:] == rows[:-1]) & (line[1:] == line[:-1])[:, None]
    if beside is not None:
        same[1:] &= (beside[1:] == beside[:-1]).all(-1)
    shared = np.logical_and.accumulate(same, axis=1)
    return (rows >= 0) & ~shared
