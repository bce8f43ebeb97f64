# SPDX-License-Identifier: Apache-2.0
"""Keeps the engines of a pool as they are to be: paused, asleep, with the newest weights, replaced where they failed.

It speaks with the engines and tells the router what came of it; what runs where is none of its business. The only way
into service, for a new engine and for one that was not trusted, is `_admit`, with the newest weights proved.

Which parts of a pool's engines sleep, and who needs their weights awake. It calls no engine.

Loading weights and starting an engine need the devices: both wait while weights sleep, and weights do not fall asleep
under them. Where weights never sleep nobody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

from relax_core.api.clock import Clock
from relax_core.api.devices import OffloadPart
from relax_core.api.errors import InfrastructureError, RelaxError
from relax_core.api.trainer import Chosen
from relax_core.api.weights import Manifest, Receipt, Version
from relax_core.engines.router import Action, Router
from relax_core.engines.slot import EngineSlot
from relax_core.engines.status import EngineState, EngineStatus
from relax_core.engines.weight_updater import WeightUpdates
from relax_core.rpc.waiting import start_all


class OffloadState:
    """The state of a pool's engines, as its devices' arbiter wants it."""

    def __init__(self, able: Iterable[OffloadPart] = ()) -> None:
        self._able: frozenset[OffloadPart] = frozenset(able)
        self.asleep: frozenset[OffloadPart] = frozenset()
        """What every engine is to be brought to."""
        self.num_waiting = 0
        """Users that wait for weights to be awake."""
        self._closed = False
        self._users: Counter[asyncio.Task[Any] | None] = Counter()
        self._changed = asyncio.Condition()

    def of(self, parts: Iterable[OffloadPart]) -> frozenset[OffloadPart]:
        """Those that may sleep at all."""
        return self._able.intersection(parts)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Weights are awake, and stay so meanwhile; a user may be one again."""
        user = asyncio.current_task()
        self.num_waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._users[user] > 0 or not self._closed)
                self._users[user] += 1
        finally:
            self.num_waiting -= 1
        try:
            yield
        finally:
            self._users[user] -= 1
            self._users += Counter()  # drops those at zero
            async with self._changed:
                self._changed.notify_all()

    async def lie_down(self, parts: frozenset[OffloadPart]) -> None:
        """These are to sleep from now on; returns when nobody uses them any more."""
        self._closed = self._closed or "weights" in parts
        async with self._changed:
            await self._changed.wait_for(lambda: not (self._closed and self._users.total()))
        self.asleep |= parts

    def rise(self, parts: frozenset[OffloadPart]) -> None:
        """These are to wake."""
        self.asleep -= parts

    async def risen(self) -> None:
        """All engines are as they are to be."""
        self._closed = "weights" in self.asleep
        async with self._changed:
            self._changed.notify_all()


INTERRUPT_S = 0.2
"""Between two words to an engine that should let its requests go."""
MODEL_FACTS = {"fingerprint": "all load one folder: its files differ between machines, or changed",
               "vocab_size": "ids must mean the same to all"}  # fmt: skip
Arrived = Callable[[Receipt], Awaitable[None]]
Tell = Callable[[str, str, float], Awaitable[None]]
Do = Callable[[Sequence[Action]], None]


