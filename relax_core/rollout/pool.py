# SPDX-License-Identifier: Apache-2.0
"""A pool of engines with one model: requests in, completions out, whatever happens to single engines.

Requests that arrive in one turn of the event loop go to the engine as one batch. When an engine dies, its requests go on
elsewhere with the tokens they have, and it is replaced; the new one serves only after it proved the newest weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.api.clock import Clock
from relax_core.api.engine import GenerateRequest
from relax_core.api.errors import ConfigError, InfrastructureError, RelaxError
from relax_core.api.trainer import Chosen
from relax_core.api.turn import Part
from relax_core.api.version import Version
from relax_core.api.weights import Manifest, Receipt
from relax_core.rollout.completion import Completion, GenerateAll, GenerateCall
from relax_core.rollout.engine_slot import EngineSlot
from relax_core.rollout.requests import Pending, Requests
from relax_core.rollout.rest import Rest
from relax_core.rollout.router import EngineLoad
from relax_core.rollout.together import together
from relax_core.rollout.weight_feed import Feed

INTERRUPT_S = 0.2
"""Between two words to an engine that should let its requests go."""
MAX_RESTARTS = 8
"""Of one engine in a row without a finished request between them."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; training and evaluation differ."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0


Arrived = Callable[[Receipt], Awaitable[None]]
Tell = Callable[[str, str, float], Awaitable[None]]


