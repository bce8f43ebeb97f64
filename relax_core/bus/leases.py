# SPDX-License-Identifier: Apache-2.0
"""Records of what each client of the bus holds: row leases, attempts in progress, credit for rows and bytes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from relax_core.api.batch import AttemptId, RowId
from relax_core.api.bus import Claim, Issue
from relax_core.api.errors import StaleFence

MAX_REMEMBERED = 256
"""Number of finished leases to remember, so that a repeated acknowledgement is recognised."""


def belongs(name: str, role: str) -> bool:
    """Return True if a task or holder belongs to a role: `actor`, `actor.fit` and `actor/rank-0` belong to `actor`."""
    return name == role or name.startswith((role + ".", role + "/"))


@dataclass(slots=True)
class RowLease:
    """A row lease in force: the rows of whole groups, held by one task until `expires`."""

    number: int
    task: str
    groups: tuple[int, ...]
    rows: tuple[RowId, ...]
    trains: bool
    expires: float


class RowLeases:
    """The row leases in force, and the groups that each task has taken or finished.

    Life cycle: `granted -> finished | revoked`. Every use renews a lease. A lease is revoked when its holder releases
    it, when it expires, when its role registers again, when one of its groups ends or loses a member, and when the
    queue commits or undoes a step without it.

    Invariants:
    - Use of a lease that has ended raises StaleFence: a late holder changes nothing.
    - A task never gets a group that is in its `done`, unless the task follows the actor. Revoking a lease removes the
      lease's groups from `done`.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.out: dict[int, RowLease] = {}
        self.done: dict[str, set[int]] = {}
        """task -> groups that the task holds or has acknowledged."""
        self.finished: deque[int] = deque(maxlen=MAX_REMEMBERED)
        """Leases that were acknowledged or committed, so that a repeated acknowledgement is recognised."""
        self._next = 1

    def grant(self, task: str, groups: tuple[int, ...], rows: tuple[RowId, ...], trains: bool, now: float) -> RowLease:
        lease = RowLease(self._next, task, groups, rows, trains, now + self.lease_s)
        self._next += 1
        self.out[lease.number] = lease
        self.done.setdefault(task, set()).update(groups)
        return lease

    def check(self, claim: Claim, now: float) -> RowLease:
        """Renew and return the lease of a claim. Raises StaleFence if the lease has ended."""
        lease = self.out.get(claim.lease)
        if lease is None or lease.expires <= now:
            held = "ended" if lease is None else "expired"
            raise StaleFence(f"row lease {claim.lease} of task {claim.task} has {held}; drop the claim and claim again")
        lease.expires = now + self.lease_s
        return lease

    def finish(self, lease: RowLease) -> None:
        """End a lease whose task has finished with the groups."""
        del self.out[lease.number]
        self.finished.append(lease.number)

    def revoke(self, lease: RowLease) -> None:
        """End a lease; the next claim of its task can get the groups again."""
        self.out.pop(lease.number, None)
        self.done[lease.task].difference_update(lease.groups)


@dataclass(slots=True)
class Holder:
    """A producer's newest report, and the attempts admitted to the producer since."""

    reported: frozenset[AttemptId] = frozenset()
    seen: int = 0
    """Number of attempts that had been admitted to the producer when it made the report."""
    admitted: int = 0
    since: deque[AttemptId] = field(default_factory=deque)


class Holders:
    """The attempts that each producer reports to hold.

    The ledger's balance is checked against these reports, so that a lost attempt is noticed.

    Invariant: a report covers the attempts admitted before the report; attempts admitted later count as held.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Holder] = {}

    def admit(self, name: str, issue: Issue) -> None:
        holder = self.by_name.setdefault(name, Holder())
        holder.admitted += len(issue.attempts)
        holder.since.extend(issue.attempts)

    def report(self, name: str, attempts: frozenset[AttemptId], admitted: int) -> None:
        """Store a report, unless a later report has already arrived."""
        holder = self.by_name.setdefault(name, Holder())
        if admitted < holder.seen:
            return
        for _ in range(min(admitted, holder.admitted) - holder.seen):
            holder.since.popleft()
        holder.seen, holder.reported = min(admitted, holder.admitted), attempts

    def forget(self, role: str) -> None:
        """Forget the producers of a role, because its new registration holds nothing yet."""
        self.by_name = {name: holder for name, holder in self.by_name.items() if not belongs(name, role)}

    def attempts(self) -> set[AttemptId]:
        """Return all attempts that producers hold or are about to receive."""
        return set().union(*((*holder.reported, *holder.since) for holder in self.by_name.values()))


@dataclass(frozen=True, slots=True)
class Reservation:
    """Credit reserved for a put or write in progress."""

    rows: int
    bytes: int
    holder: str
    expires: float


@dataclass(slots=True)
class Credits:
    """Rows and bytes that producers have on the bus, and the run's limits.

    A put that finds no room waits; no put is refused for its size.

    Invariants:
    - `rows` and `bytes` count the stored rows that are not yet trained, and every reservation.
    - `kept_bytes` counts the blocks that are kept only for a rollback; `max_bytes` limits these separately.
    - A reservation ends with its put, when its producer registers again, or after the length of a row lease.
    """

    max_rows: int
    max_bytes: int
    rows: int = 0
    bytes: int = 0
    kept_bytes: int = 0
    reserved: dict[int, Reservation] = field(default_factory=dict)
    """block key -> credit reserved for the put or write in progress."""

    def has_room(self, rows: int, size_bytes: int) -> bool:
        """Return True if a put fits now. An empty bus accepts any put, because a row may exceed the whole limit."""
        fits = self.rows + rows <= self.max_rows and self.bytes + size_bytes <= self.max_bytes
        return not rows or not self.rows or fits

    def reserve(self, key: int, rows: int, size_bytes: int, holder: str = "", expires: float = math.inf) -> None:
        self.reserved[key] = Reservation(rows, size_bytes, holder, expires)
        self.rows += rows
        self.bytes += size_bytes

    def unreserve(self, key: int) -> None:
        """End a reservation, because its rows have arrived or never will arrive."""
        found = self.reserved.pop(key, None)
        if found is not None:
            self.rows -= found.rows
            self.bytes -= found.bytes
