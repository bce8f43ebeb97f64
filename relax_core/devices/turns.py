# SPDX-License-Identifier: Apache-2.0
"""Turns of engine pools on the same devices: the rules that choose the awake pool, and the loop that pauses the rest.

The policy's engines and the auxiliary pools of one role take turns within the single device lease of that role. A role
that waits for the lease gets it no matter which pool is awake. `EngineTurns` decides; `SharedEngines` pauses and wakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from relax_core.api.plan import OffloadPart
from relax_core.api.role import Clock, DeviceLease, Phase

POLICY = "rollout"
"""Worker group of the policy's engines, the member that has the turn at first."""
SETTLE_S = 0.25
"""Seconds without work until a member counts as idle; the gap between two turns of a sample is shorter."""
MIN_TURN_S = 5.0
"""Shortest turn of the policy's engines while they have work, because each change costs an offload and an onload."""
MAX_TURN_S = 600.0
"""Longest turn of an auxiliary pool while another member waits."""
POLL_S = 1.0
"""Most seconds between two checks of all members' work."""
ENGINE: tuple[OffloadPart, ...] = ("weights", "kv")


@dataclass(frozen=True, slots=True)
class TurnRule:
    """The conditions under which a pool gets its turn although the policy's engines have work."""

    requests: int
    """Number of waiting requests at which the pool gets its turn; 0: no number is enough."""
    wait_s: float
    """Seconds after which the pool gets its turn with any number of requests."""


class EngineTurns:
    """A pure state machine that decides which of several pools is awake on the same devices.

    A pool: `idle -> waiting -> awake -> idle`, or from `awake` back to `waiting` after a long turn if a member waits.

    Invariants:
    - There is exactly one holder of the turn, and it changes only in `update`.
    - A pool takes the turn from the policy's engines when enough requests wait, when it has waited long enough, or when
      these engines are idle. A pool gives up its turn to a waiting member when idle, or after `max_turn_s`.
    - The policy's engines keep their turn for `min_turn_s` while they have work, so that every turn makes progress.
    - Every waiting member gets a turn: the policy's engines first, then the pool that has waited longest.
    - While a member waits, `next_at` is the time at which the holder changes if no work arrives or ends.
    """

    def __init__(
        self, rules: Mapping[str, TurnRule], now: float = 0.0, *, settle_s: float = SETTLE_S,
        min_turn_s: float = MIN_TURN_S, max_turn_s: float = MAX_TURN_S,
    ) -> None:  # fmt: skip
        self._rules, self._settle_s = dict(rules), settle_s
        self._min_turn_s, self._max_turn_s = min_turn_s, max_turn_s
        self.holder = POLICY
        self._held_since = now
        self._idle_since: float | None = now
        """Time at which the holder ran out of work; None while the holder has work."""
        self._waiting_since: dict[str, float] = {}
        """Member with work that does not hold the turn -> time since which the member waits."""
        self._work: Mapping[str, int] = {}

    def update(self, work: Mapping[str, int], now: float) -> str:
        """Record the amount of work of each member; return the holder of the turn from now on."""
        self._work = dict(work)
        for name in (POLICY, *self._rules):
            if name == self.holder or not work.get(name, 0):
                self._waiting_since.pop(name, None)
            else:
                self._waiting_since.setdefault(name, now)
        if work.get(self.holder, 0):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        due = [name for name in self._waiting_since if now >= self._due_at(name)]
        if due:
            before = self.holder
            first = POLICY if POLICY in due else min(due, key=lambda name: self._waiting_since[name])
            del self._waiting_since[first]
            self.holder, self._held_since, self._idle_since = first, now, None
            if work.get(before, 0):
                self._waiting_since[before] = now
        return self.holder

    def next_at(self) -> float | None:
        """Return when the holder changes if the work stays as it is; None if no member waits."""
        return min((self._due_at(name) for name in self._waiting_since), default=None)

    def _due_at(self, name: str) -> float:
        """Return when a waiting member takes the turn from the holder."""
        if self._idle_since is not None:
            return self._idle_since + self._settle_s
        if self.holder != POLICY:
            return self._held_since + self._max_turn_s
        rule, since = self._rules[name], self._waiting_since[name]
        enough = 0 < rule.requests <= self._work.get(name, 0)
        return max(self._held_since + self._min_turn_s, since if enough else since + rule.wait_s)


class TurnMember(Protocol):
    """An engine pool that takes turns on shared devices."""

    def work(self) -> int:
        """Return the number of open requests plus the number of engines that wait to start or to load weights."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


class SharedEngines:
    """The pools of one role on the same devices, of which at most one is awake.

    `paused -> (lease granted) one pool awake, then another, ... -> paused`. Invariants: every pool except `awake` is
    paused; the awake pool is offloaded before another pool wakes; without a lease all pools are paused.
    """

    def __init__(self, members: Mapping[str, TurnMember], turns: EngineTurns, clock: Clock) -> None:
        """`members`: pools by worker group, which is also their name in the device scheduler."""
        self._members, self._turns, self._clock = members, turns, clock
        self._changed = asyncio.Event()
        self.awake = ""

    def on_change(self) -> None:
        """Make waiting calls check the members' work again, because it may have changed."""
        self._changed.set()

    async def wanted(self) -> None:
        """Wait until a member has work."""
        while not any(member.work() for member in self._members.values()):
            await self._change(POLL_S)

    def holders(self) -> Mapping[str, tuple[OffloadPart, ...]]:
        """Return the member whose turn it is, with the parts that it needs loaded."""
        return {self._due(): ENGINE}

    async def run(self, lease: DeviceLease, until: asyncio.Future[Any], deadline_s: float) -> None:
        """Let members work in turns under a lease that was acquired with `holders`; pause all when `until` is done."""
        await self._wake(lease, self._turns.holder, deadline_s)
        while not until.done():
            if (due := self._due()) != self.awake:
                await self.pause()
                await self._wake(lease, due, deadline_s)
                continue
            at = self._turns.next_at()
            await self._change(POLL_S if at is None else min(POLL_S, max(0.0, at - self._clock.now())), until)
        await self.pause()

    async def pause(self) -> None:
        """Pause the pool that is awake."""
        if self.awake:
            await self._members[self.awake].pause()
            self.awake = ""

    async def _wake(self, lease: DeviceLease, name: str, deadline_s: float) -> None:
        phase: Phase = "generate" if name == POLICY else "answer"
        await lease.change_phase(phase, {name: ENGINE}, deadline_s)
        await self._members[name].resume()
        self.awake = name

    def _due(self) -> str:
        return self._turns.update({name: member.work() for name, member in self._members.items()}, self._clock.now())

    async def _change(self, within_s: float, until: asyncio.Future[Any] | None = None) -> None:
        """Wait for a change of the members' work, for `until`, or for `within_s`."""
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait(
                {changed, *([until] if until else [])}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            changed.cancel()
            self._changed.clear()
