# SPDX-License-Identifier: Apache-2.0
"""A pool of engines with one model: requests in, completions out, whatever happens to single engines.

The router decides, this does: it speaks with the engines, replaces those that the router does not trust, and leads them
to the newest weights. Requests that arrive in one turn of the event loop go to the engine as one batch.

Where those wait whose turns would be too many for a pool: first come, first served, each until its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from relax_core.api.clock import Clock
from relax_core.api.devices import OffloadPart
from relax_core.api.engine import GenerateRequest
from relax_core.api.errors import ConfigError, InfrastructureError, RelaxError
from relax_core.api.routing import Routing
from relax_core.api.trainer import Chosen
from relax_core.api.weights import Manifest, Version
from relax_core.engines.requests import Completion, GenerateAll, GenerateCall, PendingRequest, RequestBatch
from relax_core.engines.router import AbortRequest, Action, Bounds, CompleteRequest, Dispatch, Quarantine, Router
from relax_core.engines.routes import Routes
from relax_core.engines.scoring import Scoring
from relax_core.engines.slot import EngineSlot
from relax_core.engines.status import EngineStatus
from relax_core.engines.supervisor import Arrived, EngineSupervisor, OffloadState, Tell
from relax_core.engines.weight_updater import WeightUpdates


class _Waiter(NamedTuple):
    turns: int
    deadline: float
    let_in: asyncio.Future[bool]


class AdmissionQueue:
    """`room(count)`: whether so many more may come in now."""

    def __init__(self, room: Callable[[int], bool]) -> None:
        self._room = room
        self._waiting: deque[_Waiter] = deque()
        self._let_in = 0
        """Turns that were let in and are on their way."""

    @property
    def shut(self) -> bool:
        """Whether who comes now has to wait."""
        return not self.passes(1)

    def passes(self, count: int) -> bool:
        """Whether so many may go in without waiting."""
        return not self._waiting and self._room(count + self._let_in)

    async def enter(self, count: int, deadline: float) -> bool:
        """Wait for room. False where the deadline came first. Who was let in uses the room at once."""
        let_in: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiter(count, deadline, let_in))
        try:
            return await let_in
        finally:
            if let_in.done() and not let_in.cancelled() and let_in.exception() is None and let_in.result():
                self._let_in -= count

    def open(self, time: float) -> None:
        """Room was made, or time has passed."""
        while self._waiting:
            count, deadline, let_in = self._waiting[0]
            if not let_in.done():
                room = self._room(count + self._let_in)
                if not room and deadline > time:
                    return
                let_in.set_result(room)
                self._let_in += count if room else 0
            self._waiting.popleft()

    def fail(self, error: Exception) -> None:
        """Nobody will be let in any more."""
        for waiter in self._waiting:
            if not waiter.let_in.done():
                waiter.let_in.set_exception(error)
        self._waiting.clear()


TICK_S = 1.0
"""Between two looks at deadlines and silent engines."""
NO_BOUNDS = Bounds()
LATE = Completion((), (), (), (), "deadline", "no engine had room within rollout.turn_timeout_s")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; training and evaluation differ."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    routing: Routing | None = None
    """How the model routes, where its routes are asked for."""


class EnginePool:
    """Several engines behind one `generate`."""

    def __init__(
        self, slots: Sequence[EngineSlot], clock: Clock, feed: WeightUpdates, tell: Tell, serve_at_start: bool = True,
        deterministic: bool = False, sleeps: Sequence[OffloadPart] = (), suppress: tuple[int, ...] = (),
        bounds: Bounds = NO_BOUNDS,
    ) -> None:  # fmt: skip
        self._slots = {slot.name: slot for slot in slots}
        self._clock, self._rest, self._suppress = clock, OffloadState(sleeps), suppress
        self._router = Router(self._slots, bounds, deterministic)
        self._upkeep = EngineSupervisor(
            self._slots, self._router, self._rest, clock, feed, tell, self._act, serve_at_start
        )
        self._door = AdmissionQueue(self._router.room)
        self._scoring, self._deterministic = Scoring(self._slots, self._router, self._upkeep.trusting), deterministic
        self._requests: dict[str, tuple[RequestBatch, int]] = {}
        """What each open request was asked with, and its place there."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self._flushing = self._closed = False
        self._broken: RelaxError | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> Mapping[str, Any]:
        """All engines; returns the first one's facts after checking that all hold the same model."""
        facts = await self._upkeep.start()
        self._own(self._watch_time())
        return facts

    @property
    def serves(self) -> bool:
        return any(engine.standing is EngineStatus.SERVING for engine in self._router.engines.values())

    @property
    def full(self) -> bool:
        """Whether who asks now has to wait: no time to begin anything new."""
        return self._door.shut

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.end() for slot in self._slots.values()))

    async def pause(self) -> None:
        """Return when no engine samples any more. Requests keep what they have; new ones wait. Twice is once."""
        self._router.pause(self._clock.now())
        await self._upkeep.settle(paused=True)

    async def resume(self) -> None:
        """Sampling goes on; requests that came meanwhile begin."""
        self._router.resume(self._clock.now())
        self._flush_soon()
        await self._upkeep.settle(paused=False)

    async def asked(self) -> None:
        """Return when there is work for the engines: requests, or weights to load that are asleep."""
        wanted = self._upkeep.devices_wanted
        while not (self._router.open or self._rest.num_waiting):
            wanted.clear()
            await wanted.wait()

    async def offload(self, parts: Sequence[OffloadPart]) -> int:
        """Free the engines' memory; bytes really freed. The pool is paused."""
        return await self._upkeep.sleep(parts)

    async def onload(self, parts: Sequence[OffloadPart]) -> None:
        await self._upkeep.wake(parts)

    def newest(self) -> Version:
        """The newest version among serving engines (all engines while none serves): what admission goes by.

        What is admitted at it runs on engines that have it; a slow one gets nothing new until it has it too.
        """
        return self._upkeep.newest()

    async def update(self, manifest: Manifest, transport: Chosen, arrived: Arrived | None = None) -> tuple[str, ...]:
        """Bring every engine to a version; names those that proved it. One that fails or is too slow is replaced.

        `arrived` is told of each as soon as it serves the version, whatever the others do.
        """
        return await self._upkeep.update(manifest, transport, arrived)

    # -- requests -----------------------------------------------------------------------------------------------

    def generator(self, samplings: Sequence[Sampling]) -> GenerateAll:
        """A `generate` for as many calls, each with its way of sampling."""

        async def generate(calls: Sequence[GenerateCall]) -> Sequence[Completion]:
            return await self._generate(calls, samplings)

        return generate

    async def _generate(self, calls: Sequence[GenerateCall], samplings: Sequence[Sampling]) -> Sequence[Completion]:
        if not self._door.passes(len(calls)):
            deadline = self._router.time(self._clock.now()) + self._router.bounds.turn_s
            if not await self._door.enter(len(calls), deadline):
                return [LATE] * len(calls)
        if self._broken is not None:
            raise self._broken
        asked, now = RequestBatch(calls), self._clock.now()
        requests = [self._pending(call, sampling) for call, sampling in zip(calls, samplings, strict=True)]
        self._requests.update((pending.request.id, (asked, at)) for at, pending in enumerate(requests))
        self._act(self._router.ask(requests, now))
        self._upkeep.devices_wanted.set()
        try:
            return await asked.future
        except asyncio.CancelledError:
            self._forget([pending.request.id for pending in requests])
            raise

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[Sequence[float]]:
        """Log-probs of given tokens, for who bounds the time; not of a pool that is paused or updated."""
        return await self._scoring.score(sequences, temperature, singly=self._deterministic)

    def _pending(self, call: GenerateCall, sampling: Sampling) -> PendingRequest:
        self._numbers += 1
        request = GenerateRequest(
            str(self._numbers), call.tokens, call.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k,
            call.seed, call.stop_tokens, self._suppress, media=call.media, floor=call.floor,
            routed_experts=sampling.routing is not None,
        )  # fmt: skip
        routes = None if sampling.routing is None else Routes(sampling.routing)
        return PendingRequest(request, call.watch, call.session, call.group, routes=routes)

    def _forget(self, ids: Sequence[str]) -> None:
        """Nobody awaits these any more."""
        for name in ids:
            self._requests.pop(name, None)
        self._act(self._router.forget(ids))

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if not self._closed:
            now = self._clock.now()
            self._do(self._router.place(now))
            self._door.open(self._router.time(now))
            self._scoring.changed()

    def _act(self, actions: Sequence[Action]) -> None:
        """Do what the router wants; something has changed, so that more may be placed."""
        self._do(actions)
        self._flush_soon()

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case CompleteRequest(pending):
                    asked, at = self._requests.pop(pending.request.id, (None, 0))
                    if asked is not None:  # else all was given up
                        asked.settle(at, pending.completion())
                case Dispatch(engine):
                    self._own(self._serve(self._slots[engine], action))
                case AbortRequest(engine, ids):
                    self._own(_abort(self._slots[engine], ids))
                case Quarantine(engine, why):
                    self._own(self._upkeep.replace(self._slots[engine], why))
                case _:
                    self._break(InfrastructureError(action.why))

    async def _serve(self, slot: EngineSlot, given: Dispatch) -> None:
        router, (name, life, batch) = self._router, given
        engine = router.engines[name]
        if engine.life != life:  # it died before it was asked
            return
        running = engine.running
        slot.runs(True)
        with self._upkeep.trusting(slot):
            try:
                async for deltas in slot.generate(tuple([pending.remaining() for pending in batch])):
                    self._act(router.gave(name, life, deltas, self._clock.now()))
                    slot.runs(bool(running))
                self._act(router.ended(name, life, batch))
            except (ValueError, ConfigError) as error:
                self._act(router.refused(name, life, batch, str(error)))
                slot.runs(bool(running))

    async def _watch_time(self) -> None:
        """What is late is ended, and who is silent is found."""
        while True:
            await self._clock.sleep(TICK_S)
            self._act(self._router.tick(self._clock.now()))

    def _break(self, error: RelaxError) -> None:
        """No engine can be had: whoever waits learns why."""
        self._broken = error
        for asked, _ in self._requests.values():
            if not asked.future.done():
                asked.future.set_exception(error)
        self._requests.clear()
        self._door.fail(error)
        self._scoring.fail(error)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._disown)

    def _disown(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error if isinstance(error, RelaxError) else RelaxError(f"{type(error).__name__}: {error}"))

    # -- what it says of itself ---------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        return {slot.name: self._facts_of(slot) for slot in self._slots.values()}

    def _facts_of(self, slot: EngineSlot) -> dict[str, Any]:
        engine = self._router.engines[slot.name]
        silent_s = round(self._clock.now() - engine.heard_at, 3) if engine.running else 0.0
        return {
            "serving": engine.standing is EngineStatus.SERVING, "version": str(slot.version),
            "running": len(engine.running), "loading": slot.loading, "silent_s": silent_s, "paused": slot.paused,
            "tokens_left": engine.work, "restarts": slot.restarts, "pid": slot.worker.pid if slot.worker else 0,
        }  # fmt: skip


async def _abort(slot: EngineSlot, ids: Sequence[str]) -> None:
    with contextlib.suppress(
        RelaxError, NotImplementedError
    ):  # it runs them to their end, or its death is noticed elsewhere
        await slot.abort(ids)
