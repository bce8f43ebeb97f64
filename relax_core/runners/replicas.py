# SPDX-License-Identifier: Apache-2.0
"""The replicas (Serve processes) that run the roles. When a replica dies, its role gets a new one or the run ends.

This is a pure state machine; the Ray hub watches the processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from relax_core.rpc.waiting import RestartBudget
from relax_core.runners.context import MAX_RESTARTS, REFILL_S

TAKEOVER_S = 120.0
"""Seconds within which a new process must take over the role of a dead process."""


@dataclass(slots=True)
class Replica:
    """The newest replica of one role, and the role's restarts so far."""

    pid: int = 0
    lost_at: float | None = None
    """Time at which the replica was found dead; None while a replica runs."""
    restarts: RestartBudget = field(default_factory=lambda: RestartBudget(MAX_RESTARTS, REFILL_S))
    ended: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaLoss:
    """The consequence of a replica's death."""

    reason: str
    fatal: bool
    """True if the restart budget is spent and the run must end."""


class ReplicaTracker:
    """The replicas of all roles of a run.

    After a loss, the next replica that Serve starts runs the role again, within a restart budget that refills with
    time. The caller passes the present time to each call.
    """

    def __init__(self, roles: Iterable[str]) -> None:
        self._roles = {role: Replica() for role in roles}

    def missing(self) -> tuple[str, ...]:
        """List the roles without any replica so far."""
        return tuple(role for role, replica in self._roles.items() if not replica.pid)

    def enter(self, role: str, pid: int, now: float) -> float | None:
        """Register a new replica; return when the last replica was lost, or None for the first replica."""
        replica = self._roles[role]
        since = now if replica.lost_at is None else replica.lost_at
        again = replica.pid != 0
        replica.pid, replica.lost_at = pid, None
        return since if again else None

    def lost(self, role: str, pid: int, now: float) -> ReplicaLoss | None:
        """Register the death of a replica; return None if the replica was not current or the role had ended."""
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
        return ReplicaLoss(f"its process (pid {pid}) died; a new process starts", fatal=False)

    def pid(self, role: str) -> int:
        """Return the process id of the role's newest replica; 0 without a replica."""
        return self._roles[role].pid

    def is_current(self, role: str, pid: int) -> bool:
        """Return True if this replica runs the role now."""
        replica = self._roles[role]
        return pid != 0 and replica.pid == pid and replica.lost_at is None and not replica.ended

    def absent(self, role: str, since: float) -> bool:
        """Return True if no replica has run the role since it was lost at time `since`."""
        replica = self._roles[role]
        return replica.lost_at == since and not replica.ended

    def has_ended(self, role: str) -> bool:
        return self._roles[role].ended

    def end(self, role: str) -> bool:
        """Mark the role as ended; return False if it had ended before."""
        replica = self._roles[role]
        was, replica.ended = replica.ended, True
        return not was
