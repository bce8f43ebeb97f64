# SPDX-License-Identifier: Apache-2.0
"""The arbiter as a service of the run, beside board and bus: owners call it, and poll for the orders meant for them.

Every call is safe to repeat after a lost answer; a poll renews its owner's lease. It looks at its deadlines while somebody
polls: whoever waits for a turn does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from relax_core.api.clock import Clock
from relax_core.api.devices import OffloadPart, Phase
from relax_core.api.errors import InfrastructureError
from relax_core.devices.scheduler import LEASE_S, DeviceCommand, DeviceRequest, DeviceScheduler
from relax_core.rpc.waiting import TimedCondition


class DeviceService(Protocol):
    """What a role's client calls, in this process or through the hub."""

    async def enter(self, owner: str) -> None:
        """Begin to call; one that was there before under this name is gone."""
        ...

    async def join(self, owner: str, name: str, devices: frozenset[str]) -> None: ...

    async def leave(self, owner: str, name: str) -> None: ...

    async def ask(
        self, owner: str, turn: str, devices: frozenset[str], phase: Phase, holders: Mapping[str, Sequence[OffloadPart]],
        deadline_s: float,
    ) -> str:  # fmt: skip
        """Queue for a turn; the answer names who is in the way."""
        ...

    async def become(
        self, owner: str, turn: str, phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float
    ) -> str:
        """Go on in another phase; the answer names who has yet to sleep or wake."""
        ...

    async def let_go(self, owner: str, turn: str) -> None: ...

    async def done(self, owner: str, number: int, freed_bytes: int) -> None:
        """A member of the owner did what an order said."""
        ...

    async def poll(self, owner: str, after: int, wait_s: float) -> tuple[DeviceCommand, ...]:
        """Orders after number `after`; waits up to `wait_s` for one."""
        ...


class LocalDeviceService:
    """Implements `DeviceService`."""

    def __init__(self, clock: Clock, lease_s: float = LEASE_S) -> None:
        self._clock, self._arbiter = clock, DeviceScheduler(lease_s)
        self._letters: dict[str, list[DeviceCommand]] = {}
        self._owners: tuple[str, ...] = ()
        self._changes = TimedCondition(clock)

    async def enter(self, owner: str) -> None:
        self._arbiter.gone([owner], self._clock.now())
        self._arbiter.heard(owner, self._clock.now())
        self._letters[owner] = []
        self._deliver()

    async def join(self, owner: str, name: str, devices: frozenset[str]) -> None:
        self._check(owner)
        self._arbiter.join(owner, name, devices, self._clock.now())
        self._deliver()

    async def leave(self, owner: str, name: str) -> None:
        self._arbiter.leave(owner, name, self._clock.now())
        self._deliver()

    async def ask(
        self, owner: str, turn: str, devices: frozenset[str], phase: Phase, holders: Mapping[str, Sequence[OffloadPart]],
        deadline_s: float,
    ) -> str:  # fmt: skip
        self._check(owner)
        request = DeviceRequest(turn, owner, devices, phase, plain(holders), deadline_s)
        in_the_way = self._arbiter.ask(request, self._clock.now())
        self._deliver()
        return in_the_way

    async def become(
        self, owner: str, turn: str, phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float
    ) -> str:
        self._check(owner)
        request = DeviceRequest(turn, owner, frozenset(), phase, plain(holders), deadline_s)
        in_the_way = self._arbiter.become(request, self._clock.now())
        self._deliver()
        return in_the_way

    async def let_go(self, owner: str, turn: str) -> None:
        self._arbiter.let_go(owner, turn, self._clock.now())
        self._deliver()

    async def done(self, owner: str, number: int, freed_bytes: int) -> None:
        self._check(owner)
        self._arbiter.done(owner, number, freed_bytes, self._clock.now())
        self._deliver()

    async def poll(self, owner: str, after: int, wait_s: float) -> tuple[DeviceCommand, ...]:
        def unread(now: float) -> tuple[DeviceCommand, ...] | None:
            self._check(owner)
            self._arbiter.heard(owner, now)
            self._deliver()
            self._letters[owner] = [order for order in self._letters[owner] if order.number > after]
            return tuple(self._letters[owner]) or None

        return await self._changes.wait_for(unread, wait_s, self._arbiter.next_at) or ()

    async def gone(self, role: str) -> None:
        """A role's process died: what it had is free."""
        self._arbiter.gone([owner for owner in self._arbiter.owners if role_of(owner) == role], self._clock.now())
        self._deliver()

    def _check(self, owner: str) -> None:
        if owner not in self._arbiter.owners:
            raise InfrastructureError(
                f"turns: {owner} was not heard of for {LEASE_S:.0f} s and lost its devices; start the role again"
            )

    def _deliver(self) -> None:
        orders, self._arbiter.orders = self._arbiter.orders, []
        for order in orders:
            self._letters.setdefault(order.owner, []).append(order)
        known, self._owners = self._owners, self._arbiter.owners
        if orders or known != self._owners:  # whoever is no owner any more learns it by its poll
            self._changes.notify()


def owner_of(role: str, incarnation: int) -> str:
    """How a role's process is named among owners."""
    return f"{role}#{incarnation}"


def role_of(owner: str) -> str:
    return owner.partition("#")[0]


def plain(holders: Mapping[str, Sequence[OffloadPart]]) -> dict[str, tuple[OffloadPart, ...]]:
    return {name: tuple(parts) for name, parts in holders.items()}