class EngineSupervisor:
    """The engines of one pool, from start to end. `do`: what the router wants done; it is called at every change."""

    def __init__(
        self, slots: Mapping[str, EngineSlot], router: Router, rest: OffloadState, clock: Clock, feed: WeightUpdates,
        tell: Tell, do: Do, serve_at_start: bool,
    ) -> None:  # fmt: skip
        self._slots, self._router, self._rest, self._clock = slots, router, rest, clock
        self._feed, self._tell, self._do, self._serve_at_start = feed, tell, do, serve_at_start
        self.devices_wanted = asyncio.Event()
        """Set when an engine is to be started or to load weights."""
        self._facts: Mapping[str, Any] = {}
        self._newest: tuple[Manifest, Chosen] | None = None
        self._updates: dict[str, asyncio.Lock] = {name: asyncio.Lock() for name in slots}
        self._paused = False

    async def start(self) -> Mapping[str, Any]:
        """All engines; returns the first one's facts after checking that all hold the same model."""
        found = await start_all(*(slot.start() for slot in self._slots.values()))
        self._facts = found[0]
        for facts in found:
            self._check_model(facts)
        self._router.knows(int(self._facts.get("vocab_size", 0)), int(self._facts.get("max_context", 0)))
        for slot in self._slots.values():
            slot.on_loading = functools.partial(self._router.loading, slot.name)
            self._admit(slot, self._state(slot).life)
        return self._facts

    def _check_model(self, facts: Mapping[str, Any]) -> None:
        for what, fix in MODEL_FACTS.items():
            if (have := facts.get(what)) != (want := self._facts.get(what)):
                raise InfrastructureError(f"an engine has the {what} {have}, another {want}; {fix}")

    def _state(self, slot: EngineSlot) -> EngineState:
        return self._router.engines[slot.name]

    def _up(self) -> list[EngineSlot]:
        """Engines that are not being replaced."""
        return [slot for slot in self._slots.values() if self._state(slot).standing is not EngineStatus.OUT]

    # -- pausing ------------------------------------------------------------------------------------------------

    async def settle(self, paused: bool) -> None:
        """Bring every engine to where the pool is, paused or not; one that fails is replaced."""
        self._paused = paused
        await asyncio.gather(*(self._settle(slot) for slot in self._up()))

    async def _settle(self, slot: EngineSlot) -> None:
        with self.trusting(slot):
            await self._follow_pause(slot)

    async def _follow_pause(self, slot: EngineSlot) -> None:
        async with slot.settling:
            while slot.paused != self._paused:
                if slot.paused:
                    await slot.resume()
                    self._router.release(slot.name, "paused", self._clock.now())
                    self._do(())
                else:
                    self._router.hold(slot.name, "paused")
                    if not await slot.pause():
                        await self._interrupt(slot)

    async def _interrupt(self, slot: EngineSlot) -> None:
        """Take an engine's requests back with the tokens they have; one that can't abort runs them to their end.

        Asked again and again: a request may still be on its way to the engine when it is told to let go.
        """
        while self._state(slot).running:
            if ids := self._router.let_go(slot.name):
                with contextlib.suppress(NotImplementedError):  # it runs them to their end
                    await slot.abort(ids)
            await slot.stirred(INTERRUPT_S)

    # -- sleeping -----------------------------------------------------------------------------------------------

    async def sleep(self, parts: Sequence[OffloadPart]) -> int:
        """Free the engines' memory; bytes really freed. The pool is paused."""
        await self._rest.lie_down(self._rest.of(parts))
        return sum(await asyncio.gather(*(self._lay(slot) for slot in self._slots.values())))

    async def wake(self, parts: Sequence[OffloadPart]) -> None:
        self._rest.rise(self._rest.of(parts))
        await asyncio.gather(*(self._lay(slot) for slot in self._slots.values()))
        await self._rest.risen()

    async def _lay(self, slot: EngineSlot) -> int:
        """Bring an engine to where the pool is, asleep or awake; one that fails is replaced. Bytes that it freed."""
        with self.trusting(slot):
            return await self._follow_rest(slot)
        return 0

    async def _follow_rest(self, slot: EngineSlot) -> int:
        async with slot.settling:
            return await slot.rest(self._rest.asleep)

    @contextlib.asynccontextmanager
    async def _on_devices(self) -> AsyncIterator[None]:
        """For who starts an engine or loads weights into one."""
        self.devices_wanted.set()
        async with self._rest.awake():
            yield

    # -- weights ------------------------------------------------------------------------------------------------

    def newest(self) -> Version:
        """The newest version among serving engines; all engines while none serves."""
        serving = [slot for slot in self._slots.values() if self._state(slot).standing is EngineStatus.SERVING]
        return max(slot.version for slot in serving or self._slots.values())

    async def update(self, manifest: Manifest, transport: Chosen, arrived: Arrived | None) -> tuple[str, ...]:
        """Bring every engine to a version; names those that proved it. One that fails or is too slow is replaced."""
        self._newest = (manifest, transport)
        names = await asyncio.gather(*(self._update(slot, arrived) for slot in self._up()))
        return tuple(name for name in names if name)

    async def _update(self, slot: EngineSlot, arrived: Arrived | None) -> str:
        life, receipt = self._state(slot).life, None
        with self.trusting(slot):
            receipt = await self._bring(slot)
        if not self._admit(slot, life):
            return ""
        if arrived is not None and receipt is not None:
            await arrived(receipt)
        return slot.name

    async def _bring(self, slot: EngineSlot) -> Receipt | None:
        """The last of its receipts; None where it had the newest version."""
        receipt = None
        async with self._updates[slot.name]:
            while self._newest is not None and self._behind(slot):
                async with self._on_devices(), self._still(slot):
                    receipt = await self._feed.bring(slot, *self._newest)
        return receipt

    def _behind(self, slot: EngineSlot) -> bool:
        return self._newest is not None and slot.version[1:] < self._newest[0].version[1:]

    @contextlib.asynccontextmanager
    async def _still(self, slot: EngineSlot) -> AsyncIterator[None]:
        """Nothing runs on an engine that takes weights only then; what ran goes on elsewhere, or here afterwards."""
        if slot.capabilities.in_flight_updates:
            yield
            return
        self._router.hold(slot.name, "updating")
        try:
            await self._interrupt(slot)
            yield
        finally:
            self._router.release(slot.name, "updating", self._clock.now())
            self._do(())

    def _admit(self, slot: EngineSlot, life: int) -> bool:
        """Let an engine in that has the newest weights; before any were published, those of the model folder may do.

        False where it died meanwhile, or there is nothing yet that it may serve.
        """
        if self._newest is None and not self._serve_at_start:
            self._router.waits(slot.name)
            return False
        entered = self._router.proved(slot.name, life, slot.version.step, self._clock.now())
        self._do(())
        return entered

    # -- recovery -----------------------------------------------------------------------------------------------

    def trusting(self, slot: EngineSlot) -> EngineTrust:
        """An engine that fails in this is not trusted any more."""
        return EngineTrust(self._router, slot.name, self._state(slot).life, self._do)

    async def replace(self, slot: EngineSlot, why: str) -> None:
        """Once for each life: end it, start a fresh engine, let it enter with the newest weights."""
        since, life = self._clock.now(), self._state(slot).life
        slot.runs(False)
        try:
            await self._feed.forget(slot)
            await self._tell("failed", why, 0.0)
            await slot.end()
            async with self._on_devices():
                self._check_model(await slot.start())
                await self._follow_rest(slot)
            await self._catch_up(slot)
        except InfrastructureError as error:
            self._do(self._router.kept_out(slot.name, str(error)))
            return
        self._admit(slot, life)
        slot.restarts += 1
        await self._tell("recovered", slot.name, self._clock.now() - since)

    async def _catch_up(self, slot: EngineSlot) -> None:
        """To the newest weights and the pool's pause, both as they are when this returns."""
        await self._bring(slot)
        while slot.paused != self._paused:
            await self._follow_pause(slot)
            await self._bring(slot)


class EngineTrust:
    """What an engine fails in while it is trusted ends that; what an earlier life of it failed in is old news."""

    def __init__(self, router: Router, name: str, life: int, do: Do) -> None:
        self._router, self._name, self._life, self._do = router, name, life, do

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, RelaxError):
            return False
        why = str(error)
        self._do(self._router.lost(self._name, self._life, why if self._name in why else f"{self._name}: {why}"))
        return True
