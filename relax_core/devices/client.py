# SPDX-License-Identifier: Apache-2.0
"""The turns of one role: `api.turn.Turns`. It holds the sleepers of its process and obeys the arbiter's orders.

Where the plan lets nobody else have the devices, a turn comes at once and nobody is asked. Else a loop polls the service
from the first use on: it brings news of turns, and tells members to sleep and wake.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

from relax_core.api.devices import DeviceLease, Offloadable, OffloadPart, Phase
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, RelaxError
from relax_core.devices.scheduler import DeviceCommand
from relax_core.devices.service import DeviceService, plain, role_of

POLL_S = 10.0
GRACE_S = 30.0
"""Beyond a turn's deadline, which the service notices itself: then the service is in trouble."""
ARBITER = "arbiter"
"""Owes its word where nobody is in the way."""

Waiting = Callable[[str, str, float], AbstractContextManager[Any]]


class NullDeviceLease:
    """`api.turn.DeviceLease` on devices that nobody else has."""

    freed_bytes = 0

    async def become(self, phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float) -> None:
        """Everybody is awake there anyway."""

    async def wanted(self) -> None:
        await asyncio.Event().wait()


class HeldDeviceLease:
    """`api.turn.DeviceLease` on shared devices."""

    def __init__(
        self, client: DeviceLeaseClient, name: str, phase: Phase, holders: Mapping[str, Sequence[OffloadPart]]
    ) -> None:
        self._client, self.name = client, name
        self._is: tuple[Phase, dict[str, tuple[OffloadPart, ...]]] | None = (phase, plain(holders))
        """What it was asked to be last; None while it changes."""
        self.freed_bytes = 0
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def become(self, phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float) -> None:
        """Nothing where it is that already: the arbiter has no news then."""
        if (wanted := (phase, plain(holders))) == self._is:
            return
        self._is, self.answer = None, asyncio.get_running_loop().create_future()
        await self._client.change(self, phase, holders, deadline_s)
        self._is = wanted

    async def wanted(self) -> None:
        """Raises where the arbiter is lost: then the devices are nobody's."""
        await asyncio.shield(self._over)

    def fail(self, error: Exception) -> None:
        for future in (self.answer, self._over):
            if not future.done():
                future.set_exception(error)
                future.exception()  # not every one is awaited

    def take(self, order: DeviceCommand) -> None:
        """News of it."""
        if order.what == "wanted":
            if not self._over.done():
                self._over.set_result(None)
        elif self.answer.done():
            return
        elif order.what == "granted":
            self.freed_bytes += order.freed_bytes
            self.answer.set_result(None)
        else:
            self.answer.set_exception(_Refused(order.reason))


class _Refused(Exception):
    """The deadline passed; says who is in the way."""


class DeviceLeaseClient:
    """One role process's end of the arbiter."""

    def __init__(self, service: DeviceService, owner: str, shared: frozenset[str], waiting: Waiting) -> None:
        self._service, self._owner, self._shared, self._waiting = service, owner, shared, waiting
        self._sleepers: dict[str, Offloadable] = {}
        self._turns: dict[str, HeldDeviceLease] = {}
        self._numbers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._entered: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    # -- what the role calls ------------------------------------------------------------------------------------

    async def join(self, name: str, devices: frozenset[str], sleeper: Offloadable) -> None:
        if devices & self._shared:
            await self._enter()
            self._sleepers[name] = sleeper
            await self._service.join(self._owner, name, devices)

    async def leave(self, name: str) -> None:
        if self._sleepers.pop(name, None) is not None:
            await self._service.leave(self._owner, name)

    @asynccontextmanager
    async def acquire(
        self, devices: frozenset[str], phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float
    ) -> AsyncIterator[DeviceLease]:
        if not devices & self._shared:
            yield NullDeviceLease()
            return
        await self._enter()
        self._numbers += 1
        turn = HeldDeviceLease(self, f"{self._owner}/{self._numbers}", phase, holders)
        self._turns[turn.name] = turn
        try:
            owed_by = await self._service.ask(self._owner, turn.name, devices, phase, holders, deadline_s)
            await self._answer(turn, phase, owed_by, deadline_s)
            yield turn
        finally:
            del self._turns[turn.name]
            await self._service.let_go(self._owner, turn.name)

    async def change(
        self, turn: HeldDeviceLease, phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float
    ) -> None:
        """A turn becomes another."""
        owed_by = await self._service.become(self._owner, turn.name, phase, holders, deadline_s)
        await self._answer(turn, phase, owed_by, deadline_s)

    async def close(self) -> None:
        """The role ends: all that lived here is gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in tuple(self._sleepers):
            with contextlib.suppress(RelaxError):  # without a service nobody needs to know
                await self.leave(name)

    async def _answer(self, turn: HeldDeviceLease, phase: Phase, owed_by: str, deadline_s: float) -> None:
        if self._error is not None:
            raise self._error
        if turn.answer.done() and turn.answer.exception() is None:
            return
        with self._waiting(f"the devices, to {phase}", owed_by or ARBITER, deadline_s):
            try:
                async with asyncio.timeout(deadline_s + GRACE_S):
                    await turn.answer
            except _Refused as refused:
                what = f"a turn to {phase} on shared devices; had by {str(refused) or 'nobody'}"
                raise DeadlineExceeded(role_of(self._owner), what, deadline_s) from None
            except TimeoutError:
                what = f"any word on a turn to {phase}"
                raise DeadlineExceeded(role_of(self._owner), what, deadline_s + GRACE_S) from None

    # -- what the arbiter says ----------------------------------------------------------------------------------

    async def _enter(self) -> None:
        """Once; whoever comes second waits for the first."""
        if self._error is not None:
            raise self._error
        if self._entered is None:
            self._entered = asyncio.ensure_future(self._begin())
        await asyncio.shield(self._entered)  # of whoever is cancelled, the others still wait

    async def _begin(self) -> None:
        await self._service.enter(self._owner)
        self._own(self._listen())

    async def _listen(self) -> None:
        after = 0
        try:
            while True:
                for order in await self._service.poll(self._owner, after, POLL_S):
                    after = order.number
                    self._take(order)
        except Exception as error:
            self._fail(error)

    def _take(self, order: DeviceCommand) -> None:
        if order.what in ("sleep", "wake"):
            self._own(self._obey(order))
        elif (turn := self._turns.get(order.name)) is not None:
            turn.take(order)

    async def _obey(self, order: DeviceCommand) -> None:
        """A member that can't sleep or wake is broken: it is taken off its devices, and its role learns why."""
        freed, sleeper = 0, self._sleepers.get(order.name)
        try:
            if sleeper is not None and order.what == "sleep":
                freed = await sleeper.sleep(order.parts)
            elif sleeper is not None:
                await sleeper.wake(order.parts)
            await self._service.done(self._owner, order.number, freed)
        except Exception as error:
            self._fail(error)
            with contextlib.suppress(RelaxError):  # the first error is the one to tell
                await self.leave(order.name)

    def _fail(self, error: Exception) -> None:
        """Whoever waits for a turn, or asks for one, learns why there is none."""
        self._error = error if isinstance(error, RelaxError) else InfrastructureError(f"turns: {error!r}")
        for turn in self._turns.values():
            turn.fail(self._error)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
