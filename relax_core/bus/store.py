# SPDX-License-Identifier: Apache-2.0
"""Blocks of payloads: the table of stored rows, a payload store in this process, and checks of puts and reads.

A block holds the columns of one put or one write, as ragged numpy arrays; it is freed when its last row is removed.
`api.bus.PayloadStore` differs between buses. The table is the same for all buses and never holds payloads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relax_core.api.batch import AttemptId, Ragged, RowId
from relax_core.api.bus import BusComponent, Claim, PayloadStore, Sealed
from relax_core.api.errors import RelaxError
from relax_core.bus.leases import Credits
from relax_core.rpc import messages

Place = tuple[int, int]
"""Location of a stored row: block key, and index in the block."""
Blocks = Mapping[int, Mapping[str, Ragged]]


@dataclass(slots=True)
class Block:
    """The stored columns of one put or write."""

    columns: frozenset[str]
    size_bytes: int
    rows: int
    """Number of rows that still need the block."""
    working: int
    """Number of these rows that are not trained yet; at 0, the block is kept only for a rollback."""


class RowTable:
    """Rows by id, blocks by key, and the number of rows of each sealed sample.

    Invariants:
    - A block is in `blocks` exactly while a row needs it; afterwards its key is in `freed`.
    - `samples` holds samples that are scored and not yet trained; rows of trained samples stay until `remove`.
    - Credits are charged for each row that is not trained, and for each block with such a row.
    """

    def __init__(self, credit: Credits) -> None:
        self.rows: dict[RowId, list[Place]] = {}
        self.samples: dict[AttemptId, int] = {}
        self.blocks: dict[int, Block] = {}
        self.freed: list[int] = []
        self._credits = credit

    def add(self, key: int, ids: Sequence[RowId | None], columns: Iterable[str], size_bytes: int) -> None:
        """Add a block of new rows, or of more columns of stored rows; an id of None marks a row that is not wanted."""
        wanted = len(ids) - ids.count(None)
        if not wanted:
            self.freed.append(key)
            return
        self.blocks[key] = Block(frozenset(columns), size_bytes, wanted, wanted)
        self._credits.bytes += size_bytes
        before = len(self.rows)
        for index, row in enumerate(ids):
            if row is not None:
                self.rows.setdefault(row, []).append((key, index))
        self._credits.rows += len(self.rows) - before

    def complete(self, attempt: AttemptId) -> bool:
        """Return True if every row of a sealed sample is stored."""
        count = self.samples.get(attempt)
        return count is not None and all(RowId(*attempt, row) in self.rows for row in range(count))

    def places(self, ids: Sequence[RowId], columns: Sequence[str]) -> Mapping[str, list[Place]]:
        """Return, for each column, the place of each row in the newest block that has the column.

        Columns in the same blocks share one list. Raises KeyError with a missing row or column.
        """
        rows = [self.rows[row] for row in ids]
        patterns = [tuple([key for key, _ in places]) for places in rows]
        newest: dict[tuple[int, ...], list[int]] = {}
        for pattern in dict.fromkeys(patterns):
            has = [self.blocks[key].columns for key in pattern]
            if lacking := [name for name in columns if not any(name in held for held in has)]:
                raise KeyError(lacking[0])
            newest[pattern] = [max(at for at, held in enumerate(has) if name in held) for name in columns]
        shared: dict[tuple[int, ...], list[Place]] = {}
        found: dict[str, list[Place]] = {}
        for number, name in enumerate(columns):
            which = tuple(at[number] for at in newest.values())
            if which not in shared:
                shared[which] = [places[newest[p][number]] for places, p in zip(rows, patterns, strict=True)]
            found[name] = shared[which]
        return found

    def first_columns(self, row: RowId) -> frozenset[str]:
        """Return the columns that came with the row's put, without derived columns."""
        return self.blocks[self.rows[row][0][0]].columns

    def retire(self, attempts: Iterable[AttemptId], ids: Iterable[RowId]) -> None:
        """Mark the rows of trained samples as kept only for a rollback."""
        for attempt in attempts:
            self.samples.pop(attempt, None)
        self._change_working(ids, -1)

    def restore(self, sealed: Iterable[Sealed], ids: Iterable[RowId]) -> None:
        """Bring back retired samples after a rollback."""
        for seal in sealed:
            self.samples[seal.attempt] = seal.num_rows
        self._change_working(ids, 1)

    def remove(self, attempts: Iterable[AttemptId], ids: Iterable[RowId], kept: bool = False) -> None:
        """Remove samples and their rows; `kept`: the rows were retired before."""
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
        """Count rows as in use (`sign` 1) or as kept for a rollback (-1), and blocks as in use while a row is."""
        rows = list(ids)
        self._credits.rows += sign * len(rows)
        for key, count in Counter(key for row in rows for key, _ in self.rows[row]).items():
            block = self.blocks[key]
            before, block.working = block.working, block.working + sign * count
            if (before > 0) != (block.working > 0):
                self._credits.bytes += sign * block.size_bytes
                self._credits.kept_bytes -= sign * block.size_bytes


