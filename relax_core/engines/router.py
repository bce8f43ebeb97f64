# SPDX-License-Identifier: Apache-2.0
"""The router of an engine pool: events in, actions out. It has no IO and no clock; `now` is passed in."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from relax_core.api.engine import Delta
from relax_core.api.weights import Version
from relax_core.engine_kit.threaded_engine import check_ids
from relax_core.engines.engine_state import MAX_FAILURES, EngineState, EngineStatus, PrefixAffinity, response_fault
from relax_core.engines.requests import PendingRequest


class Dispatch(NamedTuple):
    """Ask an engine to continue these, in one call. The answers belong to this incarnation of it alone."""

    engine: str
    incarnation: int
    batch: tuple[PendingRequest, ...]


class AbortRequest(NamedTuple):
    """Tell an engine to end these now."""

    engine: str
    ids: list[str]


class CompleteRequest(NamedTuple):
    """Give a request's completion to its caller. Each is answered once."""

    request: PendingRequest


class Quarantine(NamedTuple):
    """Replace an engine that died, hangs or is wrong: end it, start a fresh one, bring it the newest weights."""

    engine: str
    why: str
    requests: int = 0
    """Requests that go on elsewhere, or begin again there."""


class GiveUp(NamedTuple):
    """End the pool: no engine can be had, so nothing that is open would ever be answered."""

    why: str


Action: TypeAlias = Dispatch | AbortRequest | CompleteRequest | Quarantine | GiveUp

MEAN_OF = 64
"""Requests over which their mean size is taken."""
UNBOUNDED = 1 << 30
"""More requests than there ever are."""
MAX_ABORTS = 8
"""Times that engines may end a request unasked before that is its result."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on the number of open requests and on their time; 0 is no limit of that kind."""

    timeout_s: float = 3600.0
    """From when a completion is asked for to its answer. While the pool is paused time stands still."""
    per_engine: int = 0
    """Requests that one engine is given at once."""
    backlog: int = 0
    """Requests that may be open beyond those."""
    silence_s: float = 180.0
    """An engine that says nothing for so long while it should is stuck, whatever else it answers."""
    kv_tokens: int | None = 0
    """Tokens that the cache of one engine holds; 0: not counted, None: as the engine says."""
    kv_reserve: float = 1.0
    """Share of the tokens that a running request may still sample for which room is kept."""


