# SPDX-License-Identifier: Apache-2.0
"""The processes that run the roles of a run. When a process dies, its role is restarted in another process, or the run ends.

A state machine; the runner that has a process for each role watches the processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from relax_core.rpc.waiting import RestartBudget
from relax_core.runners.context import MAX_RESTARTS, REFILL_S

TAKEOVER_S = 120.0
"""For another process to take the place of a dead one."""


@dataclass(slots=True)
class Replica:
    """The replica of one role, and what became of those before it."""

    pid: int = 0
    lost_at: float | None = None
    """When its replica was found dead; None while one runs."""
    restarts: RestartBudget = field(default_factory=lambda: RestartBudget(MAX_RESTARTS, REFILL_S))
    ended: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaLoss:
    """The consequence of a replica's death."""

    reason: str
    fatal: bool
    """The run can't go on."""


class ReplicaTracker:
    """The replicas of all roles of a run.

    The replica that Serve makes next runs the role again, within a budget that refills. Times are the caller's.
    """

    def __init__(self, roles: Iterable[str]) -> None:
        self._roles = {role: Replica() for role in roles}

    def missing(self) -> tuple[str, ...]:
        """List the roles that had no replica yet."""
        return tuple(role for role, replica in self._roles.items() if not replica.pid)

    def enter(self, role: str, pid: int, now: float) -> float | None:
        """Note that a replica begins; return since when the role had none, or None for the first replica of the role."""
        replica = self._roles[role]
        since = now if replica.lost_at is None else replica.lost_at
        again = replica.pid != 0
        replica.pid, replica.lost_at = pid, None
        return since if again else None

    def lost(self, role: str, pid: int, now: float) -> ReplicaLoss | None:
        """Note that a replica died. None where that is no news: after the role's end, or told twice."""
        replica = self._roles[role]
        if not self.is_current(role, pid):
            return None
        replica.lost_at = now
        within_budget = replica.restarts.spend(now)
        if not within_budget:
            times = replica.restarts.spent
            return ReplicaLoss(
                f"role {role}: its process died {times} times in {REFILL_S:.0f} s, last pid {pid}", fatal=True
            )
        return ReplicaLoss(f"its process (pid {pid}) died; another one starts", fatal=False)

    def pid(self, role: str) -> int:
        """Return the process id of the role's replica that came last; 0 where none has come."""
        return self._roles[role].pid

    def is_current(self, role: str, pid: int) -> bool:
        """Return True if this replica runs the role now."""
        replica = self._roles[role]
        return pid != 0 and replica.pid == pid and replica.lost_at is None and not replica.ended

    def absent(self, role: str, since: float) -> bool:
        """Tell whether nobody has run the role since it was lost then."""
        replica = self._roles[role]
        return replica.lost_at == since and not replica.ended

    def has_ended(self, role: str) -> bool:
        return self._roles[role].ended

    def end(self, role: str) -> bool:
        """Note that the role has ended; False where it had before."""
        replica = self._roles[role]
        was, replica.ended = replica.ended, True
        return not was
