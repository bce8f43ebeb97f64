# SPDX-License-Identifier: Apache-2.0
"""Layouts of packed rows as the model's input [lines, width], with the index of the output that predicts each token.

`by_row`: one row per line, padded on the right. Attention is causal, so no token sees padding and no mask is needed.
`PrefixTree`: one group per line, in which a prefix that several rows share (their prompt) is stored once. A mask lets
each token see only its own row, so scores equal those of separate rows. Both layouts omit a row's last token, which
predicts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_core.learn import PackedBatch


@dataclass(frozen=True, slots=True)
class Layout:
    """The model's inputs for a batch, and the indices at which to read its outputs."""

    ids: Tensor
    """Token ids, [lines, width]."""
    before: Tensor
    """Index of each token's predecessor in the flattened `ids`, [tokens]; undefined for a row's first token."""
    spans: np.ndarray
    """Number of tokens in each part whose tokens see one another: a row, or a line of a prefix tree; without padding."""
    positions: Tensor | None = None
    """Position ids, [lines, width]; None if they are 0, 1, 2, ..."""
    mask: Tensor | None = None
    """True where a query (third axis) sees a key (last axis), [lines, 1, width, width]; None: causal attention."""

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
    return Layout(ids.view(batch.num_rows, width), place - 1, _lengths(batch) - 1)


def one_line(batch: PackedBatch) -> Layout:
    """Put all rows on one line, one after another. Attention starts anew where positions restart at 0."""
    offset = _offsets(batch)
    inputs = offset < batch.lengths[batch.row_of_token] - 1
    place = inputs.cumsum(0) - inputs.long()
    ids, positions = batch.tokens[inputs], offset[inputs]
    if not len(ids):  # every row has a single token, but a model needs at least one input
        ids, positions = batch.tokens[:1], offset[:1]
    return Layout(ids[None], place - 1, _lengths(batch) - 1, positions[None])


def whole_rows(batch: PackedBatch) -> Layout:
    """Lay out rows as `by_row` does, but keep each row's last token, for outputs that belong to a row."""
    offset = _offsets(batch)
    width = max(1, int(batch.lengths.max()))
    place = batch.row_of_token * width + offset
    ids = batch.tokens.new_zeros(batch.num_rows * width)
    ids[place] = batch.tokens
    return Layout(ids.view(batch.num_rows, width), place - 1, _lengths(batch))


class PrefixTree:
    """The rows of each group as a tree: each distinct prefix is one node, and a group's nodes fill one line.

    Building the tree is cheap and gives the size of its layout; only `layout` makes the costly mask.
    """

    def __init__(self, batch: PackedBatch, keys: np.ndarray | None = None) -> None:
        """Build the tree. Rows share a token only if its bytes in `keys` [tokens, bytes] are equal too."""
        self._batch = batch
        self._rows, self._order, self._line = _sorted_inputs(batch)
        self._fresh = _fresh(self._rows, self._line, self._sorted(keys))
        nodes_in_line = self._spans = np.bincount(self._line, weights=self._fresh.sum(1)).astype(np.int64)
        self.lines, self.width = len(nodes_in_line), max(1, int(nodes_in_line.max()))
        # a shared token has the same node as in the row above, so each column repeats its last new node downwards
        numbers = np.where(self._fresh, np.cumsum(self._fresh).reshape(self._fresh.shape) - 1, -1)
        first = np.cumsum(nodes_in_line) - nodes_in_line
        self._node = np.maximum.accumulate(numbers, axis=0) - first[self._line][:, None]

    def _sorted(self, keys: np.ndarray | None) -> np.ndarray | None:
        """Return `keys` in the order and shape of the sorted rows, [rows, longest, bytes]."""
        if keys is None:
            return None
        lengths = np.asarray(self._batch.rows.columns["tokens"].lengths)
        longest = max(int(lengths.max()), self._rows.shape[1])
        whole = np.zeros((len(lengths), longest, keys.shape[1]), np.uint8)
        whole[np.arange(longest) < lengths[:, None]] = keys
        return whole[self._order, : self._rows.shape[1]]

    def layout(self) -> Layout:
        owner, column = np.nonzero(self._fresh)
        place = self._line[owner] * self.width + self._node[owner, column]
        ids, positions = np.zeros((2, self.lines, self.width), np.int64)
        ids.reshape(-1)[place] = self._rows[owner, column]
        positions.reshape(-1)[place] = column
        arrays = (ids, self._before(), positions, self._mask(owner, column, place))
        tokens, before, places, mask = (torch.from_numpy(array).to(self._batch.tokens.device) for array in arrays)
        return Layout(tokens, before, self._spans, places, mask)

    def _before(self) -> np.ndarray:
        batch, longest = self._batch, self._rows.shape[1]
        places = np.zeros((batch.num_rows, longest + 1), np.int64)
        places[self._order, 1:] = self._line[:, None] * self.width + self._node
        before: np.ndarray = places[batch.row_of_token.cpu().numpy(), _offsets(batch).cpu().numpy()]
        return before

    def _mask(self, owner: np.ndarray, column: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return the mask: a node sees itself and its ancestors; padding sees itself, so that softmax is defined."""
        mask = np.broadcast_to(np.eye(self.width, dtype=bool), (self.lines, self.width, self.width)).copy()
        query, ancestor = np.nonzero(np.arange(self._rows.shape[1]) <= column[:, None])
        mask.reshape(-1, self.width)[place[query], self._node[owner[query], ancestor]] = True
        return mask[:, None]


def _lengths(batch: PackedBatch) -> np.ndarray:
    """Return the number of tokens of each row, on the host."""
    return np.asarray(batch.rows.columns["tokens"].lengths)


def _offsets(batch: PackedBatch) -> Tensor:
    """Return the position of each token in its row, [tokens]."""
    starts = batch.lengths.cumsum(0) - batch.lengths
    return torch.arange(len(batch.tokens), device=starts.device) - starts[batch.row_of_token]


def _sorted_inputs(batch: PackedBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sorted rows without their last token, their order and their lines; equal prefixes become neighbours.

    Rows: [rows, longest], -1 after a row's end. Order: each sorted row's index in the batch, [rows]. Lines: the number
    of each sorted row's group, [rows].
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


def _fresh(rows: np.ndarray, line: np.ndarray, keys: np.ndarray | None = None) -> np.ndarray:
    """Return True for tokens whose prefix differs from that of the row above, [rows, longest]."""
    same = np.zeros(rows.shape, bool)
    same[1:] = (rows[1:] == rows[:-1]) & (line[1:] == line[:-1])[:, None]
    if keys is not None:
        same[1:] &= (keys[1:] == keys[:-1]).all(-1)
    shared = np.logical_and.accumulate(same, axis=1)
    return (rows >= 0) & ~shared
