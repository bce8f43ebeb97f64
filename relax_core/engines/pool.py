# SPDX-License-Identifier: Apache-2.0
"""A pool of engines with one model. It returns completions and log-probs also while single engines fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from relax_core.api.engine import GenerateRequest
from relax_core.api.errors import ConfigError, InfrastructureError, PoolFailed, RelaxError
from relax_core.api.family import Routing
from relax_core.api.plan import OffloadPart
from relax_core.api.role import Clock
from relax_core.engines.engine_state import EngineStatus, are_log_probs
from relax_core.engines.requests import Completion, GenerateAll, GenerateCall, PendingRequest, Routes
from relax_core.engines.router import AbortRequest, Action, CompleteRequest, Dispatch, Quarantine, RequestLimits, Router
from relax_core.engines.slot import EngineSlot
from relax_core.engines.supervisor import EngineSupervisor, Report, WeightUpdater
from relax_core.rpc.waiting import start_all

TICK_S = 1.0
"""Between two checks of deadlines and silent engines."""
MAX_SCORED_TOKENS = 8192
"""Tokens of one part that is scored, unless a single sequence is longer."""
MAX_SCORED_PARTS = 2
"""Parts that one engine has: while it computes one, the next is there."""
NO_LIMITS = RequestLimits()
LATE = Completion((), (), (), (), "deadline", "no engine had room within rollout.turn_timeout_s")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of drawing tokens; training and evaluation differ."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    routing: Routing | None = None
    """Routing of the model, where its routes are asked for."""


class _Waiter(NamedTuple):
    num_calls: int
    deadline: float
    admitted: asyncio.Future[bool]


class AdmissionQueue:
    """Admits calls when the pool has capacity; the others wait in order of arrival until their deadline.

    A caller: `waiting -> admitted | late | failed`.

    Invariants:
    - Nobody passes somebody who waits.
    - Who was admitted but has not submitted its requests yet counts (`_admitted`), so that capacity is not given twice.
    """

    def __init__(self, has_capacity: Callable[[int], bool]) -> None:
        self._has_capacity = has_capacity
        self._waiting: deque[_Waiter] = deque()
        self._admitted = 0

    def admits(self, count: int) -> bool:
        """Tell whether so many calls may go on without waiting."""
        return not self._waiting and self._has_capacity(count + self._admitted)

    async def wait(self, count: int, deadline: float) -> bool:
        """Wait for capacity; False where the deadline came first. The caller uses the capacity at once."""
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiter(count, deadline, admitted))
        try:
            return await admitted
        finally:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None and admitted.result():
                self._admitted -= count

    def update(self, time: float) -> None:
        """Admit those for whom there is capacity by now, and send back those whose deadline has come."""
        while self._waiting:
            count, deadline, admitted = self._waiting[0]
            if not admitted.done():
                capacity = self._has_capacity(count + self._admitted)
                if not capacity and deadline > time:
                    return
                admitted.set_result(capacity)
                self._admitted += count if capacity else 0
            self._waiting.popleft()

    def fail(self, error: Exception) -> None:
        """Admit nobody any more."""
        for waiter in self._waiting:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)
        self._waiting.clear()


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Calls that were asked together: one future, which has its result when the last of them has ended."""

    calls: Sequence[GenerateCall]
    future: asyncio.Future[list[Completion]]
    completions: dict[int, Completion] = field(default_factory=dict)
    """By the place of the call; complete when there is one for each."""


