# SPDX-License-Identifier: Apache-2.0
"""Payloads by block: what one put or write brought stays one block of ragged numpy columns.

`api.bus.PayloadStore` is what varies between buses; `MemoryStore` keeps blocks in this process. `assemble` makes the
columns of a claim from blocks, copying runs of rows and, where a block is wanted whole, nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relax_core.api.batch import Cut, Ragged, RowBatch
from relax_core.api.bus import Claim, PayloadStore
from relax_core.bus.table import Place

Blocks = Mapping[int, Mapping[str, Ragged]]
Run = tuple[int, int, int]
"""Block key, first row, row after the last."""


class MemoryStore:
    """In this process."""

    shared = False

    def __init__(self) -> None:
        self._blocks: dict[int, Mapping[str, Ragged]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        self._blocks[key] = dict(columns)

    async def get(self, keys: Sequence[int], columns: Sequence[str], part: Cut | None = None) -> Blocks:
        wanted = set(columns)
        found = {key: {n: c for n, c in self._blocks[key].items() if n in wanted} for key in keys}
        return found if part is None else {key: cut(block, part) for key, block in found.items()}

    async def free(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._blocks.pop(key, None)

    async def close(self) -> None:
        self._blocks.clear()


async def read(
    store: PayloadStore,
    claim: Claim,
    places: Mapping[str, Sequence[Place]],
    columns: Sequence[str],
    part: Cut | None = None,
) -> RowBatch:
    """Columns of a claim, from where they lie, or of every row only a part."""
    keys = list(dict.fromkeys(key for at in places.values() for key, _ in at))
    return RowBatch(claim.rows, assemble(places, await store.get(keys, columns, part)))


def cut(block: Mapping[str, Ragged], part: Cut) -> dict[str, Ragged]:
    """A part of every row of a block."""
    return {name: column.cut(part) for name, column in block.items()}


def assemble(places: Mapping[str, Sequence[Place]], blocks: Blocks) -> dict[str, Ragged]:
    """Columns of rows at these places, in their order."""
    columns: dict[str, Ragged] = {}
    last: Sequence[Place] | None = None
    runs: list[Run] = []
    for name, at in places.items():
        if at != last:
            runs, last = _runs(at), at
        columns[name] = _column([(blocks[key][name], start, stop) for key, start, stop in runs])
    return columns


def _runs(places: Sequence[Place]) -> list[Run]:
    """Rows that follow one another in a block, together."""
    runs: list[Run] = []
    key, start, stop = -1, 0, 0
    for block, index in places:
        if block == key and index == stop:
            stop += 1
            continue
        if key >= 0:
            runs.append((key, start, stop))
        key, start, stop = block, index, index + 1
    if key >= 0:
        runs.append((key, start, stop))
    return runs


def _column(parts: Sequence[tuple[Ragged, int, int]]) -> Ragged:
    if not parts:
        return Ragged(np.zeros(0, np.float32), np.zeros(0, np.int64))
    if len(parts) == 1:
        return _slice(*parts[0], {})
    offsets: dict[int, np.ndarray] = {}
    return Ragged.concatenate([_slice(column, start, stop, offsets) for column, start, stop in parts])


def _slice(column: Ragged, start: int, stop: int, known: dict[int, np.ndarray]) -> Ragged:
    """A view of some rows; read-only, since the block is shared."""
    if start == 0 and stop == len(column):
        values, lengths = column.values.view(), column.lengths
    else:
        if id(column) not in known:
            known[id(column)] = column.offsets()
        offsets = known[id(column)]
        values, lengths = column.values[offsets[start] : offsets[stop]], column.lengths[start:stop]
    values.flags.writeable = False
    return Ragged(values, lengths)
