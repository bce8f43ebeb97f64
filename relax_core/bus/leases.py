# SPDX-License-Identifier: Apache-2.0
"""Everything that somebody outside has of the bus: leases on groups, attempts under way, and credit for rows and bytes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from relax_core.api.batch import AttemptId, RowId
from relax_core.api.bus import Claim, Issue
from relax_core.api.errors import StaleFence

MAX_REMEMBERED = 256
"""Finished leases that are remembered."""


def belongs(name: str, role: str) -> bool:
    """Tell whether a task or holder is a role's: `actor`, `actor.fit` and `actor/rank-0` are the actor's."""
    return name == role or name.startswith((role + ".", role + "/"))


@dataclass(slots=True)
class Lease:
    """One claim that is out."""

    number: int
    fence: int
    task: str
    groups: tuple[int, ...]
    rows: tuple[RowId, ...]
    trains: bool
    expires: float


class Leases:
    """All leases that are out, and which groups each task has taken or finished.

    Life cycle: `granted -> finished | revoked`. Any use renews a lease. It is revoked by its holder, at its expiry,
    when its role registers again, or when a group in it ends.

    Invariants:
    - Every use of a lease that is not out, or with another's fencing token, raises StaleFence: a late holder is harmless.
    - A task never gets a group that is in `done` for it; revoking a lease takes its groups out of there.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.out: dict[int, Lease] = {}
        self.done: dict[str, set[int]] = {}
        """Groups that a task holds or has acknowledged, by task."""
        self.finished: deque[int] = deque(maxlen=MAX_REMEMBERED)
        """Leases that ended by an acknowledgement or a commit, by which a repeated one is recognised."""
        self._next = 1

    def grant(self, task: str, groups: tuple[int, ...], rows: tuple[RowId, ...], trains: bool, now: float) -> Lease:
        lease = Lease(self._next, self._next, task, groups, rows, trains, now + self.lease_s)
        self._next += 1
        self.out[lease.number] = lease
        self.done.setdefault(task, set()).update(groups)
        return lease

    def check(self, claim: Claim, now: float) -> Lease:
        """Renew and return the lease of a claim; StaleFence when it is over or another's."""
        lease = self.out.get(claim.lease)
        if lease is None or lease.fence != claim.fence or lease.expires <= now:
            held = "ended" if lease is None else "expired"
            raise StaleFence(f"lease {claim.lease} of task {claim.task} has {held}; drop the claim and claim again")
        lease.expires = now + self.lease_s
        return lease

    def finish(self, lease: Lease) -> None:
        """End a lease whose groups its task is done with."""
        del self.out[lease.number]
        self.finished.append(lease.number)

    def revoke(self, lease: Lease) -> None:
        """End a lease whose groups go to the next claim of its task."""
        self.out.pop(lease.number, None)
        self.done[lease.task].difference_update(lease.groups)


@dataclass(slots=True)
class Holder:
    """One producer's newest report, and the attempts that were admitted to it since."""

    reported: frozenset[AttemptId] = frozenset()
    seen: int = 0
    """Attempts that had been admitted to it when it made the report."""
    admitted: int = 0
    since: deque[AttemptId] = field(default_factory=deque)


class Holders:
    """Attempts that producers say they work on, by producer. The balance counts from here, so that a lost one is seen.

    Invariant: a report covers the attempts that its holder had been admitted by then; later ones count as on their way.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Holder] = {}

    def admit(self, name: str, issue: Issue) -> None:
        holder = self.by_name.setdefault(name, Holder())
        holder.admitted += len(issue.attempts)
        holder.since.extend(issue.attempts)

    def report(self, name: str, attempts: frozenset[AttemptId], admitted: int) -> None:
        """Take a report unless a later one was here before it."""
        holder = self.by_name.setdefault(name, Holder())
        if admitted < holder.seen:
            return
        for _ in range(min(admitted, holder.admitted) - holder.seen):
            holder.since.popleft()
        holder.seen, holder.reported = min(admitted, holder.admitted), attempts

    def forget(self, role: str) -> None:
        """Forget the producers of a role: its new incarnation holds nothing yet."""
        self.by_name = {name: holder for name, holder in self.by_name.items() if not belongs(name, role)}

    def attempts(self) -> set[AttemptId]:
        """Return all that producers hold or are about to get."""
        return set().union(*((*holder.reported, *holder.since) for holder in self.by_name.values()))


@dataclass(frozen=True, slots=True)
class Reservation:
    """Credit of a put on its way."""

    rows: int
    bytes: int
    holder: str
    expires: float


@dataclass(slots=True)
class Credits:
    """Rows and bytes that producers have on the bus, against what the run allows. They wait; nothing is ever refused.

    Invariants:
    - `rows` and `bytes` are those of stored rows that are not yet trained, and of every reservation.
    - `kept_bytes` are those of blocks that are only kept for a rollback; they have a budget of their own.
    - A reservation ends with its put, when its producer starts anew, or after the time of a lease.
    """

    max_rows: int
    max_bytes: int
    rows: int = 0
    bytes: int = 0
    kept_bytes: int = 0
    reserved: dict[int, Reservation] = field(default_factory=dict)
    """Puts on their way, by the key of their block."""

    def has_room(self, rows: int, size_bytes: int) -> bool:
        """Tell whether a put may come now; an empty bus takes anything, or a large row could never pass."""
        fits = self.rows + rows <= self.max_rows and self.bytes + size_bytes <= self.max_bytes
        return not rows or not self.rows or fits

    def reserve(self, key: int, rows: int, size_bytes: int, holder: str = "", expires: float = math.inf) -> None:
        self.reserved[key] = Reservation(rows, size_bytes, holder, expires)
        self.rows += rows
        self.bytes += size_bytes

    def unreserve(self, key: int) -> None:
        """End a reservation: its rows have come, or never will."""
        found = self.reserved.pop(key, None)
        if found is not None:
            self.rows -= found.rows
            self.bytes -= found.bytes