class EnginePool:
    """Several engines behind one `generate`.

    A call: `generate -> AdmissionQueue -> Router.submit -> dispatch -> EngineSlot.generate -> Router.on_deltas ->
    CompleteRequest -> Completion`. The router decides, the supervisor keeps the engines, the pool performs.

    Invariants:
    - Actions of the router are performed in its order, and each change is followed by one dispatch in the same turn of
      the event loop: requests that arrive together go to an engine as one batch.
    - Every task belongs to the pool: an error that no engine is to blame for fails all callers, none is lost.
    - Once failed, the pool answers every caller with that error.
    """

    def __init__(
        self, slots: Sequence[EngineSlot], clock: Clock, updates: WeightUpdater | None, report: Report,
        serve_at_start: bool = True, deterministic: bool = False, offload_parts: Sequence[OffloadPart] = (),
        suppress: tuple[int, ...] = (), limits: RequestLimits = NO_LIMITS,
    ) -> None:  # fmt: skip
        self._slots = {slot.name: slot for slot in slots}
        self._clock, self._suppress, self._deterministic = clock, suppress, deterministic
        self._router = Router(self._slots, limits, whole_batches=deterministic)
        self.supervisor = EngineSupervisor(
            self._slots, self._router, offload_parts, clock, updates, report, self._perform, serve_at_start
        )
        self._admission = AdmissionQueue(self._router.has_capacity)
        self._requests: dict[str, tuple[RequestBatch, int]] = {}
        """The batch that each open request belongs to, and its place there."""
        self._scored_parts: Counter[str] = Counter()
        self._changed = asyncio.Event()
        """Set when an engine may have come, or have less to do."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_requests = 0
        self._dispatch_scheduled = self._closed = False
        self._failure: RelaxError | None = None

    # -- start and close ----------------------------------------------------------------------------------------

    async def start(self) -> Mapping[str, Any]:
        """Start all engines; the first one's facts after checking that all hold the same model."""
        facts = await self.supervisor.start()
        self._spawn(self._tick())
        return facts

    def room(self, expected_tokens: int) -> int:
        """Count the samples that may be begun now, as `Router.room`; none while a call has to wait."""
        return self._router.room(expected_tokens) if self._admission.admits(1) else 0

    def forget_sessions(self, sessions: Iterable[Hashable]) -> None:
        """Keep no cache for samples that have ended."""
        self._router.forget_sessions(sessions)

    async def close(self) -> None:
        """End all engines."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        engines = self._router.engines
        await asyncio.gather(
            *(slot.close(engines[name].status is not EngineStatus.OUT) for name, slot in self._slots.items())
        )

    async def pause(self) -> None:
        """Return when no engine samples or scores any more. Requests keep what they have."""
        await self.supervisor.pause()
        while any(self._scored_parts.values()):
            self._changed.clear()
            await self._changed.wait()

    # -- completions --------------------------------------------------------------------------------------------

    def generator(self, params: Sequence[SamplingParams]) -> GenerateAll:
        """Make a `generate` for as many calls, each with its way of sampling."""
        return partial(self._generate, params=params)

    async def _generate(self, calls: Sequence[GenerateCall], params: Sequence[SamplingParams]) -> Sequence[Completion]:
        asked_at = self._router.active_time(self._clock.now())
        deadline = asked_at + self._router.limits.timeout_s
        if not self._admission.admits(len(calls)) and not await self._admission.wait(len(calls), deadline):
            return [LATE._replace(queued_s=self._router.active_time(self._clock.now()) - asked_at)] * len(calls)
        self.check()
        batch, now = RequestBatch(calls, asyncio.get_running_loop().create_future()), self._clock.now()
        requests: list[PendingRequest] = []
        for at, (call, own) in enumerate(zip(calls, params, strict=True)):
            self._num_requests += 1
            request = GenerateRequest(
                str(self._num_requests), call.tokens, call.max_new_tokens, own.temperature, own.top_p, own.top_k,
                call.seed, call.stop_tokens, self._suppress, media=call.media, floor=call.floor,
                routed_experts=own.routing is not None,
            )  # fmt: skip
            routes = None if own.routing is None else Routes(own.routing)
            requests.append(
                PendingRequest(request, call.watch, call.session, call.group, asked_at=asked_at, routes=routes)
            )
            self._requests[request.id] = batch, at
        self._perform(self._router.submit(requests, now))
        self.supervisor.want_devices()
        try:
            return await batch.future
        except asyncio.CancelledError:
            ids = [pending.request.id for pending in requests]
            for name in ids:
                self._requests.pop(name, None)
            self._perform(self._router.cancel(ids))
            raise

    def _perform(self, actions: Sequence[Action]) -> None:
        """Do what the router decided; something has changed, so that more may be dispatched."""
        for action in actions:
            match action:
                case CompleteRequest(pending):
                    batch, at = self._requests.pop(pending.request.id, (None, 0))
                    if batch is None or batch.future.done():
                        continue  # its caller is gone
                    batch.completions[at] = pending.completion(self._router.active_time(self._clock.now()))
                    if (ended := batch.calls[at].ended) is not None:
                        ended()
                    if len(batch.completions) == len(batch.calls):
                        batch.future.set_result([batch.completions[number] for number in range(len(batch.calls))])
                case Dispatch(engine):
                    self._spawn(self._stream(self._slots[engine], action))
                case AbortRequest(engine, ids):
                    self._spawn(self._abort(self._slots[engine], ids))
                case Quarantine(engine, why, requests):
                    if not self._closed:  # a call may fail because its engine ends with the pool
                        self._spawn(self.supervisor.replace(self._slots[engine], why, requests))
                case _:
                    self._fail(PoolFailed(action.why))
        if not self._dispatch_scheduled:
            self._dispatch_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_scheduled = False
        if not self._closed:
            now = self._clock.now()
            for dispatch in self._router.dispatch(now):
                self._spawn(self._stream(self._slots[dispatch.engine], dispatch))
            self._admission.update(self._router.active_time(now))
            self._changed.set()
            self.supervisor.on_change()

    async def _stream(self, slot: EngineSlot, dispatch: Dispatch) -> None:
        """Have an engine generate a batch, and tell the router what it says."""
        router, (name, incarnation, batch) = self._router, dispatch
        engine = router.engines[name]
        if engine.incarnation != incarnation:  # it failed before it was asked
            return
        running = engine.running
        slot.set_busy(True)
        with self.supervisor.containing(slot):
            try:
                async for deltas in slot.generate(tuple([pending.continuation() for pending in batch])):
                    self._perform(router.on_deltas(name, incarnation, deltas, self._clock.now()))
                    slot.set_busy(bool(running))
                self._perform(router.on_stream_end(name, incarnation, batch))
            except (ValueError, ConfigError) as error:
                self._perform(router.on_refused(name, incarnation, batch, str(error)))
                slot.set_busy(bool(running))

    async def _abort(self, slot: EngineSlot, ids: Sequence[str]) -> None:
        with contextlib.suppress(
            RelaxError, NotImplementedError
        ):  # it runs them to their end, or is found dead elsewhere
            await slot.abort(ids)

    # -- log-probs of given tokens ------------------------------------------------------------------------------

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[Sequence[float]]:
        """Compute log-probs of given tokens; the caller bounds the time. Not of a pool that is paused or updated.

        Parts go to the least busy engines, and on to another one where an engine fails. In a deterministic pool each
        sequence is scored alone, so that no result depends on what is beside it.
        """
        if self._deterministic:
            return [(await self._score_part([sequence], temperature))[0] for sequence in sequences]
        parts = await start_all(*(self._score_part(part, temperature) for part in _parts(sequences)))
        return list(chain.from_iterable(parts))

    async def _score_part(self, sequences: Sequence[Sequence[int]], temperature: float) -> Sequence[Sequence[float]]:
        engines = self._router.engines
        while True:
            self.check()
            names = (engine.name for engine in self._router.available())
            free = [name for name in names if self._scored_parts[name] < MAX_SCORED_PARTS]
            if not free:
                self._changed.clear()
                await self._changed.wait()
                continue
            name = min(free, key=lambda name: (self._scored_parts[name], engines[name].pending_tokens))
            slot = self._slots[name]
            self._scored_parts[name] += 1
            try:
                with self.supervisor.containing(slot):
                    found = await slot.score(sequences, temperature)
                    if [len(scores) for scores in found] != [len(sequence) for sequence in sequences]:
                        raise InfrastructureError(f"{name} gave other numbers of log-probs than it was given tokens")
                    for scores in found:
                        if scores and not are_log_probs(scores):
                            raise InfrastructureError(f"{name} gave {min(scores)} and {max(scores)} as log-probs")
                    engines[name].failures.refill()
                    return found
            finally:
                self._scored_parts[name] -= 1
                self._changed.set()

    # -- tasks and failure --------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            self._perform(self._router.tick(self._clock.now()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, RelaxError) else RelaxError(f"{type(error).__name__}: {error}"))

    def _fail(self, error: RelaxError) -> None:
        """End every caller with an error: no engine can be had."""
        self._failure = error
        for batch, _ in self._requests.values():
            if not batch.future.done():
                batch.future.set_exception(error)
        self._requests.clear()
        self._admission.fail(error)
        self._changed.set()

    def check(self) -> None:
        """Raise PoolFailed where no engine can be had any more."""
        if self._failure is not None:
            raise self._failure

    def facts(self) -> dict[str, Any]:
        """Describe each engine for the run's status."""
        found: dict[str, Any] = {}
        for slot in self._slots.values():
            engine = self._router.engines[slot.name]
            silent_s = round(self._clock.now() - engine.last_heard, 3) if engine.running else 0.0
            found[slot.name] = {
                "serving": engine.status is EngineStatus.SERVING, "version": str(slot.version),
                "running": len(engine.running), "loading": slot.loading, "silent_s": silent_s, "paused": slot.paused,
                "tokens_left": engine.pending_tokens, "kv_capacity": engine.kv.capacity,
                "kv_running": engine.kv.running, "kv_idle": engine.kv.idle_tokens, "restarts": slot.restarts,
                "pid": slot.worker.pid if slot.worker else 0,
            }  # fmt: skip
        return found


def _parts(sequences: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    part: list[Sequence[int]] = []
    tokens = 0
    for sequence in sequences:
        if part and tokens + len(sequence) > MAX_SCORED_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(sequence)
        tokens += len(sequence)
    if part:
        yield part
