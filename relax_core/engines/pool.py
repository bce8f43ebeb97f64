# SPDX-License-Identifier: Apache-2.0
"""A pool of engines with one model, which keeps returning completions and log-probs while single engines fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from relax_core.api.errors import ConfigError, InfrastructureError, PoolFailed, RelaxError
from relax_core.api.plan import OffloadPart
from relax_core.api.role import Clock
from relax_core.engines.engine_state import EngineStatus, are_log_probs
from relax_core.engines.requests import PendingRequest
from relax_core.engines.router import AbortRequest, Action, CompleteRequest, Dispatch, Quarantine, RequestLimits, Router
from relax_core.engines.scaling import JoiningStep, Step
from relax_core.engines.slot import EngineSlot
from relax_core.engines.supervisor import EngineSupervisor, Report, WeightUpdater
from relax_core.rpc.waiting import start_all

TICK_S = 1.0
"""Seconds between two checks for late requests and silent engines."""
MAX_SCORED_TOKENS = 8192
"""Most tokens of one scoring call; a single longer sequence is a call of its own."""
MAX_SCORED_PARTS = 2
"""Most open scoring calls of one engine: the engine computes one call while the next is queued."""
JOIN_S = 900.0
"""Seconds in which an engine must join: start, load the newest weights, and prove them."""
DRAIN_S = 120.0
"""Seconds that a leaving engine keeps requests that can't be aborted; they continue elsewhere after that."""
NO_LIMITS = RequestLimits()
OnStep = Callable[[str, Step, str], None]
"""Called with (engine, step of its join or leave, reason of a failure)."""
SlotMaker = Callable[[str, int, str], EngineSlot]
"""A function from an engine's name, number and address to its slot; an empty address: the run starts the engine."""
LATE = "no engine had room within rollout.turn_timeout_s"


def cannot_grow(name: str, number: int, address: str = "") -> EngineSlot:
    raise InfrastructureError(f"{name}: this pool can't make a further engine")


class _Waiter(NamedTuple):
    num_calls: int
    deadline: float
    admitted: asyncio.Future[bool]


class AdmissionQueue:
    """A first-in, first-out queue of calls that wait for capacity until their deadline.

    A caller: `waiting -> admitted | late | failed`.

    Invariants:
    - No call overtakes a waiting call.
    - Calls that were admitted but have not submitted their requests yet count as used capacity (`_admitted`).
    """

    def __init__(self, has_capacity: Callable[[int], bool]) -> None:
        self._has_capacity = has_capacity
        self._waiting: deque[_Waiter] = deque()
        self._admitted = 0

    def admits(self, count: int) -> bool:
        """Return True if `count` calls may be submitted without waiting."""
        return not self._waiting and self._has_capacity(count + self._admitted)

    @property
    def waiting(self) -> tuple[int, float | None]:
        """Number of requests in waiting calls, and the deadline of the first; None without a waiting call."""
        return sum(waiter.num_calls for waiter in self._waiting), self._waiting[0].deadline if self._waiting else None

    async def wait(self, count: int, deadline: float) -> bool:
        """Wait for capacity; return False if the deadline comes first.

        After True the caller must submit its requests before it awaits anything else.
        """
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiter(count, deadline, admitted))
        try:
            return await admitted
        finally:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None and admitted.result():
                self._admitted -= count

    def update(self, time: float) -> None:
        """Admit waiting calls for which there is capacity; reject waiting calls whose deadline has passed."""
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
        """Raise `error` in all waiting calls."""
        for waiter in self._waiting:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)
        self._waiting.clear()


@dataclass(slots=True)
class RequestBatch:
    """The number of open requests of one call of `generate`, and the future that is set when the last has ended."""

    num_open: int
    ended: asyncio.Future[None]