class Router:
    """Decides where requests run, when they end, and which engines are replaced.

    A request: `submitted -> waiting -> running on an engine -> completed`; back from running to waiting, with the tokens
    it has, when its engine fails, aborts or is to be drained. A cancelled one may still run until its engine ends it.

    Invariants:
    - An open request is in exactly one place: waiting, in a batch to be restarted, or running on one engine.
    - It gets one `CompleteRequest`, at its deadline at the latest, and never tokens of weights older than its floor.
    - Nothing is dispatched to an engine that is out, held or full, nor while the pool is paused. An engine is full
      by the number of its requests, or by its `KvLedger`; a request that is larger than a cache runs there alone.
    - A request for which no cache has room has an engine drained for it: those behind it go to others, so that none starves.
    - Nothing is dispatched to an engine with weights of an earlier incarnation than the newest that was published: a
      rollback may have given them up, and their steps say nothing of it. Floors are compared within one incarnation only.
    - Events of an earlier incarnation of an engine change nothing.
    - `whole_batches` (deterministic runs): the batch of a failed engine is begun again as it was, since continued tokens
      would not be the same bits; engines take any number of requests.
    """

    def __init__(
        self, names: Iterable[str], limits: RequestLimits = RequestLimits(), whole_batches: bool = False
    ) -> None:
        self.limits, self.whole_batches = limits, whole_batches
        self.engines = {name: EngineState(name) for name in names}
        for name, engine in self.engines.items():
            engine.kv.reserve = limits.kv_reserve
            self.set_kv_tokens(name, 0)
        self._mean_tokens = 0.0
        """Of the tokens that a request may come to hold, over the newest ones."""
        self._open: dict[str, PendingRequest] = {}
        """Awaited, in the order in which they were submitted, which is that of their deadlines."""
        self._waiting: list[PendingRequest] = []
        self._restarting: list[tuple[PendingRequest, ...]] = []
        """With `whole_batches`: batches to be begun again."""
        self._affinity = PrefixAffinity()
        self._incarnation = 0
        """Of the newest weights that were published."""
        self.vocab_size = self.max_context = 0
        """Limits of the engines' model; 0: unknown."""
        self._paused_s = 0.0
        self._paused_at: float | None = None

    # -- from callers -------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that somebody awaits."""
        return len(self._open)

    def has_capacity(self, count: int) -> bool:
        """Tell whether so many may be submitted together now; more than fit at all may when nothing else is open."""
        limits = self.limits
        if not (limits.backlog and limits.per_engine) or not self._open:
            return True
        return len(self._open) + count <= limits.backlog + limits.per_engine * len(self.engines)

    def room(self, expected_tokens: int) -> int:
        """Count the requests of new samples that engines have room for, with as many waiting as are running: engines find
        work when one ends, and where they are what everybody waits for nothing new is begun.

        `expected_tokens`: those that a request may come to hold, before any was submitted.
        """
        limits, tokens = self.limits, math.ceil(self._mean_tokens) or expected_tokens
        if not limits.per_engine or self.whole_batches:
            return UNBOUNDED
        free = running = 0
        for engine in self.engines.values():
            if engine.status is EngineStatus.SERVING:
                running += len(engine.running)
                places = limits.per_engine - len(engine.running)
                free += min(places, engine.kv.places(tokens)) if engine.kv.capacity else places
        return free + min(limits.backlog, running) - len(self._waiting)

    def set_kv_tokens(self, name: str, told: int) -> None:
        """Bound an engine by its KV cache: by the limits, else by what it has `told` of itself."""
        counted, limit = not self.whole_batches, self.limits.kv_tokens
        self.engines[name].kv.capacity = (told if limit is None else limit) if counted else 0
        self._counts_kv = any(engine.kv.capacity for engine in self.engines.values())

    def forget_sessions(self, sessions: Iterable[Hashable]) -> None:
        """Keep nothing for samples that take no more turns."""
        for session in sessions:
            self._affinity.forget(session)
            for engine in self.engines.values():
                engine.kv.forget(session)

    def submit(self, submitted: Sequence[PendingRequest], now: float) -> list[Action]:
        """Take requests; those that no engine could run are answered at once."""
        actions: list[Action] = []
        time, checked, bad_ids = self.active_time(now), None, ""
        for pending in submitted:
            tokens, new = pending.request.tokens, pending.request.max_new_tokens
            if tokens is not checked:  # all of a group have the same prompt
                checked, bad_ids = tokens, check_ids(tokens, self.vocab_size) if self.vocab_size else ""
            self._open[pending.request.id] = pending
            error = bad_ids
            if not error and self.max_context and len(tokens) + new > self.max_context:
                error = f"{len(tokens)} prompt + {new} new tokens pass the context of {self.max_context}"
            if error:
                actions.append(self._complete(pending, "error", error))
                continue
            pending.deadline = time + self.limits.timeout_s
            pending.asked_at = time if pending.asked_at is None else pending.asked_at
            tokens_needed = len(tokens) + math.ceil(self.limits.kv_reserve * new)
            self._mean_tokens += (tokens_needed - self._mean_tokens) / (MEAN_OF if self._mean_tokens else 1)
            self._waiting.append(pending)
        return actions

    def cancel(self, ids: Sequence[str]) -> list[Action]:
        """Drop requests that nobody awaits any more."""
        return self._drop([self._open.pop(name) for name in ids if name in self._open])

    def _drop(self, settled: Sequence[PendingRequest]) -> list[Action]:
        """Let settled requests wait no more, and have the engines that run them abort them."""
        running: dict[str, list[str]] = {}
        for pending in settled:
            pending.settled = True
            if pending.engine:
                running.setdefault(pending.engine, []).append(pending.request.id)
        if len(running) < len(settled):
            self._waiting = [pending for pending in self._waiting if not pending.settled]
        return [AbortRequest(engine, ids) for engine, ids in running.items()]

    # -- to engines ---------------------------------------------------------------------------------------------

    def dispatch(self, now: float) -> list[Dispatch]:
        """Give what waits to the engines that may run it; the requests of one engine go together."""
        if self._paused_at is not None or not (self._waiting or self._restarting):
            return []
        available, time = self.available(), self.active_time(now)
        chosen: list[tuple[EngineState, tuple[PendingRequest, ...]]] = []
        for again in self._restarting[:]:
            engine = self._affinity.choose(available, again[0], max(pending.floor for pending in again))
            if engine is not None:
                self._restarting.remove(again)
                for pending in again:
                    engine.add(pending)
                chosen.append((engine, again))
        limit = 0 if self.whole_batches else self.limits.per_engine
        if limit:
            available = [engine for engine in available if len(engine.running) < limit]
        batches: dict[str, list[PendingRequest]] = {}
        waiting: list[PendingRequest] = []
        for at, pending in enumerate(self._waiting):
            if not available:
                waiting += self._waiting[at:]
                break
            able, full = self._with_room(available, pending)
            if full is not None:  # nobody passes it there, so that it has room one day
                available.remove(full)
            engine = self._affinity.choose(able, pending, pending.floor)
            if engine is None:
                waiting.append(pending)
                continue
            if len(self.engines) > 1:
                self._affinity.record(pending, engine)
            if not engine.running:
                engine.last_heard = now
            engine.add(pending)
            if pending.began_at is None:
                pending.began_at = time
            if pending.dispatch_alone:
                chosen.append((engine, (pending,)))
            else:
                batches.setdefault(engine.name, []).append(pending)
            if limit and len(engine.running) >= limit:
                available.remove(engine)
        self._waiting = waiting
        chosen += [(self.engines[name], tuple(batch)) for name, batch in batches.items()]
        for _, members in chosen:
            for pending in members:
                pending.batch = members
        return [Dispatch(engine.name, engine.incarnation, members) for engine, members in chosen]

    def _with_room(
        self, available: list[EngineState], pending: PendingRequest
    ) -> tuple[list[EngineState], EngineState | None]:
        """Return the engines whose caches have room for a request: of these the ones that need not evict a session for it, if
        there are any. Where none has room also return the one that has most: it is to be drained for the request."""
        if not self._counts_kv:
            return available, None
        able = [engine for engine in available if engine.version.step >= pending.floor]
        fitting = [engine for engine in able if engine.kv.fits(pending)]
        if able and not fitting:
            return [], min(able, key=lambda engine: engine.kv.running)
        return [engine for engine in fitting if engine.kv.fits_beside_idle(pending)] or fitting, None

    def available(self) -> list[EngineState]:
        """Return the engines that may be given requests now."""
        newest = self._incarnation
        return [engine for engine in self.engines.values() if engine.available and engine.version.incarnation >= newest]

    def abandoned(self, name: str) -> bool:
        """Tell whether an engine's weights are of an earlier incarnation than the newest: it samples nothing more with them."""
        return self.engines[name].version.incarnation < self._incarnation

    def newest(self) -> Version:
        """Return the newest version among serving engines (all engines while none serves): what admission goes by.

        A request admitted at this version runs on engines that have it; a slow one gets nothing until it has it too.
        """
        engines = self.engines.values()
        serving = [engine.version for engine in engines if engine.status is EngineStatus.SERVING]
        return max(serving or [engine.version for engine in engines])

    def preempt(self, name: str) -> list[str]:
        """Name requests that an engine is to be told to end, to go on later with the tokens they have."""
        if self.whole_batches:
            return []  # they run to their end
        running = self.engines[name].running
        for pending in running.values():
            pending.preempted = not pending.settled
        return list(running)

    # -- from engines -------------------------------------------------------------------------------------------

    def on_deltas(self, name: str, incarnation: int, deltas: Sequence[Delta], now: float) -> list[Action]:
        """Take tokens and ends of requests from an engine; one that says what can't be true is replaced."""
        engine = self.engines[name]
        if engine.incarnation != incarnation:
            return []
        engine.last_heard, vocab_size = now, self.vocab_size
        actions: list[Action] = []
        stopped: list[str] = []
        for delta in deltas:
            pending = engine.running.get(delta.id)
            if pending is None:
                return [*actions, *self._fail(engine, f"{name} answered {delta.id!r}, which it does not run")]
            if not pending.settled:
                if fault := response_fault(delta, pending, engine.max_step, vocab_size):
                    return [*actions, *self._fail(engine, f"{name} gave {fault}")]
                engine.sampled(len(delta.tokens))
                pending.add(delta)
                if pending.finish == "stop" and not delta.finish:
                    stopped.append(delta.id)
                    actions.append(self._complete(pending, "stop"))
            if delta.finish:
                engine.remove(pending, kept=delta.finish != "error")
                if delta.finish != "error":
                    engine.failures.refill()
                if not pending.settled:
                    actions += self._complete_or_requeue(pending)
        if stopped:
            actions.append(AbortRequest(name, stopped))
        return actions

    def _complete_or_requeue(self, pending: PendingRequest) -> list[Action]:
        """Complete a request that its engine ended; one that was aborted goes on, here or elsewhere."""
        if pending.finish != "abort":
            return [self._complete(pending, pending.finish, pending.error)]
        if pending.complete:
            return [self._complete(pending, "length")]
        pending.num_aborts += not pending.preempted
        if pending.num_aborts > MAX_ABORTS:
            error = pending.error or f"engines ended it {pending.num_aborts} times"
            return [self._complete(pending, "abort", error)]
        pending.finish = ""
        self._waiting.append(pending)
        return []

    def on_stream_end(self, name: str, incarnation: int, batch: tuple[PendingRequest, ...]) -> list[Action]:
        """Check that each request of a batch was ended before the engine ended its answer."""
        engine = self.engines[name]
        unended = [pending for pending in batch if pending.batch is batch]
        if engine.incarnation == incarnation and unended:
            return self._fail(engine, f"{name} ended its answer without {unended[0].request.id!r}")
        return []

    def on_refused(self, name: str, incarnation: int, batch: tuple[PendingRequest, ...], error: str) -> list[Action]:
        """Find the wrong request of a batch that an engine would not take; the engine is not at fault.

        Each is dispatched alone next time, so that only the wrong one fails.
        """
        engine = self.engines[name]
        if engine.incarnation != incarnation:
            return []
        actions: list[Action] = []
        for pending in [one for one in batch if one.batch is batch]:
            engine.remove(pending, kept=False)
            if pending.settled:
                continue
            if len(batch) == 1:
                actions.append(self._complete(pending, "error", error))
            else:
                pending.dispatch_alone = True
                self._waiting.append(pending)
        return actions

    def on_failure(self, name: str, incarnation: int, why: str) -> list[Action]:
        """Replace an engine that died or does not answer; an earlier incarnation, or one that is out, is old news."""
        engine = self.engines[name]
        stale = engine.incarnation != incarnation or engine.status is EngineStatus.OUT
        return [] if stale else self._fail(engine, why)

    def on_restart_failed(self, name: str, why: str) -> list[Action]:
        """Replace once more a fresh engine that did not come up, or did not prove its weights."""
        return self._fail(self.engines[name], why)

    def _fail(self, engine: EngineState, why: str) -> list[Action]:
        """Take an engine out; requests go on elsewhere. One that had all tokens asked for only lost its last word."""
        engine.status, engine.loading = EngineStatus.OUT, False
        engine.incarnation, engine.cache_epoch = engine.incarnation + 1, engine.cache_epoch + 1
        running = list(engine.running.values())
        engine.running.clear()
        engine.holds.clear()
        engine.pending_tokens = 0
        engine.kv.clear()
        awaited = [pending for pending in running if not pending.settled]
        batches = {id(pending.batch): pending.batch for pending in awaited}
        for pending in running:
            pending.engine, pending.batch = "", ()
        actions: list[Action] = []
        if self.whole_batches:
            for batch in batches.values():
                again = tuple(pending.restarted() for pending in batch)
                self._restarting.append(again)
                self._open.update((one.request.id, one) for one in again if not one.settled)
        else:
            actions += [self._complete(pending, "length") for pending in awaited if pending.complete]
            self._waiting += [pending for pending in awaited if not pending.settled]
        if engine.failures.spend():
            return [*actions, Quarantine(engine.name, why, len(awaited))]
        return [*actions, GiveUp(f"{engine.name} failed {MAX_FAILURES} times in a row, last: {why}")]

    # -- weights and pauses -------------------------------------------------------------------------------------

    def on_published(self, version: Version) -> None:
        """Dispatch nothing more to engines with weights of an earlier incarnation than this version's."""
        self._incarnation = max(self._incarnation, version.incarnation)

    def on_loading(self, name: str, version: Version) -> None:
        """Allow an engine to name the step that it loads; it runs nothing where that is of another incarnation."""
        engine = self.engines[name]
        if engine.running and version.incarnation != engine.version.incarnation:
            raise RuntimeError(f"{name}: loads {version} over {engine.version} while it runs {sorted(engine.running)}")
        engine.loading, engine.max_step = True, max(engine.version.step, version.step)

    def on_proved(self, name: str, incarnation: int, version: Version, now: float) -> bool:
        """Let an engine serve that showed that it holds the newest weights: the only way in. False: it failed meanwhile."""
        engine = self.engines[name]
        if engine.incarnation != incarnation:
            return False
        same = version.incarnation == engine.version.incarnation
        engine.max_step = max(engine.max_step, version.step) if same else version.step
        engine.cache_epoch += 1
        engine.kv.drop_idle()
        engine.version, engine.last_heard = version, now
        engine.loading, engine.status = False, EngineStatus.SERVING
        return True

    def hold(self, name: str, why: str) -> None:
        """Dispatch nothing new to an engine until it is released."""
        self.engines[name].holds.add(why)

    def release(self, name: str, why: str, now: float) -> None:
        self.engines[name].holds.discard(why)
        self.engines[name].last_heard = now

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    def pause(self, now: float) -> None:
        """Dispatch nothing to any engine, and let time stand still for what is open."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        if self._paused_at is not None:
            self._paused_s += now - self._paused_at
            self._paused_at = None
        for engine in self.engines.values():
            engine.last_heard = now

    # -- time ---------------------------------------------------------------------------------------------------

    def active_time(self, now: float) -> float:
        """Time without pauses: deadlines are given in it."""
        return (now if self._paused_at is None else self._paused_at) - self._paused_s

    def tick(self, now: float) -> list[Action]:
        """Complete requests at their deadlines, and find engines that are silent while they should say something."""
        time, late = self.active_time(now), list[PendingRequest]()
        for pending in self._open.values():
            if pending.deadline > time:
                break
            late.append(pending)
        why = f"not sampled within {self.limits.timeout_s:g} s (rollout.turn_timeout_s)"
        actions: list[Action] = [
            self._complete(pending, "length") if pending.complete else self._complete(pending, "deadline", why)
            for pending in late
        ]
        actions += self._drop(late)
        for engine in self.engines.values():
            silent_s = now - engine.last_heard
            paused = self._paused_at is not None or "paused" in engine.holds
            if engine.running and not paused and not engine.loading and silent_s >= self.limits.silence_s:
                actions += self._fail(engine, f"{engine.name} said nothing for {silent_s:.0f} s of what it was asked")
        return actions

    def _complete(self, pending: PendingRequest, finish: str, error: str = "") -> CompleteRequest:
        pending.settled, pending.finish, pending.error = True, finish, error  # type: ignore[assignment]
        del self._open[pending.request.id]
        return CompleteRequest(pending)
