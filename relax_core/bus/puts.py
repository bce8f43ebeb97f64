# SPDX-License-Identifier: Apache-2.0
"""How rows come to the bus: credit before they are stored, then their samples' seals; and how attempts are dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relax_core.api.batch import AttemptId, RowId
from relax_core.api.bus import Sealed
from relax_core.api.errors import StaleFence
from relax_core.api.outcome import DropReason
from relax_core.bus import selection
from relax_core.bus.checks import check_seals
from relax_core.bus.group import Group
from relax_core.bus.parts import Parts


class Puts(Parts):
    """What producers give."""

    def reserve(self, attempts: Sequence[AttemptId], rows: int, size_bytes: int, now: float = 0.0) -> int | None:
        """Credit for a put: the key of its block, or None for now. It comes back if the producer does not end it.

        Groups that the next step needs always get it, or a bus full of unfinished groups would never empty.
        """
        self._give_up(self.credits.overdue(now))
        if not self.credits.fits(rows, size_bytes):
            first = sorted(self.ledger.live.values(), key=selection.claim_order)[: self.settings.groups_per_step]
            if {group.number for group in first}.isdisjoint(attempt.group for attempt in attempts):
                return None
        key = self.new_key()
        holders = {group.holder for a in attempts if (group := self.ledger.live.get(a.group)) is not None}
        holder = min(holders, default="")
        self.credits.reserve(key, rows, size_bytes, holder, now + self.settings.lease_s)
        return key

    def check_put(self, key: int) -> None:
        """StaleFence where its credit has been taken back, and with it what was stored."""
        if key not in self.credits.reserved:
            raise StaleFence(f"bus: put of block {key}: its producer was given up meanwhile; put the samples again")

    def unreserve(self, key: int) -> None:
        """A put that will not end gives its credit back."""
        self.credits.unreserve(key)

    def new_key(self) -> int:
        """Names a block of payloads before it is stored."""
        self._next_key += 1
        return self._next_key

    def put(
        self, key: int, ids: Sequence[RowId], columns: Sequence[str], size_bytes: int, sealed: Sequence[Sealed]
    ) -> None:
        """A stored block of rows and the seals of their samples. What has ended meanwhile or came before is ignored."""
        rows: dict[AttemptId, list[RowId]] = {}
        for row in ids:
            rows.setdefault(row.attempt_id, []).append(row)
        check_seals(ids, sealed)
        self.credits.unreserve(key)
        taken = {seal.attempt for seal in sealed if self._seal(seal, rows.get(seal.attempt, ()), columns)}
        self.table.add(key, [row if row.attempt_id in taken else None for row in ids], columns, size_bytes)
        for number in sorted({seal.attempt.group for seal in sealed}):
            self._close_if_done(number)
        if not self._overdue:
            self._shed(DropReason.EXPIRED)

    def _seal(self, seal: Sealed, rows: Sequence[RowId], columns: Sequence[str]) -> bool:
        """Whether the rows of the sample are wanted."""
        found = self.ledger.member(seal.attempt)
        if found is None or found[1].sealed is not None:
            self.report.given_up({seal.attempt: seal.trained_tokens})
            return False
        group, member = found
        if not seal.outcome.judged:
            self.report.dropped(seal.attempt, seal, DropReason.FAILED)
            self.ledger.drop(group, member, DropReason.FAILED)
            return False
        self.ledger.seal(group, member, seal, rows, self.version.step)
        self.table.seal(seal.attempt, seal.num_rows)
        for name in columns:
            group.first_columns[name] = group.first_columns.get(name, 0) + len(rows)
        return True

    def _close_if_done(self, number: int) -> None:
        """A group whose members have all come in needs enough valid ones."""
        group = self.ledger.live.get(number)
        if group is not None and group.complete:
            valid = len(group.valid)
            if valid == 0 or valid < self.settings.min_valid:
                self._end(group, DropReason.TOO_FEW_VALID)

    def drop(self, attempts: Sequence[AttemptId], reason: DropReason, regenerate: bool = False) -> None:
        """End attempts; with `regenerate` what is left of their groups ends too and is issued as another try."""
        touched: dict[int, Group] = {}
        for attempt in attempts:
            if (found := self.ledger.member(attempt)) is None:
                continue
            group, member = found
            touched[group.number] = group
            rows = [row for row in group.rows if row.attempt_id == attempt]
            self._tell_dropped(group, [attempt], reason)
            self.ledger.drop(group, member, reason)
            for row in rows:
                _uncount(group, row, self.table.columns_of(row))
            self.table.remove([attempt], rows)
        for number in sorted(touched):
            self._revoke_all(touched[number])
            if regenerate:
                self._end(touched[number], DropReason.REGENERATED, again=True, retry=1)
            else:
                self._close_if_done(number)


def _uncount(group: Group, row: RowId, columns: Iterable[str]) -> None:
    for name in columns:
        if name in group.first_columns:
            group.first_columns[name] -= 1