class InProcessBus(BusComponent):
    """A bus that keeps payloads in the memory of its host process; enough for a run on one machine."""

    async def open_store(self) -> PayloadStore:
        return MemoryStore()


class MemoryStore:
    """A payload store in this process."""

    shared = False

    def __init__(self) -> None:
        self._blocks: dict[int, Mapping[str, Ragged]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: int) -> bool:
        return key in self._blocks

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        self._blocks[key] = dict(columns)

    async def get(self, keys: Sequence[int], columns: Sequence[str]) -> Blocks:
        wanted = set(columns)
        return {key: {n: c for n, c in self._blocks[key].items() if n in wanted} for key in keys}

    async def free(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._blocks.pop(key, None)

    async def close(self) -> None:
        self._blocks.clear()


def assemble(places: Mapping[str, Sequence[Place]], blocks: Blocks) -> dict[str, Ragged]:
    """Build the columns of the rows at these places, in order; consecutive rows of one block are not copied."""
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
        parts: list[Ragged] = []
        for key, start, stop in runs:
            column = blocks[key][name]
            if start == 0 and stop == len(column):
                values, lengths = column.values.view(), column.lengths
            else:
                if key not in offsets:
                    offsets[key] = column.offsets()
                first, end = offsets[key][start], offsets[key][stop]
                values, lengths = column.values[first:end], column.lengths[start:stop]
            values.flags.writeable = False  # the block is shared
            parts.append(Ragged(values, lengths))
        if parts:
            columns[name] = parts[0] if len(parts) == 1 else Ragged.concatenate(parts)
        else:
            columns[name] = Ragged(np.zeros(0, np.float32), np.zeros(0, np.int64))
    return columns


@messages.register
class Samples(dict[AttemptId, Sealed]):
    """The seals of a claim's samples by attempt; only the seals are sent between processes."""

    @classmethod
    def of(cls, seals: Iterable[Sealed]) -> Samples:
        return cls({seal.attempt: seal for seal in seals})

    def pack(self) -> tuple[Sealed, ...]:
        return tuple(self.values())

    @classmethod
    def unpack(cls, seals: tuple[Sealed, ...]) -> Samples:
        return cls.of(seals)


def check_seals(ids: Iterable[RowId], sealed: Sequence[Sealed]) -> None:
    """Raise RelaxError unless every sample of a put comes with its seal and as many rows as the seal says."""
    rows: Counter[tuple[int, ...]] = Counter(row[:3] for row in set(ids))
    counts: dict[tuple[int, ...], int] = {seal.attempt: seal.num_rows for seal in sealed}
    if rows == {attempt: count for attempt, count in counts.items() if count}:
        return
    for attempt in rows.keys() | counts.keys():
        if counts.get(attempt) != rows[attempt]:
            raise RelaxError(
                f"bus: put of {tuple(attempt)}: got {rows[attempt]} rows, but its `Sealed` says {counts.get(attempt)}; "
                "put all rows of a sample together with its `Sealed`"
            )


def check_columns(claim: Claim, columns: Mapping[str, Ragged]) -> None:
    """Raise RelaxError unless a write fills its columns for every claimed row."""
    for name, column in columns.items():
        if len(column) != len(claim.rows):
            raise RelaxError(
                f"bus: write of {name}: got {len(column)} rows for a claim of {len(claim.rows)}; write all claimed rows"
            )