class EnginePool:
    """Several engines behind one `generate`."""

    def __init__(
        self, slots: Sequence[EngineSlot], clock: Clock, feed: Feed, tell: Tell, serve_at_start: bool = True,
        deterministic: bool = False, sleeps: Sequence[Part] = (), suppress: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self._slots = {slot.name: slot for slot in slots}
        self._clock, self._feed, self._tell = clock, feed, tell
        self._serve_at_start, self._suppress = serve_at_start, suppress
        self._requests, self._rest = Requests(whole=deterministic), Rest(sleeps)
        self._asked = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: dict[str, int] = {}
        self._newest: tuple[Manifest, Chosen] | None = None
        self._updates: dict[str, asyncio.Lock] = {name: asyncio.Lock() for name in self._slots}
        self._numbers = 0
        self._flushing = self._closed = self._paused = False
        self._broken: RelaxError | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> Mapping[str, Any]:
        """All engines; returns the first one's facts after checking that all hold the same model."""
        facts = await together(*(slot.start() for slot in self._slots.values()))
        prints = {fact.get("fingerprint") for fact in facts}
        if len(prints) > 1:
            raise InfrastructureError(f"engines loaded different weights from one folder: {sorted(map(str, prints))}")
        for slot in self._slots.values():
            slot.serving, slot.waits_for_weights = self._serve_at_start, not self._serve_at_start
        return facts[0]

    @property
    def serves(self) -> bool:
        return any(slot.serving for slot in self._slots.values())

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.end() for slot in self._slots.values()))

    # -- pausing ------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Return when no engine samples any more. Requests keep what they have; new ones wait. Twice is once."""
        self._paused = True
        await self._settle_all()

    async def resume(self) -> None:
        """Sampling goes on; requests that came meanwhile begin."""
        self._paused = False
        await self._settle_all()

    async def _settle_all(self) -> None:
        able = [slot for slot in self._slots.values() if slot.serving or slot.waits_for_weights]
        await asyncio.gather(*(self._settle(slot) for slot in able))

    async def _settle(self, slot: EngineSlot) -> None:
        """Bring an engine to where the pool is, paused or not; one that fails is replaced."""
        try:
            await self._follow_pause(slot)
        except RelaxError as error:
            await self._replace(slot, error)

    async def _follow_pause(self, slot: EngineSlot) -> None:
        async with slot.settling:
            while slot.paused != self._paused:
                if slot.paused:
                    await slot.resume()
                    self._flush_soon()
                elif not await slot.pause():
                    await self._interrupt(slot)

    async def _interrupt(self, slot: EngineSlot) -> None:
        """Take an engine's requests back with the tokens they have; one that can't abort runs them to their end.

        Asked again and again: a request may still be on its way to the engine when it is told to let go.
        """
        while slot.running:
            if not self._requests.whole:  # what was begun again would not be the same bits
                self._requests.interrupt(list(slot.running))
                with contextlib.suppress(NotImplementedError):  # it runs them to their end
                    await slot.abort(list(slot.running))
            await slot.stirred(INTERRUPT_S)

    # -- sleeping -----------------------------------------------------------------------------------------------

    async def asked(self) -> None:
        """Return when there is work for the engines: requests, or weights to load that are asleep."""
        while not (self._requests.open or self._rest.num_waiting):
            self._asked.clear()
            await self._asked.wait()

    async def sleep(self, parts: Sequence[Part]) -> int:
        """Free the engines' memory; bytes really freed. The pool is paused."""
        await self._rest.lie_down(self._rest.of(parts))
        return sum(await asyncio.gather(*(self._lay(slot) for slot in self._slots.values())))

    async def wake(self, parts: Sequence[Part]) -> None:
        self._rest.rise(self._rest.of(parts))
        await asyncio.gather(*(self._lay(slot) for slot in self._slots.values()))
        await self._rest.risen()

    async def _lay(self, slot: EngineSlot) -> int:
        """Bring an engine to where the pool is, asleep or awake; one that fails is replaced. Bytes that it freed."""
        try:
            async with slot.settling:
                return await slot.rest(self._rest.asleep)
        except RelaxError as error:
            await self._replace(slot, error)
            return 0

    @contextlib.asynccontextmanager
    async def _on_devices(self) -> AsyncIterator[None]:
        """For who starts an engine or loads weights into one."""
        self._asked.set()
        async with self._rest.awake():
            yield

    # -- requests -----------------------------------------------------------------------------------------------

    def generator(self, samplings: Sequence[Sampling]) -> GenerateAll:
        """A `generate` for as many calls, each with its way of sampling."""

        async def generate(calls: Sequence[GenerateCall]) -> Sequence[Completion]:
            return await self._generate(calls, samplings)

        return generate

    async def _generate(self, calls: Sequence[GenerateCall], samplings: Sequence[Sampling]) -> Sequence[Completion]:
        if self._broken is not None:
            raise self._broken
        requests = [self._request(call, sampling) for call, sampling in zip(calls, samplings, strict=True)]
        future = self._requests.add(requests, calls)
        self._asked.set()
        self._flush_soon()
        try:
            return await future
        except asyncio.CancelledError:
            self._flush_soon()
            raise

    def _request(self, call: GenerateCall, sampling: Sampling) -> GenerateRequest:
        self._numbers += 1
        return GenerateRequest(
            str(self._numbers), call.tokens, call.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k,
            call.seed, call.stop_tokens, self._suppress, media=call.media, floor=call.floor,
        )  # fmt: skip

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._closed:
            return
        running = {slot.name: list(slot.running) for slot in self._slots.values()}
        for name, ids in self._requests.give_up(running).items():
            self._own(_abort(self._slots[name], ids))
        if not self._paused:
            loads = self._loads()  # counted once: once a request would be quadratic

            def give(engine: str, pending: Pending) -> None:
                loads[engine] = loads[engine]._replace(work=loads[engine].work + pending.left)

            for name, batch in self._requests.place(loads.values, give):
                self._give(self._slots[name], batch)
                self._own(self._serve(self._slots[name], batch))

    def _loads(self) -> dict[str, EngineLoad]:
        return {
            slot.name: EngineLoad(slot.name, slot.able, slot.version.step, slot.work) for slot in self._slots.values()
        }

    def _give(self, slot: EngineSlot, batch: Sequence[Pending]) -> None:
        if not slot.running:
            slot.heard_at = self._clock.now()
        slot.give(batch)

    async def _serve(self, slot: EngineSlot, batch: Sequence[Pending]) -> None:
        worker = slot.worker
        try:
            async for ended in slot.run(batch):
                slot.heard_at = self._clock.now()
                self._failures[slot.name] = 0
                for pending in ended:
                    self._requests.ended(pending)
                self._flush_soon()
                if enough := [pending.request.id for pending in ended if pending.request.id in slot.running]:
                    self._own(_abort(slot, enough))
        except (ValueError, ConfigError) as error:
            for pending in batch:
                slot.running.pop(pending.request.id, None)
            self._requests.refuse(batch, str(error))
        except RelaxError as error:
            if slot.worker is worker:
                await self._replace(slot, error)

    # -- weights ------------------------------------------------------------------------------------------------

    def newest(self) -> Version:
        """The newest version among serving engines (all engines while none serves): what admission goes by.

        What is admitted at it runs on engines that have it; a slow one gets nothing new until it has it too.
        """
        slots = [slot for slot in self._slots.values() if slot.serving] or list(self._slots.values())
        return max(slot.version for slot in slots)

    async def update(self, manifest: Manifest, transport: Chosen, arrived: Arrived | None = None) -> tuple[str, ...]:
        """Bring every engine to a version; names those that proved it. One that fails or is too slow is replaced.

        `arrived` is told of each as soon as it serves the version, whatever the others do.
        """
        self._newest = (manifest, transport)
        able = [slot for slot in self._slots.values() if slot.serving or slot.waits_for_weights]
        names = await asyncio.gather(*(self._update(slot, arrived) for slot in able))
        return tuple(name for name in names if name)

    async def _update(self, slot: EngineSlot, arrived: Arrived | None) -> str:
        try:
            receipt = await self._bring(slot)
        except RelaxError as error:
            await self._replace(slot, error)
            return ""
        slot.serving, slot.waits_for_weights = True, False
        self._flush_soon()
        if arrived is not None and receipt is not None:
            await arrived(receipt)
        return slot.name

    async def _bring(self, slot: EngineSlot) -> Receipt | None:
        """The last of its receipts; None where it had the newest version."""
        receipt = None
        async with self._updates[slot.name]:
            while self._newest is not None and slot.version[1:] < self._newest[0].version[1:]:
                async with self._on_devices(), self._still(slot):
                    receipt = await self._feed.bring(slot, *self._newest)
        return receipt

    @contextlib.asynccontextmanager
    async def _still(self, slot: EngineSlot) -> AsyncIterator[None]:
        """Nothing runs on an engine that takes weights only then; what ran goes on elsewhere, or here afterwards."""
        if slot.capabilities.in_flight_updates:
            yield
            return
        slot.updating = True
        try:
            await self._interrupt(slot)
            yield
        finally:
            slot.updating = False
            self._flush_soon()

    # -- recovery -----------------------------------------------------------------------------------------------

    async def _replace(self, slot: EngineSlot, error: Exception) -> None:
        """Once for each death: take back its requests, start a fresh engine, let it enter with the newest weights."""
        if not (slot.serving or slot.waits_for_weights):
            return
        slot.serving = slot.waits_for_weights = False
        since = self._clock.now()
        self._requests.take_back(list(slot.running.values()))
        slot.clear()
        self._flush_soon()
        await self._feed.forget(slot)
        await self._tell("failed", str(error) if slot.name in str(error) else f"{slot.name}: {error}", 0.0)
        self._failures[slot.name] = self._failures.get(slot.name, 0) + 1
        if self._failures[slot.name] > MAX_RESTARTS:
            self._break(InfrastructureError(f"{slot.name} failed {MAX_RESTARTS} times in a row, last: {error}"))
            return
        self._own(self._enter(slot, since))

    async def _enter(self, slot: EngineSlot, since: float) -> None:
        try:
            await slot.end()
            async with self._on_devices():
                await slot.start()
                await self._lay(slot)
                await self._bring(slot)
            await self._follow_pause(slot)
        except InfrastructureError as error:
            slot.serving = True
            await self._replace(slot, error)
            return
        except RelaxError as error:
            self._break(error)
            return
        slot.serving = True
        slot.restarts += 1
        self._flush_soon()
        await self._tell("recovered", slot.name, self._clock.now() - since)

    def _break(self, error: RelaxError) -> None:
        """No engine can be had: whoever waits learns why."""
        self._broken = error
        self._requests.fail(error)

    def _own(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what it says of itself ---------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        return {
            slot.name: {"serving": slot.serving, "version": str(slot.version), "running": len(slot.running),
                        "loading": slot.loading,
                        "silent_s": round(self._clock.now() - slot.heard_at, 3) if slot.running else 0.0,
                        "paused": slot.paused, "tokens_left": slot.work, "restarts": slot.restarts,
                        "pid": slot.worker.pid if slot.worker else 0}
            for slot in self._slots.values()
        }  # fmt: skip


async def _abort(slot: EngineSlot, ids: Sequence[str]) -> None:
    with contextlib.suppress(
        RelaxError, NotImplementedError
    ):  # it runs them to their end, or its death is noticed elsewhere
        await slot.abort(ids)
