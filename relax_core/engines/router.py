# SPDX-License-Identifier: Apache-2.0
"""The router of an engine pool: a state machine from events to actions. No IO, no clock; `now` is passed in."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

from relax_core.api.engine import Delta
from relax_core.api.weights import Version
from relax_core.engine_kit.threaded_engine import check_ids
from relax_core.engines.engine_state import MAX_FAILURES, EngineState, EngineStatus, PrefixAffinity, response_fault
from relax_core.engines.requests import PendingRequest
from relax_core.registry.shapes import shown


class Dispatch(NamedTuple):
    """Send a batch to an engine in one call; responses are valid only while the engine has this number of failures."""

    engine: str
    failures: int
    batch: tuple[PendingRequest, ...]


class AbortRequest(NamedTuple):
    """Abort requests on an engine now."""

    engine: str
    ids: list[str]


class CompleteRequest(NamedTuple):
    """Return a request's completion to its caller; sent once for each request."""

    request: PendingRequest


class Quarantine(NamedTuple):
    """Replace an engine that died, hangs or sends invalid responses with a new one that has the newest weights."""

    engine: str
    why: str
    requests: int = 0
    """Number of the engine's open requests, which continue or restart on available engines."""


class GiveUp(NamedTuple):
    """Fail the pool, because an engine failed too often in a row."""

    why: str


Action: TypeAlias = AbortRequest | CompleteRequest | Quarantine | GiveUp

MEAN_OF = 64
"""Number of requests over which the mean request size is averaged."""
UNBOUNDED = 1 << 30
"""Number of requests that stands for no limit."""
MAX_ABORTS = 8
"""Unrequested aborts of a request that are retried; one more ends the request with finish `abort`."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on the number and time of open requests; if `per_engine` or `backlog` is 0, the number is unlimited."""

    timeout_s: float = 3600.0
    """Seconds from the call to its completion, pauses of the pool excluded."""
    per_engine: int = 0
    """Most requests that run on one engine at once."""
    backlog: int = 0
    """Most open requests in excess of all engines' capacity, which is `per_engine` for each."""
    silence_s: float = 180.0
    """Seconds without a token until an engine with running requests is replaced, even if it answers health checks."""
    kv_tokens: int | None = 0
    """KV cache size of one engine in tokens; 0: not counted, None: as the engine reports."""
    kv_reserve: float = 1.0
    """Share, from 0 to 1, of the tokens that a running request may still sample. The share counts as used cache."""


