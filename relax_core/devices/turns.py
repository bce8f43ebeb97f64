# SPDX-License-Identifier: Apache-2.0
"""Turns of engine pools that have the same devices: which of them is awake, and the loop that puts the others to sleep.

The policy's engines and auxiliary pools of one role take turns within that role's one lease, so that no other role sees
more than before: it waits for the lease, and gets it whoever is awake. `EngineTurns` decides and `SharedEngines` performs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from relax_core.api.plan import OffloadPart
from relax_core.api.role import Clock, DeviceLease, Phase

POLICY = "rollout"
"""The member that has the turn when nobody asks for one: the policy's engines, by their worker group."""
SETTLE_S = 0.25
"""A member that had nothing to do for so long is idle; between two turns of a sample, or two questions, it is not."""
MIN_TURN_S = 5.0
"""A turn ends no earlier while its holder has work: each change costs a sleep and a wake."""
MAX_TURN_S = 600.0
"""A turn ends no later while others wait."""
POLL_S = 1.0
"""Longest time without a look at the work of all."""
ENGINE: tuple[OffloadPart, ...] = ("weights", "kv")


@dataclass(frozen=True, slots=True)
class TurnRule:
    """When a pool takes a turn although the policy's engines are at work."""

    requests: int
    """As soon as so many requests wait; 0: no number is enough."""
    wait_s: float
    """At the latest after so long."""


class EngineTurns:
    """Decides who of several pools is awake on the same devices. It has no clock and calls nobody.

    A pool: `idle -> waiting -> awake -> idle`, or from `awake` back to `waiting` when its turn was long and others wait.

    Invariants:
    - There is one holder at any time, and it changes only in `update`.
    - A pool takes its turn from the policy when enough requests wait, when it has waited long enough, or when the policy is
      idle; whoever else waits gets the devices when the holder is idle, or its turn has lasted `max_turn_s`.
    - A holder with work keeps its turn for `min_turn_s`, so that every turn does something; and whoever waits gets a turn, as
      after a pool's turn comes the policy's where it waits, and then that of the pool that has waited longest.
    - While somebody waits, `next_at` names the time at which the holder may change with nothing else happening.
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
        """Since when the holder has had nothing to do."""
        self._waiting_since: dict[str, float] = {}
        """By member that is not the holder and has work."""
        self._work: Mapping[str, int] = {}

    def update(self, work: Mapping[str, int], now: float) -> str:
        """Note how much work each member has; return the holder from now on."""
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
        """Say when the holder changes if nothing happens before; None where nobody waits."""
        return min((self._due_at(name) for name in self._waiting_since), default=None)

    def _due_at(self, name: str) -> float:
        """Tell when a member that waits takes the turn of the holder."""
        if self._idle_since is not None:
            return self._idle_since + self._settle_s
        if self.holder != POLICY:
            return self._held_since + self._max_turn_s
        rule, since = self._rules[name], self._waiting_since[name]
        enough = 0 < rule.requests <= self._work.get(name, 0)
        return max(self._held_since + self._min_turn_s, since if enough else since + rule.wait_s)


class TurnMember(Protocol):
    """A pool that takes turns."""

    def work(self) -> int:
        """Count what waits for its engines: requests, or engines to be started or to load weights."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


class SharedEngines:
    """The pools of one role on the same devices, of which at most one is awake.

    `paused -> (a lease) one awake, another, ... -> paused`. Invariant: whoever is not awake is paused, and asleep before
    another one wakes; without a lease all are paused.
    """

    def __init__(self, members: Mapping[str, TurnMember], turns: EngineTurns, clock: Clock) -> None:
        """`members`: by worker group, as the device scheduler knows them too."""
        self._members, self._turns, self._clock = members, turns, clock
        self._changed = asyncio.Event()
        self.awake = ""

    def on_change(self) -> None:
        """Look at the work of all members again."""
        self._changed.set()

    async def wanted(self) -> None:
        """Return when some member has work."""
        while not any(member.work() for member in self._members.values()):
            await self._change(POLL_S)

    def holders(self) -> Mapping[str, tuple[OffloadPart, ...]]:
        """Name what is to be loaded for the member whose turn it is."""
        return {self._due(): ENGINE}

    async def run(self, lease: DeviceLease, until: asyncio.Future[Any], deadline_s: float) -> None:
        """Let members work one after another under a lease that was asked for with `holders`; when `until` is done, pause."""
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
        """Pause whoever is awake."""
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
        """Wait for a change of somebody's work, or for `until`."""
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait(
                {changed, *([until] if until else [])}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            changed.cancel()
            self._changed.clear()