class EnginePool:
    """Several engines behind one `generate`.

    A call: `generate -> AdmissionQueue -> Router.submit -> dispatch -> EngineSlot.generate -> Router.on_deltas ->
    CompleteRequest`. The router decides, the supervisor manages the engines, the pool performs the actions.

    Invariants:
    - The router's actions are performed in order. Changes of one turn of the event loop share one dispatch, so that
      requests that arrive together reach an engine as one batch; in a deterministic run, the requests of one call do.
    - The pool owns every task it starts: an error in a task that is not an engine's failure fails the pool.
    - A failed pool raises its error in every call.
    - An engine is in `_slots` from the call of `grow` until its process is gone, so that `close` stops it in any state.
    - An engine that was started elsewhere is not replaced: when it fails, it leaves the pool.
    """

    def __init__(
        self, slots: Sequence[EngineSlot], clock: Clock, updates: WeightUpdater | None, report: Report,
        serve_at_start: bool = True, deterministic: bool = False, offload_parts: Sequence[OffloadPart] = (),
        suppress: tuple[int, ...] = (), limits: RequestLimits = NO_LIMITS, make_slot: SlotMaker = cannot_grow,
    ) -> None:  # fmt: skip
        """`make_slot`: a function that makes the slot of one more engine, for `grow`."""
        self.make_slot = make_slot
        self._slots = {slot.name: slot for slot in slots}
        self._clock, self._suppress, self._deterministic = clock, suppress, deterministic
        self._router = Router([slot.state for slot in slots], limits, whole_batches=deterministic)
        self.supervisor = EngineSupervisor(
            self._slots, self._router, offload_parts, clock, updates, report, self._perform, serve_at_start
        )
        self._admission = AdmissionQueue(self._router.has_capacity)
        self._requests: dict[str, RequestBatch] = {}
        """Batch of each open request, by the request's id."""
        self._scored_parts: Counter[str] = Counter()
        self._changed = asyncio.Event()
        """Set when an engine may have become available or finished a scoring call."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._joins: dict[str, asyncio.Task[None]] = {}
        """Task of each engine that is joining."""
        self._external: dict[str, OnStep] = {}
        """Callback of each engine that joined from elsewhere."""
        self._replacements: dict[str, asyncio.Task[None]] = {}
        """Last task that replaced an engine, by the engine's name."""
        self._num_requests = 0
        self._dispatch_scheduled = self._closed = False
        self._failure: RelaxError | None = None

    # -- start and close ----------------------------------------------------------------------------------------

    async def start(self) -> Mapping[str, Any]:
        """Start all engines, check that all hold the same model, and return the facts of the first engine."""
        facts = await self.supervisor.start()
        self._spawn(self._tick())
        return facts

    def room(self, expected_tokens: int) -> int:
        """Return the number of samples that may begin now (`Router.room`); 0 while calls wait for admission."""
        return self._router.room(expected_tokens) if self._admission.admits(1) else 0

    def forget_sessions(self, sessions: Collection[Hashable]) -> None:
        """Stop counting the caches of samples that have ended."""
        self._router.forget_sessions(sessions)

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.close(slot.state.status is not EngineStatus.OUT) for slot in self._slots.values()))

    async def pause(self) -> None:
        """Pause the pool; return when no engine samples or scores. Requests keep their sampled tokens."""
        await self.supervisor.pause()
        while any(self._scored_parts.values()):
            self._changed.clear()
            await self._changed.wait()

    # -- completions --------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[PendingRequest]) -> None:
        """Sample the completions of requests as one batch; return when all have ended.

        A request that ended badly has its reason in `finish` and `error`. Raises the pool's error if the pool has
        failed. Cancelling this call cancels the requests.
        """
        asked_at = self._router.active_time(self._clock.now())
        deadline = asked_at + self._router.limits.timeout_s
        for pending in requests:
            pending.asked_at = asked_at
        if not self._admission.admits(len(requests)) and not await self._admission.wait(len(requests), deadline):
            for pending in requests:
                pending.finish, pending.error, pending.settled = "deadline", LATE, True
                pending.queued_s = self._router.active_time(self._clock.now()) - asked_at
            return
        self.check()
        batch, now = RequestBatch(len(requests), asyncio.get_running_loop().create_future()), self._clock.now()
        for pending in requests:
            self._num_requests += 1
            pending.id = str(self._num_requests)
            self._requests[pending.id] = batch
        self._perform(self._router.submit(requests, now))
        self.supervisor.on_change()
        try:
            await batch.ended
        except asyncio.CancelledError:
            ids = [pending.id for pending in requests]
            for name in ids:
                self._requests.pop(name, None)
            self._perform(self._router.cancel(ids))
            raise

    def _perform(self, actions: Sequence[Action]) -> None:
        """Perform the router's actions, then schedule one dispatch, since the change may allow new requests to run."""
        time = self._router.active_time(self._clock.now())
        for action in actions:
            match action:
                case CompleteRequest(pending):
                    batch = self._requests.pop(pending.id, None)
                    if batch is None or batch.ended.done():
                        continue  # the caller was cancelled
                    began_at = time if pending.began_at is None else pending.began_at
                    pending.queued_s, pending.generate_s = began_at - pending.asked_at, time - began_at
                    if pending.on_end is not None:
                        pending.on_end()
                    batch.num_open -= 1
                    if not batch.num_open:
                        batch.ended.set_result(None)
                case AbortRequest(engine, ids):
                    self._spawn(self._abort(self._slots[engine], ids))
                case Quarantine(engine, why, requests):
                    if self._closed:  # closing the pool stops the engines, so running calls may fail
                        continue
                    if engine in self._external:
                        self._external.pop(engine)(engine, "failed", why)  # so that nobody lets it leave meanwhile
                        self._spawn(self._lose(self._slots[engine], why, requests))
                    else:
                        replacing = self.supervisor.replace(self._slots[engine], why, requests)
                        self._replacements[engine] = self._spawn(replacing)
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
        """Run a batch on an engine and pass its deltas to the router."""
        router, (name, failures, batch) = self._router, dispatch
        if slot.state.failures != failures:  # the engine failed after the dispatch
            return
        running = slot.state.running
        slot.set_busy(True)
        with self.supervisor.containing(slot):
            try:
                async for deltas in slot.generate(tuple([pending.continuation(self._suppress) for pending in batch])):
                    self._perform(router.on_deltas(name, failures, deltas, self._clock.now()))
                    slot.set_busy(bool(running))
                self._perform(router.on_stream_end(name, failures, batch))
            except (ValueError, ConfigError) as error:
                self._perform(router.on_refused(name, failures, batch, str(error)))
                slot.set_busy(bool(running))

    async def profile(self, path: str, max_bytes: int) -> str:
        """Record a profile of one engine until its next update, in files whose names begin with `path` and its name.

        Return the engine's name; empty: no engine of this run's machines serves. Raises NotImplementedError if the
        engine can't record profiles.
        """
        for slot in self._slots.values():
            if slot.state.status is EngineStatus.SERVING and not slot.address:
                with self.supervisor.containing(slot):
                    await slot.profile(f"{path}-{slot.name}", max_bytes)
                return slot.name
        return ""

    async def _abort(self, slot: EngineSlot, ids: Sequence[str]) -> None:
        with contextlib.suppress(
            RelaxError, NotImplementedError
        ):  # the engine completes the requests, or its failure is detected elsewhere
            await slot.abort(ids)

    # -- log-probs of given tokens ------------------------------------------------------------------------------

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[Sequence[float]]:
        """Return the log-prob of every token of each sequence, [sequences][tokens]; the first token of each has 0.

        The caller sets a deadline. Do not call this on a pool that is paused or receives weights. Sequences are grouped
        into parts, so that each engine that serves gets a share. A part goes to the least busy engine; if this engine
        fails, the part goes to a different one. A deterministic pool scores each sequence alone, so that no result
        depends on the batch.
        """
        if self._deterministic:
            return [(await self._score_part([sequence], temperature))[0] for sequence in sequences]
        fair = -(-sum(map(len, sequences)) // max(len(self._router.available()), 1))
        parts = _parts(sequences, min(MAX_SCORED_TOKENS, fair))
        scored = await start_all(*(self._score_part(part, temperature) for part in parts))
        return list(chain.from_iterable(scored))

    async def _score_part(self, sequences: Sequence[Sequence[int]], temperature: float) -> Sequence[Sequence[float]]:
        while True:
            self.check()
            available = self._router.available()
            free = [engine for engine in available if self._scored_parts[engine.name] < MAX_SCORED_PARTS]
            if not free:
                self._changed.clear()
                await self._changed.wait()
                continue
            engine = min(free, key=lambda engine: (self._scored_parts[engine.name], engine.kv.left))
            name, slot = engine.name, self._slots[engine.name]
            self._scored_parts[name] += 1
            try:
                with self.supervisor.containing(slot):
                    found = await slot.score(sequences, temperature)
                    if [len(scores) for scores in found] != [len(sequence) for sequence in sequences]:
                        raise InfrastructureError(f"{name} returned a number of log-probs that differs from its tokens")
                    for scores in found:
                        if scores and not are_log_probs(scores):
                            raise InfrastructureError(
                                f"{name} returned log-probs of {min(scores)} to {max(scores)}; want finite values <= 0"
                            )
                    engine.restarts.refill()
                    return found
            finally:
                self._scored_parts[name] -= 1
                if not self._scored_parts[name]:
                    del self._scored_parts[name]
                self._changed.set()

    # -- joins and leaves ---------------------------------------------------------------------------------------

    def grow(self, slot: EngineSlot, on_step: OnStep, timeout_s: float = JOIN_S) -> None:
        """Add an engine, which serves once it has proved the newest weights.

        `on_step` is called with every step up to `active`; with `failed`, if the engine can't join within `timeout_s`;
        or with `completed` after `cancel_join`. In the last two cases the engine has served nothing and is stopped.
        After `active`, an engine that was started elsewhere may still be lost: `failed`.
        """
        self._slots[slot.name] = slot
        self._router.join(slot.state)
        self._joins[slot.name] = self._spawn(self._join(slot, on_step, timeout_s))

    def cancel_join(self, name: str) -> None:
        """Stop an engine that has not joined yet; an engine that serves stays."""
        if (joining := self._joins.get(name)) is not None:
            joining.cancel()

    async def _join(self, slot: EngineSlot, on_step: OnStep, timeout_s: float) -> None:
        def follow(step: JoiningStep) -> None:
            on_step(slot.name, step, "")

        end: Step = "failed"
        try:
            async with asyncio.timeout(timeout_s):
                await self.supervisor.join(slot, follow)
        except TimeoutError:
            why = f"{slot.name} did not join within {timeout_s:g} s; its log is logs/{slot.name}.log"
        except asyncio.CancelledError:
            if self._closed:
                raise
            end, why = "completed", ""
        except Exception as error:  # of the engine's own code, too: the pool serves on without it
            why = str(error) if slot.name in str(error) else f"{slot.name}: {error or type(error).__name__}"
        else:
            del self._joins[slot.name]
            if slot.address:
                self._external[slot.name] = on_step
            on_step(slot.name, "active", "")
            return
        del self._joins[slot.name]
        await self._remove(slot, well=False)
        on_step(slot.name, end, why)

    def drain(self, name: str, on_step: OnStep, timeout_s: float = DRAIN_S) -> None:
        """Remove an engine. Its requests continue on other engines from their last token.

        Requests that the engine can't abort may end there within `timeout_s`. `on_step` is called with `removing` and
        `completed`. One engine at least must stay in the pool.
        """
        self._router.leave(name)
        self._spawn(self._leave(self._slots[name], on_step, timeout_s))

    async def _leave(self, slot: EngineSlot, on_step: OnStep, timeout_s: float) -> None:
        if (replacing := self._replacements.pop(slot.name, None)) is not None:
            replacing.cancel()
            await asyncio.wait({replacing})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.supervisor.drain(slot)
                while self._scored_parts[slot.name]:
                    self._changed.clear()
                    await self._changed.wait()
        on_step(slot.name, "removing", "")
        await self._remove(slot, well=True)
        on_step(slot.name, "completed", "")

    async def _lose(self, slot: EngineSlot, why: str, requests: int) -> None:
        await self.supervisor.lose(slot, why, requests)
        await self._remove(slot, well=False)

    async def _remove(self, slot: EngineSlot, well: bool) -> None:
        """Stop an engine and forget it; its last requests continue elsewhere."""
        self._external.pop(slot.name, None)
        self._perform(self._router.remove(slot.name))
        await slot.leave(well)
        await self.supervisor.forget(slot)
        del self._slots[slot.name]

    # -- tasks and failure --------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            self._perform(self._router.tick(self._clock.now()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, RelaxError) else RelaxError(f"{type(error).__name__}: {error}"))

    def _fail(self, error: RelaxError) -> None:
        """Fail the pool: raise `error` in all open, waiting and later calls."""
        self._failure = error
        for batch in self._requests.values():
            if not batch.ended.done():
                batch.ended.set_exception(error)
        self._requests.clear()
        self._admission.fail(error)
        self._changed.set()

    def check(self) -> None:
        """Raise the pool's error if it has failed: PoolFailed if no engine can be replaced any more."""
        if self._failure is not None:
            raise self._failure

    def queue(self) -> dict[str, Any]:
        """Return the number and age of waiting requests, and counts of tokens, for the run's status."""
        now = self._clock.now()
        waiting, oldest_wait_s = self._router.queue(now)
        unadmitted, deadline = self._admission.waiting
        if deadline is not None:
            asked_at = deadline - self._router.limits.timeout_s
            oldest_wait_s = max(oldest_wait_s, self._router.active_time(now) - asked_at)
        return {
            "waiting": waiting + unadmitted, "oldest_wait_s": round(oldest_wait_s, 3),
            "requests_per_engine": self._router.limits.per_engine,
            "prompt_tokens": self._router.prompt_tokens, "cached_tokens": self._router.cached_tokens,
            "drafted_tokens": self._router.drafted_tokens, "kept_drafts": self._router.kept_drafts,
        }  # fmt: skip

    def hosts(self) -> dict[str, str]:
        """Return the address of each started engine's machine, by the engine's name."""
        return {slot.name: slot.worker.host for slot in self._slots.values() if slot.worker is not None}

    def facts(self) -> dict[str, Any]:
        """Return the state of each engine by name, for the run's status."""
        found: dict[str, Any] = {}
        for slot in self._slots.values():
            engine = slot.state
            silent_s = round(self._clock.now() - engine.last_heard, 3) if engine.running else 0.0
            found[slot.name] = {
                "serving": engine.status is EngineStatus.SERVING, "state": engine.status.value, "version": str(engine.loaded),
                "running": len(engine.running), "loading": engine.loading, "silent_s": silent_s, "paused": engine.paused,
                "tokens_left": engine.kv.left, "kv_capacity": engine.kv.capacity,
                "kv_running": engine.kv.running, "kv_idle": engine.kv.idle_tokens, "restarts": slot.restarts,
                "pid": slot.worker.pid if slot.worker else 0, "address": slot.address,
                "node": slot.worker.host if slot.worker else "",
            }  # fmt: skip
        return found


def _parts(sequences: Sequence[Sequence[int]], max_tokens: int) -> Iterator[Sequence[Sequence[int]]]:
    part: list[Sequence[int]] = []
    tokens = 0
    for sequence in sequences:
        if part and tokens + len(sequence) > max_tokens:
            yield part
            part, tokens = [], 0
        part.append(sequence)
        tokens += len(sequence)
    if part:
        yield part