class Router:
    """A state machine that decides where requests run, when they end, and which engines are replaced.

    A request: `submitted -> waiting -> running on an engine -> completed`. A running request returns to waiting, with
    its tokens, if its engine fails, aborts it or is drained. A cancelled request may run until its engine ends it.

    Invariants:
    - An open request is in exactly one place: waiting, in a batch to be restarted, or running on one engine.
    - An open request gets one `CompleteRequest`, at its deadline at the latest, and no tokens of weights older than its
      floor or newer than the engine's last proof.
    - Nothing is dispatched while the pool is paused, or to an engine that is out, held or full. The number of requests
      or the `KvLedger` makes an engine full; a request larger than the cache runs alone.
    - If no cache has room for a request, one engine gets nothing new until there is room; later requests go to the
      remaining engines. So no request starves.
    - Nothing is dispatched to an engine whose weights are of an earlier incarnation than the newest published ones: a
      rollback may have discarded them. Floors are compared within one incarnation only.
    - Events from before an engine's last failure are ignored, and events of an engine that has left.
    - With `whole_batches` (deterministic runs), the batch of a failed engine is restarted unchanged, since continued
      requests would not be bit-identical. The number of requests on an engine is not limited.
    """

    def __init__(
        self, engines: Iterable[EngineState], limits: RequestLimits = RequestLimits(), whole_batches: bool = False
    ) -> None:
        self.limits, self.whole_batches = limits, whole_batches
        self.engines = {engine.name: engine for engine in engines}
        for name, engine in self.engines.items():
            engine.kv.reserve = limits.kv_reserve
            self.set_kv_tokens(name, 0)
        self._mean_tokens = 0.0
        """Moving average of a request's tokens, prompt plus reserved new tokens; 0: no request yet."""
        self._open: dict[str, PendingRequest] = {}
        """Requests that are not settled, in order of submission and so of deadline."""
        self._waiting: list[PendingRequest] = []
        self._restarting: list[tuple[PendingRequest, ...]] = []
        """With `whole_batches`: batches to restart."""
        self._num_submissions = 0
        self._affinity = PrefixAffinity()
        self.cached_tokens = self.prompt_tokens = self.kept_drafts = self.drafted_tokens = 0
        """Prompt tokens that engines found in their prefix caches, and all prompt tokens, as far as engines count them."""
        self.kept_drafts = self.drafted_tokens = 0
        """Tokens that engines drafted ahead and kept, and all drafted tokens."""
        self._incarnation = 0
        """Incarnation of the newest published weights."""
        self.vocab_size = self.max_context = 0
        """Vocabulary size and context length of the engines' model, in tokens; 0: unknown."""
        self._paused_s = 0.0
        self._paused_at: float | None = None

    # -- from callers -------------------------------------------------------------------------------------------

    def queue(self, now: float) -> tuple[int, float]:
        """Return the number of requests that wait for an engine, and the longest wait of a new one in seconds."""
        waiting = [*self._waiting, *(pending for batch in self._restarting for pending in batch)]
        time = self.active_time(now)
        return len(waiting), max((time - one.asked_at for one in waiting if one.began_at is None), default=0.0)

    @property
    def num_open(self) -> int:
        """Number of requests that are neither completed nor cancelled."""
        return len(self._open)

    def has_capacity(self, count: int) -> bool:
        """Return True if `count` requests may be submitted together now.

        A batch larger than the whole pool is accepted when nothing is open.
        """
        limits = self.limits
        if not (limits.backlog and limits.per_engine) or not self._open:
            return True
        return len(self._open) + count <= limits.backlog + limits.per_engine * sum(
            engine.member for engine in self.engines.values()
        )

    def room(self, expected_tokens: int) -> int:
        """Return how many requests of new samples may start.

        Count the requests for which engines have room, plus a queue as long as the number of running requests, at most
        the backlog. Subtract the requests that wait already. The queue keeps engines busy when a request ends.
        `expected_tokens`: assumed size of a request until the first is submitted.
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

    def set_kv_tokens(self, name: str, reported: int) -> None:
        """Set an engine's KV cache capacity: `RequestLimits.kv_tokens` if set, else the reported size `reported`."""
        counted, limit = not self.whole_batches, self.limits.kv_tokens
        self.engines[name].kv.capacity = (reported if limit is None else limit) if counted else 0
        self._counts_kv = any(engine.kv.capacity for engine in self.engines.values())

    def forget_sessions(self, sessions: Collection[Hashable]) -> None:
        """Drop cache records of samples that take no more turns."""
        self._affinity.forget(sessions)
        for engine in self.engines.values():
            for session in sessions if engine.kv.idle else ():
                engine.kv.forget(session)

    def submit(self, submitted: Sequence[PendingRequest], now: float) -> list[Action]:
        """Accept requests; a request that no engine can run completes at once with finish `error`."""
        actions: list[Action] = []
        time, checked, bad_ids = self.active_time(now), None, ""
        self._num_submissions += 1
        for pending in submitted:
            pending.submission = self._num_submissions
            tokens, new = pending.prompt, pending.max_new_tokens
            if tokens is not checked:  # the requests of a group share one prompt
                checked, bad_ids = tokens, check_ids(tokens, self.vocab_size) if self.vocab_size else ""
            self._open[pending.id] = pending
            error = bad_ids
            if not error and self.max_context and len(tokens) + new > self.max_context:
                error = f"{len(tokens)} prompt + {new} new tokens exceed the context of {self.max_context} tokens"
            if error:
                actions.append(self._complete(pending, "error", error))
                continue
            pending.deadline = time + self.limits.timeout_s
            tokens_needed = len(tokens) + math.ceil(self.limits.kv_reserve * new)
            self._mean_tokens += (tokens_needed - self._mean_tokens) / (MEAN_OF if self._mean_tokens else 1)
            self._waiting.append(pending)
        return actions

    def cancel(self, ids: Sequence[str]) -> list[Action]:
        """Drop requests whose callers were cancelled; return the aborts for the engines that run them."""
        return self._drop([self._open.pop(name) for name in ids if name in self._open])

    def _drop(self, settled: Sequence[PendingRequest]) -> list[Action]:
        """Remove settled requests from the waiting ones; return the aborts for the engines that run them."""
        running: dict[str, list[str]] = {}
        for pending in settled:
            pending.settled = True
            if pending.engine:
                running.setdefault(pending.engine, []).append(pending.id)
        if len(running) < len(settled):
            self._waiting = [pending for pending in self._waiting if not pending.settled]
        return [AbortRequest(engine, ids) for engine, ids in running.items()]

    # -- to engines ---------------------------------------------------------------------------------------------

    def dispatch(self, now: float) -> list[Dispatch]:
        """Assign waiting requests to engines that may run them.

        The requests of one engine form a batch. With `whole_batches`, the requests of one `submit` call form a batch, since
        the bits of a batch depend on its members, and which other requests wait depends on timing.
        """
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
        batches: dict[tuple[str, int], list[PendingRequest]] = {}
        engine_of: dict[int, EngineState | None] = {}
        """With `whole_batches`: the engine of each submission."""
        waiting: list[PendingRequest] = []
        for at, pending in enumerate(self._waiting):
            if not available:
                waiting += self._waiting[at:]
                break
            able, full = self._with_room(available, pending) if self._counts_kv else (available, None)
            if full is not None:  # give this engine nothing else, so that it drains and gets room for the request
                available.remove(full)
            number = pending.submission if self.whole_batches else 0
            engine = engine_of[number] if number in engine_of else self._affinity.choose(able, pending, pending.floor)
            if self.whole_batches:
                engine_of[number] = engine
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
                batches.setdefault((engine.name, number), []).append(pending)
            if limit and len(engine.running) >= limit:
                available.remove(engine)
        self._waiting = waiting
        chosen += [(self.engines[name], tuple(batch)) for (name, _), batch in batches.items()]
        for _, members in chosen:
            for pending in members:
                pending.batch = members
        return [Dispatch(engine.name, engine.failures, members) for engine, members in chosen]

    def _with_room(
        self, available: list[EngineState], pending: PendingRequest
    ) -> tuple[list[EngineState], EngineState | None]:
        """Return (engines whose caches have room for a request, engine to drain for the request or None).

        Prefer the engines that need not evict an idle session. If no cache has room, drain the one with the fewest
        running tokens.
        """
        able = [engine for engine in available if engine.version.step >= pending.floor]
        fitting = [engine for engine in able if engine.kv.fits(pending)]
        if able and not fitting:
            return [], min(able, key=lambda engine: engine.kv.running)
        return [engine for engine in fitting if engine.kv.fits_without_eviction(pending)] or fitting, None

    def available(self) -> list[EngineState]:
        """Return the engines that may get requests now."""
        newest = self._incarnation
        return [engine for engine in self.engines.values() if engine.available and engine.version.incarnation >= newest]

    def abandoned(self, name: str) -> bool:
        """Return True if an engine's weights are of an earlier incarnation than the newest; they may not sample."""
        return name in self.engines and self.engines[name].version.incarnation < self._incarnation

    def newest(self) -> Version:
        """Return the version at which groups are admitted: the newest of a serving engine, or of any if all are out.

        A group's requests never run on engines with weights older than the group's floor.
        """
        engines = self.engines.values()
        serving = [engine.version for engine in engines if engine.status is EngineStatus.SERVING]
        return max(serving or [engine.version for engine in engines])

    def preempt(self, name: str) -> list[str]:
        """Return the ids of the requests to abort on an engine; the requests keep their tokens and continue later."""
        if self.whole_batches:
            return []  # requests run to completion
        running = self.engines[name].running
        for pending in running.values():
            pending.preempted = not pending.settled
        return list(running)

    # -- from engines -------------------------------------------------------------------------------------------

    def on_deltas(self, name: str, failures: int, deltas: Sequence[Delta], now: float) -> list[Action]:
        """Add the tokens that an engine has sampled to its requests; replace an engine whose response is invalid.

        Hold the tokens of weights that are loading, and the request's later responses, until `on_loaded`.
        """
        engine = self._current(name, failures)
        if engine is None:
            return []
        engine.last_heard, vocab_size, held = now, self.vocab_size, 0
        holding = bool(engine.held) or engine.max_step > engine.loaded.step
        actions: list[Action] = []
        stopped: list[str] = []
        if not isinstance(deltas, list | tuple):
            return self._fail(engine, f"{name} sent an invalid response: {shown(deltas)}; want a list of Delta")
        for delta in deltas:
            if not isinstance(delta, Delta):
                return [*actions, *self._fail(engine, f"{name} sent an invalid response: {shown(delta)}; want a Delta")]
            pending = engine.running.get(delta.id) if isinstance(delta.id, str) else None
            if pending is None:
                return [*actions, *self._fail(engine, f"{name} responded to {delta.id!r}, which it does not run")]
            if not pending.settled:
                if holding:
                    held = sum(len(earlier.tokens) for earlier in engine.held.get(delta.id, ()))
                if fault := response_fault(delta, pending, engine.max_step, vocab_size, held):
                    return [*actions, *self._fail(engine, f"{name} sent an invalid response: {fault}")]
                if holding and (delta.id in engine.held or (delta.tokens and delta.version > engine.loaded.step)):
                    engine.held.setdefault(delta.id, []).append(delta)
                    continue
                engine.kv.sampled(len(delta.tokens))
                pending.add(delta)
                if delta.cached is not None:
                    self.cached_tokens += delta.cached[0]
                    self.prompt_tokens += delta.cached[1]
                if delta.drafts is not None:
                    self.kept_drafts += delta.drafts[0]
                    self.drafted_tokens += delta.drafts[1]
                if pending.finish == "stop" and not delta.finish:
                    stopped.append(delta.id)
                    actions.append(self._complete(pending, "stop"))
            if delta.finish:
                engine.remove(pending, kept=delta.finish != "error")
                if delta.finish != "error":
                    engine.restarts.refill()
                if not pending.settled:
                    actions += self._complete_or_requeue(pending)
        if stopped:
            actions.append(AbortRequest(name, stopped))
        return actions

    def _complete_or_requeue(self, pending: PendingRequest) -> list[Action]:
        """Complete a request that its engine ended; an aborted request waits for its next dispatch."""
        if pending.finish != "abort":
            return [self._complete(pending, pending.finish, pending.error)]
        if not pending.tokens_left:
            return [self._complete(pending, "length")]
        pending.num_aborts += not pending.preempted
        if pending.num_aborts > MAX_ABORTS:
            error = pending.error or f"engines aborted the request {pending.num_aborts} times without being asked to"
            return [self._complete(pending, "abort", error)]
        pending.finish = ""
        self._waiting.append(pending)
        return []

    def on_stream_end(self, name: str, failures: int, batch: tuple[PendingRequest, ...]) -> list[Action]:
        """Replace an engine that ended its response stream before every request of the batch had finished."""
        engine = self._current(name, failures)
        if engine is None:
            return []
        unended = [
            pending for pending in batch
            if pending.batch is batch and not any(delta.finish for delta in engine.held.get(pending.id, ()))
        ]  # fmt: skip
        if unended:
            return self._fail(engine, f"{name} ended its response without finishing request {unended[0].id!r}")
        return []

    def on_refused(self, name: str, failures: int, batch: tuple[PendingRequest, ...], error: str) -> list[Action]:
        """Handle a batch that an engine refused as invalid; the engine keeps serving.

        Each request is dispatched alone next time, so that only the invalid ones fail.
        """
        engine = self._current(name, failures)
        if engine is None:
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

    def on_failure(self, name: str, failures: int, why: str) -> list[Action]:
        """Replace an engine that died or does not answer, unless this failure is already known."""
        engine = self._current(name, failures)
        stale = engine is None or engine.status in (EngineStatus.OUT, EngineStatus.JOINING)
        return [] if engine is None or stale else self._fail(engine, why)

    def on_restart_failed(self, name: str, why: str) -> list[Action]:
        """Replace an engine again, because the new engine did not start or did not prove its weights."""
        return self._fail(self.engines[name], why)

    def _current(self, name: str, failures: int) -> EngineState | None:
        """Return the engine of an event; None if the engine has failed since, or has left the pool."""
        engine = self.engines.get(name)
        return engine if engine is not None and engine.failures == failures else None

    def _fail(self, engine: EngineState, why: str) -> list[Action]:
        """Take an engine out of service, and replace it unless it is leaving."""
        leaves = engine.status is EngineStatus.LEAVING
        engine.status = engine.status if leaves else EngineStatus.OUT
        actions, num_open = self._take_back(engine)
        if leaves:
            return actions
        if engine.restarts.spend():
            return [*actions, Quarantine(engine.name, why, num_open)]
        return [*actions, GiveUp(f"{engine.name} failed more than {MAX_FAILURES} times in a row, last: {why}")]

    def _take_back(self, engine: EngineState) -> tuple[list[Action], int]:
        """Let the open requests of an engine wait for another engine; return the actions and the number of requests.

        Later events of the engine's present worker are ignored. A request that already has all of its tokens completes
        with finish `length`.
        """
        engine.loading = ""
        engine.failures, engine.cache_epoch = engine.failures + 1, engine.cache_epoch + 1
        running = list(engine.running.values())
        engine.running.clear()
        engine.held.clear()
        engine.holds.clear()
        engine.kv.clear()
        awaited = [pending for pending in running if not pending.settled]
        if self.whole_batches:
            batches = {id(pending.batch): pending.batch for pending in awaited}.values()
            self._restarting += [tuple([pending.restarted(batch) for pending in batch]) for batch in batches]
        for pending in running:
            pending.engine, pending.batch = "", ()
        actions: list[Action] = []
        if not self.whole_batches:
            actions += [self._complete(pending, "length") for pending in awaited if not pending.tokens_left]
            self._waiting += [pending for pending in awaited if not pending.settled]
        return actions, len(awaited)

    # -- joins and leaves ---------------------------------------------------------------------------------------

    def join(self, engine: EngineState) -> None:
        """Add an engine that will serve once it has proved the newest weights (`on_proved`)."""
        engine.status, engine.kv.reserve = EngineStatus.JOINING, self.limits.kv_reserve
        self.engines[engine.name] = engine

    def leave(self, name: str) -> None:
        """Dispatch nothing more to an engine; its requests may end there, or be taken back with `preempt`."""
        self.engines[name].status = EngineStatus.LEAVING

    def remove(self, name: str) -> list[Action]:
        """Forget an engine; its open requests wait for another engine with the tokens that they have."""
        engine = self.engines.pop(name)
        engine.status = EngineStatus.OUT
        self._counts_kv = any(left.kv.capacity for left in self.engines.values())
        return self._take_back(engine)[0]

    # -- weights and pauses -------------------------------------------------------------------------------------

    def on_published(self, version: Version) -> None:
        """Stop dispatching to engines whose weights are of an earlier incarnation than this version."""
        self._incarnation = max(self._incarnation, version.incarnation)

    def on_loading(self, name: str, version: Version) -> None:
        """Accept the step that an engine is loading in its responses.

        Raises RuntimeError if the step is of another incarnation while the engine runs requests.
        """
        engine = self.engines.get(name)
        if engine is None:  # the engine has left
            return
        if engine.running and version.incarnation != engine.version.incarnation:
            raise RuntimeError(f"{name}: loads {version} over {engine.version} while it runs {sorted(engine.running)}")
        engine.loading, engine.max_step = str(version), max(engine.version.step, version.step)

    def on_loaded(self, name: str, version: Version, now: float) -> list[Action]:
        """Record the version that an engine has proved, and add the tokens that were held for the proof.

        Call this when nothing is loading: before `on_proved`, and before the engine loads another version.
        """
        engine = self.engines.get(name)
        if engine is None:  # the engine has left
            return []
        engine.loaded, engine.max_step = version, version.step
        held, engine.held = engine.held, {}
        return self.on_deltas(name, engine.failures, list(chain.from_iterable(held.values())), now) if held else []

    def on_proved(self, name: str, failures: int, version: Version, now: float) -> bool:
        """Let an engine serve after it has proved the newest weights; return False if the engine failed meanwhile.

        Only this method sets an engine to serving.
        """
        engine = self._current(name, failures)
        if engine is None or engine.status is EngineStatus.LEAVING:
            return False
        engine.max_step = version.step
        engine.cache_epoch += 1
        engine.kv.drop_idle()
        engine.version, engine.loaded, engine.last_heard = version, version, now
        engine.loading, engine.status = "", EngineStatus.SERVING
        return True

    def hold(self, name: str, why: str) -> None:
        """Dispatch nothing new to an engine until this reason is released."""
        if (engine := self.engines.get(name)) is not None:
            engine.holds.add(why)

    def release(self, name: str, why: str, now: float) -> None:
        if (engine := self.engines.get(name)) is not None:
            engine.holds.discard(why)
            engine.last_heard = now

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    def pause(self, now: float) -> None:
        """Stop dispatching, and stop the active time, so that no deadline comes closer."""
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
        """Return `now` minus all pauses; deadlines are in this time."""
        return (now if self._paused_at is None else self._paused_at) - self._paused_s

    def tick(self, now: float) -> list[Action]:
        """Complete late requests, and replace engines that run requests but have been silent for too long."""
        time, late = self.active_time(now), list[PendingRequest]()
        for pending in self._open.values():
            if pending.deadline > time:
                break
            late.append(pending)
        why = f"not completed within {self.limits.timeout_s:g} s; raise rollout.turn_timeout_s"
        actions: list[Action] = [
            self._complete(pending, "deadline", why) if pending.tokens_left else self._complete(pending, "length")
            for pending in late
        ]
        actions += self._drop(late)
        for engine in self.engines.values():
            silent_s = now - engine.last_heard
            paused = self._paused_at is not None or "paused" in engine.holds
            if engine.running and not paused and not engine.loading and silent_s >= self.limits.silence_s:
                actions += self._fail(engine, f"{engine.name} sent nothing for {silent_s:.0f} s while it ran requests")
        return actions

    def _complete(self, pending: PendingRequest, finish: str, error: str = "") -> CompleteRequest:
        pending.settled, pending.finish, pending.error = True, finish, error  # type: ignore[assignment]
        del self._open[pending.id]
        return CompleteRequest(pending)
