# SPDX-License-Identifier: Apache-2.0
"""Which rows are stored, and in which block of the payload store each of their columns lies.

A block is what one put or one write brought: rows stay together as they came. It is freed when its last row is gone.
It holds places, never payloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from relax_core.api.batch import AttemptId, RowId
from relax_core.api.bus import Sealed
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


class Table:
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
