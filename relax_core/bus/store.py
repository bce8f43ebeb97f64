# SPDX-License-Identifier: Apache-2.0
"""Blocks of payloads: a table of which rows lie where, and a store that keeps them in this process.

A block is what one put or one write brought; it stays one set of ragged numpy columns, and is freed when its last row is
gone. `api.bus.PayloadStore` is what varies between buses; the table holds places, never payloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relax_core.api.batch import AttemptId, Cut, Ragged, RowBatch, RowId
from relax_core.api.bus import BusComponent, Claim, PayloadStore, Sealed
from relax_core.bus.leases import Credits

Place = tuple[int, int]
"""Block key, and the row's index in the block."""
Blocks = Mapping[int, Mapping[str, Ragged]]


@dataclass(slots=True)
class Block:
    """One put or write."""

    columns: frozenset[str]
    size_bytes: int
    rows: int
    """Rows that still need it."""
    working: int
    """Rows among them that are not trained yet; without any, the block is only kept for a rollback."""


class RowTable:
    """Rows by id, blocks by key, and the samples that are sealed with their number of rows.

    Invariants:
    - A block is in `blocks` exactly while some row needs it; then its key goes to `freed`.
    - `samples` are those scored and not yet trained; rows of trained samples stay until `remove` takes them.
    - Credits are charged for each row that is not trained, and for each block with such a row.
    """

    def __init__(self, credit: Credits) -> None:
        self.rows: dict[RowId, list[Place]] = {}
        self.samples: dict[AttemptId, int] = {}
        self.blocks: dict[int, Block] = {}
        self.freed: list[int] = []
        self._credits = credit

    def add(self, key: int, ids: Sequence[RowId | None], columns: Iterable[str], size_bytes: int) -> None:
        """Add a block of rows, new ones or more columns of known ones; None where nobody wants the row any more."""
        wanted = len(ids) - ids.count(None)
        if not wanted:
            self.freed.append(key)
            return
        self.blocks[key] = Block(frozenset(columns), size_bytes, wanted, wanted)
        self._credits.bytes += size_bytes
        for index, row in enumerate(ids):
            if row is None:
                continue
            places = self.rows.get(row)
            if places is None:
                self.rows[row] = [(key, index)]
                self._credits.rows += 1
            else:
                places.append((key, index))

    def complete(self, attempt: AttemptId) -> bool:
        """Tell whether every row of a sealed sample is here."""
        count = self.samples.get(attempt)
        return count is not None and all(RowId(*attempt, row) in self.rows for row in range(count))

    def places(self, ids: Sequence[RowId], columns: Sequence[str]) -> Mapping[str, list[Place]]:
        """Return where each column of each row lies, in the newest block that has it.

        Columns that lie side by side have one list. KeyError names a row or column that is missing.
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

    def first_columns(self, row: RowId) -> frozenset[str]:
        """Return the columns that a row was put with."""
        return self.blocks[self.rows[row][0][0]].columns

    def retire(self, attempts: Iterable[AttemptId], ids: Iterable[RowId]) -> None:
        """Keep the rows of samples that were trained only for a rollback."""
        for attempt in attempts:
            self.samples.pop(attempt, None)
        self._change_working(ids, -1)

    def restore(self, sealed: Iterable[Sealed], ids: Iterable[RowId]) -> None:
        """Bring back retired samples after a rollback."""
        for seal in sealed:
            self.samples[seal.attempt] = seal.num_rows
        self._change_working(ids, 1)

    def remove(self, attempts: Iterable[AttemptId], ids: Iterable[RowId], kept: bool = False) -> None:
        """Forget samples and their rows; `kept` says that they had been retired."""
        for attempt in attempts:
            self.samples.pop(attempt, None)
        found = [row for row in ids if row in self.rows]
        if not kept:
            self._change_working(found, -1)
        for row in found:
            for key, _ in self.rows.pop(row):
                self.blocks[key].rows -= 1
                if not self.blocks[key].rows:
                    self._credits.kept_bytes -= self.blocks.pop(key).size_bytes
                    self.freed.append(key)

    def _change_working(self, ids: Iterable[RowId], sign: int) -> None:
        """Move rows, and blocks with their last or first of them, between what is used (1) and what is kept (-1)."""
        for row in ids:
            self._credits.rows += sign
            for key, _ in self.rows[row]:
                block = self.blocks[key]
                before, block.working = block.working, block.working + sign
                if (before > 0) != (block.working > 0):
                    self._credits.bytes += sign * block.size_bytes
                    self._credits.kept_bytes -= sign * block.size_bytes


class InProcessBus(BusComponent):
    """Keeps a run's payloads in the memory of the process that hosts the bus: enough on one machine."""

    async def open_store(self) -> PayloadStore:
        return MemoryStore()


class MemoryStore:
    """Payloads in this process."""

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


def cut(block: Mapping[str, Ragged], part: Cut) -> dict[str, Ragged]:
    """Cut every row of a block to a part."""
    return {name: column.cut(part) for name, column in block.items()}


async def read(
    store: PayloadStore,
    claim: Claim,
    places: Mapping[str, Sequence[Place]],
    columns: Sequence[str],
    part: Cut | None = None,
) -> RowBatch:
    """Read columns of a claim from where they lie, or only a part of every row."""
    keys = list(dict.fromkeys(key for at in places.values() for key, _ in at))
    return RowBatch(claim.rows, assemble(places, await store.get(keys, columns, part)))


def assemble(places: Mapping[str, Sequence[Place]], blocks: Blocks) -> dict[str, Ragged]:
    """Make the columns of rows at these places, in their order; runs of rows are copied, a whole block is only viewed."""
    columns: dict[str, Ragged] = {}
    last: Sequence[Place] | None = None
    runs: list[list[int]] = []
    for name, at in places.items():
        if at != last:
            runs, last = [], at
            for key, index in at:
                if runs and runs[-1][0] == key and runs[-1][2] == index:
                    runs[-1][2] += 1
                else:
                    runs.append([key, index, index + 1])
        offsets: dict[int, np.ndarray] = {}
        parts = [_view(blocks[key][name], start, stop, offsets) for key, start, stop in runs]
        if parts:
            columns[name] = parts[0] if len(parts) == 1 else Ragged.concatenate(parts)
        else:
            columns[name] = Ragged(np.zeros(0, np.float32), np.zeros(0, np.int64))
    return columns


def _view(column: Ragged, start: int, stop: int, offsets: dict[int, np.ndarray]) -> Ragged:
    """Return a view of some rows, read-only since the block is shared; `offsets` remembers those of known columns."""
    if start == 0 and stop == len(column):
        values, lengths = column.values.view(), column.lengths
    else:
        if id(column) not in offsets:
            offsets[id(column)] = column.offsets()
        at = offsets[id(column)]
        values, lengths = column.values[at[start] : at[stop]], column.lengths[start:stop]
    values.flags.writeable = False
    return Ragged(values, lengths)
