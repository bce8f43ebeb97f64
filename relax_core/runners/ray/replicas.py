# SPDX-License-Identifier: Apache-2.0
"""Which replica plays each role of a run, and what follows when one dies. A state machine; the hub does the looking.

A stateless role may be played again by the replica that Serve makes next, within a budget that refills. A role with
state can't: its death ends the run at its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relax_core.rpc.restart_budget import RestartBudget
from relax_core.runners.context import MAX_RESTARTS

REFILL_S = 600.0
"""A restart longer ago than this is no longer held against its role."""


@dataclass(slots=True)
class Replica:
    """One role's replicas, one after the other."""

    stateless: bool
    pid: int = 0
    lost_at: float | None = None
    """When its replica was found dead; None while one plays."""
    restarts: RestartBudget = field(default_factory=lambda: RestartBudget(MAX_RESTARTS, REFILL_S))
    ended: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaLoss:
    """The consequence of a replica's death."""

    reason: str
    fatal: bool
    """The run can't go on."""


class ReplicaTracker:
    """All roles of a run. Times are the hub's."""

    def __init__(self, stateless: Mapping[str, bool]) -> None:
        self._players = {role: Replica(keeps_none) for role, keeps_none in stateless.items()}

    def missing(self) -> tuple[str, ...]:
        """Roles that no replica has played yet."""
        return tuple(role for role, player in self._players.items() if not player.pid)

    def enter(self, role: str, pid: int, now: float) -> float | None:
        """A replica begins to play; returns since when the role was without one, if it takes over."""
        player = self._players[role]
        since = now if player.lost_at is None else player.lost_at
        again = player.pid != 0
        player.pid, player.lost_at = pid, None
        return since if again else None

    def lost(self, role: str, pid: int, now: float) -> ReplicaLoss | None:
        """A replica died. None where that is no news: after the role's end, or told twice."""
        player = self._players[role]
        if not self.playing(role, pid):
            return None
        player.lost_at = now
        within_budget = player.restarts.spend(now)
        if not player.stateless:
            return ReplicaLoss(f"role {role}: its process (pid {pid}) died", fatal=True)
        if not within_budget:
            times = player.restarts.spent
            return ReplicaLoss(
                f"role {role}: its process died {times} times in {REFILL_S:.0f} s, last pid {pid}", fatal=True
            )
        return ReplicaLoss(f"its process (pid {pid}) died; another takes over", fatal=False)

    def pid(self, role: str) -> int:
        """Return the process id of the role's replica that came last; 0 where none has come."""
        return self._players[role].pid

    def playing(self, role: str, pid: int) -> bool:
        """Whether this replica is the one that counts."""
        player = self._players[role]
        return pid != 0 and player.pid == pid and player.lost_at is None and not player.ended

    def absent(self, role: str, since: float) -> bool:
        """Whether nobody has played the role since it was lost then."""
        player = self._players[role]
        return player.lost_at == since and not player.ended

    def over(self, role: str) -> bool:
        """Whether the role is played no more."""
        return self._players[role].ended

    def end(self, role: str) -> bool:
        """The role is over; False where it was before."""
        player = self._players[role]
        was, player.ended = player.ended, True
        return not was
