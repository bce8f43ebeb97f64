# SPDX-License-Identifier: Apache-2.0
"""Leases: who may work on which groups, until when. A fencing token makes a late holder harmless.

Any use of a lease renews it. It ends by its holder, at its expiry, when its role registers again, or when a group
in it ends; then every use raises StaleFence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from relax_core.api.batch import RowId
from relax_core.api.bus import Claim
from relax_core.api.errors import StaleFence

REMEMBERED = 256
"""Finished leases that a repeated acknowledgement is known by."""


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
    """All that are out, and which groups each task has taken or finished."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.out: dict[int, Lease] = {}
        self.done: dict[str, set[int]] = {}
        """By task: groups it holds or has acknowledged."""
        self._finished: deque[int] = deque(maxlen=REMEMBERED)
        self._next = 1

    def grant(self, task: str, groups: tuple[int, ...], rows: tuple[RowId, ...], trains: bool, now: float) -> Lease:
        lease = Lease(self._next, self._next, task, groups, rows, trains, now + self.lease_s)
        self._next += 1
        self.out[lease.number] = lease
        self.done.setdefault(task, set()).update(groups)
        return lease

    def check(self, claim: Claim, now: float) -> Lease:
        """The lease of a claim, renewed; StaleFence where it is another's or nobody's."""
        lease = self.out.get(claim.lease)
        if lease is None or lease.fence != claim.fence or lease.expires <= now:
            held = "ended" if lease is None else "expired"
            raise StaleFence(f"lease {claim.lease} of task {claim.task} has {held}; drop the claim and claim again")
        lease.expires = now + self.lease_s
        return lease

    def finish(self, lease: Lease) -> None:
        """The holder is done with its groups."""
        del self.out[lease.number]
        self._finished.append(lease.number)

    def is_finished(self, claim: Claim) -> bool:
        """Whether its holder has said before that it is done."""
        return claim.lease in self._finished

    def revoke(self, lease: Lease) -> None:
        """Its groups go to the next claim of the task."""
        self.out.pop(lease.number, None)
        self.done[lease.task].difference_update(lease.groups)

    def forget(self, group: int) -> None:
        """A group ended or is issued again: no task has seen it."""
        for done in self.done.values():
            done.discard(group)

    def expired(self, now: float) -> Iterator[Lease]:
        return iter([lease for lease in self.out.values() if lease.expires <= now])

    def holding(self, group: int) -> list[Lease]:
        return [lease for lease in self.out.values() if group in lease.groups]

    def of_role(self, role: str) -> list[Lease]:
        return [lease for lease in self.out.values() if belongs(lease.task, role)]

    def next_expiry(self) -> float | None:
        return min((lease.expires for lease in self.out.values()), default=None)


def belongs(name: str, role: str) -> bool:
    """Whether a task or holder is a role's: `actor`, `actor.fit` and `actor/rank-0` are the actor's."""
    return name == role or name.startswith((role + ".", role + "/"))
