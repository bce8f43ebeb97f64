# SPDX-License-Identifier: Apache-2.0
"""Payloads by block: what one put or write brought stays one block of ragged numpy columns.

`api.bus.PayloadStore` is what varies between buses; `MemoryStore` keeps blocks in this process. `assemble` makes the
columns of a claim from blocks, copying runs of rows and, where a block is wanted whole, nothing.

Which rows are stored, and in which block of the payload store each of their columns lies.

A block is what one put or one write brought: rows stay together as they came. It is freed when its last row is gone.
It holds places, never payloads.

The in-process bus: payloads in the memory of the process that hosts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relax_core.api.batch import AttemptId, Cut, Ragged, RowBatch, RowId
from relax_core.api.bus import BusComponent, Claim, PayloadStore, Sealed
from relax_core.bus.credits import Credits

Place = tuple[int, int]
"""Block key, and the row's index in the block."""


@dataclass(slots=True)
class Block:
    """One put or write."""

    columns: frozenset[str]
    size_bytes: int
    rows: int
    """Rows that still need it."""
    working: int
    """Those of them that are not trained yet; without any it is only kept for a rollback."""


class RowTable:
    """Rows by id, blocks by key, and the samples that are sealed with their number of rows."""

    def __init__(self, room: Credits) -> None:
        self.rows: dict[RowId, list[Place]] = {}
        self.samples: dict[AttemptId, int] = {}
        self.blocks: dict[int, Block] = {}
        self.freed: list[int] = []
        self._credits = room

    def add(self, key: int, ids: Sequence[RowId | None], columns: Iterable[str], size_bytes: int) -> None:
        """A block of rows, new ones or more columns of known ones; None where nobody wants the row any more."""
        wanted = len(ids) - ids.count(None)
        if not wanted:
            self.freed.append(key)
            return
        self.blocks[key] = Block(frozenset(columns), size_bytes, wanted, wanted)
        self._credits.take_bytes(size_bytes)
        for index, row in enumerate(ids):
            if row is None:
                continue
            places = self.rows.get(row)
            if places is None:
                self.rows[row] = [(key, index)]
                self._credits.take_rows(1)
            else:
                places.append((key, index))

    def seal(self, attempt: AttemptId, num_rows: int) -> None:
        self.samples[attempt] = num_rows

    def complete(self, attempt: AttemptId) -> bool:
        """Whether every row of a sealed sample is here."""
        count = self.samples.get(attempt)
        return count is not None and all(RowId(*attempt, row) in self.rows for row in range(count))

    def places(self, ids: Sequence[RowId], columns: Sequence[str]) -> Mapping[str, list[Place]]:
        """Where each column of each row lies, its newest block first; KeyError names the row or column without.

        Columns that lie side by side have one list.
        """
        rows = [self.rows[row] for row in ids]
        patterns = [tuple([key for key, _ in places]) for places in rows]
        newest = {pattern: [self._newest(pattern, name) for name in columns] for pattern in dict.fromkeys(patterns)}
        shared: dict[tuple[int, ...], list[Place]] = {}
        found: dict[str, list[Place]] = {}
        for number, name in enumerate(columns):
            which = tuple(at[number] for at in newest.values())
            if which not in shared:
                shared[which] = [places[newest[p][number]] for places, p in zip(rows, patterns, strict=True)]
            found[name] = shared[which]
        return found

    def _newest(self, pattern: tuple[int, ...], name: str) -> int:
        for at in range(len(pattern) - 1, -1, -1):
            if name in self.blocks[pattern[at]].columns:
                return at
        raise KeyError(name)

    def columns_of(self, row: RowId) -> frozenset[str]:
        """Columns that a row was put with."""
        return self.blocks[self.rows[row][0][0]].columns

    def retire(self, attempts: Iterable[AttemptId], ids: Iterable[RowId]) -> None:
        """Samples were trained; their rows are only kept for a rollback."""
        for attempt in attempts:
            self.samples.pop(attempt, None)
        self._work(ids, 1)

    def revive(self, sealed: Iterable[Sealed], ids: Iterable[RowId]) -> None:
        """A rollback gave them back."""
        for seal in sealed:
            self.seal(seal.attempt, seal.num_rows)
        self._work(ids, -1)

    def _work(self, ids: Iterable[RowId], sign: int) -> None:
        for row in ids:
            self._credits.take_rows(-sign)
            for key, _ in self.rows[row]:
                block = self.blocks[key]
                before, block.working = block.working, block.working - sign
                if (before > 0) != (block.working > 0):
                    self._credits.keep_bytes(sign * block.size_bytes)

    def remove(self, attempts: Iterable[AttemptId], ids: Iterable[RowId], kept: bool = False) -> None:
        """Forget samples and their rows; `kept` says that they had been retired."""
        for attempt in attempts:
            self.samples.pop(attempt, None)
        found = [row for row in ids if row in self.rows]
        if not kept:
            self._work(found, 1)
        for row in found:
            for key, _ in self.rows.pop(row):
                self.blocks[key].rows -= 1
                if not self.blocks[key].rows:
                    self._free(key)

    def _free(self, key: int) -> None:
        self._credits.drop_kept(self.blocks.pop(key).size_bytes)
        self.freed.append(key)


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


class InProcessBus(BusComponent):
    """What a run on one machine needs."""

    async def open_store(self) -> PayloadStore:
        return MemoryStore()
