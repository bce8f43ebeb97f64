# SPDX-License-Identifier: Apache-2.0
"""The router of an engine pool: events in, actions out. It has no IO and no clock; `now` is passed in.

It decides which engine gets a request (`homes`), when one goes on elsewhere, with the tokens it has, which engines are
not to be trusted, when a turn's time is over, and how much may be open at all. Where `whole` is set (deterministic
runs), the batch of an engine that died is begun again as it was: continued tokens would not be the same bits.

What the router wants done: whoever has the engines does it, in this order, and tells the router what came of it.

Which engine a request goes to: where its beginning is cached, unless that one is too busy; else the least busy.

The bound: a cache is worth as many tokens of work as it saves. No engine is given a request while it has more work than
the least busy one that may serve it by more than the request's own tokens so far.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

from relax_core.api.engine import Delta, GenerateRequest
from relax_core.engine_kit.requests import check_ids
from relax_core.engines.requests import PendingRequest
from relax_core.engines.status import EngineState, EngineStatus, response_fault


class Dispatch(NamedTuple):
    """Ask an engine to continue these, in one call. `life`: which of the engine's lives the answers belong to."""

    engine: str
    life: int
    batch: tuple[PendingRequest, ...]


class AbortRequest(NamedTuple):
    """Tell an engine to end these now."""

    engine: str
    ids: list[str]


class CompleteRequest(NamedTuple):
    """A request is over: whoever asked gets its completion. Each is answered once."""

    request: PendingRequest


class Quarantine(NamedTuple):
    """An engine died, hangs or lies: end it, start a fresh one, bring it the newest weights, then say that it entered."""

    engine: str
    why: str


class GiveUp(NamedTuple):
    """No engine can be had: nothing that is asked would ever be answered."""

    why: str


Action: TypeAlias = Dispatch | AbortRequest | CompleteRequest | Quarantine | GiveUp


T = TypeVar("T")
MAX_KNOWN = 1 << 16
"""Sessions, and groups, whose homes are remembered; the oldest are forgotten first."""


class PrefixAffinity:
    """Where sessions and groups have been. A cache is gone when its engine dies or gets other weights."""

    def __init__(self) -> None:
        self._sessions: dict[Hashable, tuple[str, int]] = {}
        self._groups: dict[Hashable, dict[str, int]] = {}

    def choose(self, able: Sequence[EngineState], pending: PendingRequest, floor: int) -> EngineState | None:
        """None where no engine is at or above the floor."""
        least: EngineState | None = None
        for engine in able:
            if engine.step >= floor and (least is None or engine.work < least.work):
                least = engine
        if least is None or len(able) == 1:
            return least
        bound = least.work + len(pending.request.tokens) + len(pending.tokens)
        home = self._home(able, pending, floor, bound)
        return least if home is None else home

    def _home(self, able: Sequence[EngineState], pending: PendingRequest, floor: int, bound: int) -> EngineState | None:
        session, cache = self._sessions.get(pending.session, ("", 0))
        group = self._groups.get(pending.group, {})
        if not session and not group:
            return None
        home: EngineState | None = None
        for engine in able:
            if engine.work > bound or engine.step < floor:
                continue
            if engine.name == session and engine.cache == cache:
                return engine
            if group.get(engine.name) == engine.cache and (home is None or engine.work < home.work):
                home = engine
        return home

    def note(self, pending: PendingRequest, engine: EngineState) -> None:
        """It runs there."""
        if pending.session is not None:
            _newest_last(self._sessions, pending.session, (engine.name, engine.cache))
        if pending.group is not None:
            homes = self._groups.get(pending.group, {})
            homes[engine.name] = engine.cache
            _newest_last(self._groups, pending.group, homes)


def _newest_last(known: dict[Hashable, T], key: Hashable, value: T) -> None:
    known.pop(key, None)
    known[key] = value
    if len(known) > MAX_KNOWN:
        del known[next(iter(known))]


MAX_FAILURES = 8
"""Lives of one engine in a row without a finished request between them."""
MAX_MOVES = 8
"""Times that engines may end a request unasked before that is its result."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much, and how long; 0 is no bound of that kind."""

    turn_s: float = 3600.0
    """From when a turn is asked to its answer. While the pool is paused time stands still."""
    per_engine: int = 0
    """Requests that one engine is given at once."""
    backlog: int = 0
    """Requests that may be open beyond those."""
    stuck_s: float = 180.0
    """An engine that says nothing for so long while it should is stuck, whatever else it answers."""


class Router:
    """The requests of a pool, by where they are: waiting, running on an engine, or settled."""

    def __init__(self, names: Iterable[str], bounds: Bounds = Bounds(), whole: bool = False) -> None:
        self.engines = {name: EngineState(name) for name in names}
        self.bounds, self.whole = bounds, whole
        self._open: dict[str, PendingRequest] = {}
        """Awaited, in the order in which they were asked, which is that of their deadlines."""
        self._waiting: list[PendingRequest] = []
        self._again: list[tuple[PendingRequest, ...]] = []
        """whole: batches to be begun again."""
        self._homes = PrefixAffinity()
        self._vocab_size = self._max_context = 0
        self._rested_s = 0.0
        self._paused_at: float | None = None

    # -- from who asks ------------------------------------------------------------------------------------------

    def knows(self, vocab_size: int, max_context: int) -> None:
        """What the engines' model can take; 0: unknown."""
        self._vocab_size, self._max_context = vocab_size, max_context

    @property
    def open(self) -> bool:
        """Whether somebody awaits something."""
        return bool(self._open)

    def room(self, count: int) -> bool:
        """Whether so many may be asked together now; more than fit at all pass when nothing else is open."""
        bounds = self.bounds
        if not (bounds.backlog and bounds.per_engine) or not self._open:
            return True
        return len(self._open) + count <= bounds.backlog + bounds.per_engine * len(self.engines)

    def ask(self, asked: Sequence[PendingRequest], now: float) -> list[Action]:
        """Take requests; those that no engine could run are answered at once."""
        actions: list[Action] = []
        deadline, checked, fault = self.time(now) + self.bounds.turn_s, None, ""
        for pending in asked:
            tokens = pending.request.tokens
            if tokens is not checked:  # all of a group have the same prompt
                checked, fault = tokens, check_ids(tokens, self._vocab_size) if self._vocab_size else ""
            self._open[pending.request.id] = pending
            if wrong := fault or self._too_long(pending.request):
                actions.append(self._answer(pending, "error", wrong))
                continue
            pending.deadline = deadline
            self._waiting.append(pending)
        return actions

    def _too_long(self, request: GenerateRequest) -> str:
        prompt, new = len(request.tokens), request.max_new_tokens
        if self._max_context and prompt + new > self._max_context:
            return f"{prompt} prompt + {new} new tokens pass the context of {self._max_context}"
        return ""

    def forget(self, ids: Sequence[str]) -> list[Action]:
        """Nobody awaits these any more."""
        return self._drop([self._open.pop(name) for name in ids if name in self._open])

    def _drop(self, settled: Sequence[PendingRequest]) -> list[Action]:
        """They wait no more; engines that run them hear of it."""
        told: dict[str, list[str]] = {}
        for pending in settled:
            pending.settled = True
            if pending.engine:
                told.setdefault(pending.engine, []).append(pending.request.id)
        if len(told) < len(settled):
            self._waiting = [pending for pending in self._waiting if not pending.settled]
        return [AbortRequest(engine, ids) for engine, ids in told.items()]

    # -- to engines ---------------------------------------------------------------------------------------------

    def place(self, now: float) -> list[Dispatch]:
        """Give what waits to the engines that may run it; the requests of one engine go together."""
        if self._paused_at is not None or not (self._waiting or self._again):
            return []
        able, most = [engine for engine in self.engines.values() if engine.able], self.bounds.per_engine
        given = self._begin_again(able)
        if most and not self.whole:
            able = [engine for engine in able if len(engine.running) < most]
        batches: dict[str, list[PendingRequest]] = {}
        held: list[PendingRequest] = []
        for at, pending in enumerate(self._waiting):
            if not able:
                held += self._waiting[at:]
                break
            engine = self._homes.choose(able, pending, pending.floor)
            if engine is None:
                held.append(pending)
                continue
            if len(self.engines) > 1:
                self._homes.note(pending, engine)
            if not engine.running:
                engine.heard_at = now
            engine.take(pending)
            if pending.alone:
                given.append((engine, (pending,)))
            else:
                batches.setdefault(engine.name, []).append(pending)
            if most and len(engine.running) >= most and not self.whole:
                able.remove(engine)
        self._waiting = held
        given += [(self.engines[name], tuple(batch)) for name, batch in batches.items()]
        return [_give(engine, batch) for engine, batch in given]

    def _begin_again(self, able: Sequence[EngineState]) -> list[tuple[EngineState, tuple[PendingRequest, ...]]]:
        given = []
        for batch in self._again[:]:
            engine = self._homes.choose(able, batch[0], max(pending.floor for pending in batch))
            if engine is not None:
                self._again.remove(batch)
                for pending in batch:
                    engine.take(pending)
                given.append((engine, batch))
        return given

    def let_go(self, name: str) -> list[str]:
        """Requests that an engine is to be told to end, to go on later with the tokens they have."""
        if self.whole:
            return []  # they run to their end
        running = self.engines[name].running
        for pending in running.values():
            pending.leaving = not pending.settled
        return list(running)

    # -- from engines -------------------------------------------------------------------------------------------

    def gave(self, name: str, life: int, deltas: Sequence[Delta], now: float) -> list[Action]:
        """An engine said something."""
        engine = self.engines[name]
        if engine.life != life:
            return []
        engine.heard_at, vocab_size = now, self._vocab_size
        actions: list[Action] = []
        enough: list[str] = []
        for delta in deltas:
            pending = engine.running.get(delta.id)
            if pending is None:
                return [*actions, *self._lose(engine, f"{name} answered {delta.id!r}, which it does not run")]
            if not pending.settled:
                if wrong := response_fault(delta, pending, engine.most, vocab_size):
                    return [*actions, *self._lose(engine, f"{name} gave {wrong}")]
                engine.work -= len(delta.tokens)
                pending.add(delta)
                if pending.finish == "stop" and not delta.finish:
                    enough.append(delta.id)
                    actions.append(self._answer(pending, "stop"))
            if delta.finish:
                engine.leave(pending)
                if delta.finish != "error":
                    engine.failures = 0
                if not pending.settled:
                    actions += self._left(pending)
        if enough:
            actions.append(AbortRequest(name, enough))
        return actions

    def _left(self, pending: PendingRequest) -> list[Action]:
        """An engine is done with a request: that was it, or it goes on."""
        if pending.finish != "abort":
            return [self._answer(pending, pending.finish, pending.error)]
        if pending.complete:
            return [self._answer(pending, "length")]
        pending.moves += not pending.leaving
        if pending.moves > MAX_MOVES:
            return [self._answer(pending, "abort", pending.error or f"engines ended it {pending.moves} times")]
        pending.finish = ""
        self._waiting.append(pending)
        return []

    def ended(self, name: str, life: int, batch: tuple[PendingRequest, ...]) -> list[Action]:
        """An engine has no more to say about a batch that it was given: each of its requests has had its last word."""
        engine = self.engines[name]
        owed = [pending for pending in batch if pending.batch is batch]
        if engine.life == life and owed:
            return self._lose(engine, f"{name} ended its answer without {owed[0].request.id!r}")
        return []

    def refused(self, name: str, life: int, batch: tuple[PendingRequest, ...], error: str) -> list[Action]:
        """The engine would not take a batch: a request in it is wrong, not the engine."""
        engine = self.engines[name]
        if engine.life != life:
            return []
        actions: list[Action] = []
        for pending in [one for one in batch if one.batch is batch]:
            engine.leave(pending)
            if pending.settled:
                continue
            if len(batch) == 1:
                actions.append(self._answer(pending, "error", error))
            else:
                pending.alone = True
                self._waiting.append(pending)
        return actions

    def lost(self, name: str, life: int, why: str) -> list[Action]:
        """An engine died, or does not answer; news of an earlier life, and of one that is out, are old."""
        engine = self.engines[name]
        return [] if engine.life != life or engine.standing is EngineStatus.OUT else self._lose(engine, why)

    def kept_out(self, name: str, why: str) -> list[Action]:
        """A fresh engine did not come up, or did not prove its weights."""
        return self._lose(self.engines[name], why)

    def _lose(self, engine: EngineState, why: str) -> list[Action]:
        engine.standing, engine.loading = EngineStatus.OUT, False
        engine.life, engine.cache, engine.failures = engine.life + 1, engine.cache + 1, engine.failures + 1
        running = list(engine.running.values())
        engine.running.clear()
        engine.held.clear()
        engine.work = 0
        actions = self._take_back(running)
        if engine.failures > MAX_FAILURES:
            return [*actions, GiveUp(f"{engine.name} failed {MAX_FAILURES} times in a row, last: {why}")]
        return [*actions, Quarantine(engine.name, why)]

    def _take_back(self, running: Sequence[PendingRequest]) -> list[Action]:
        """Their engine is gone. One that had all tokens asked for only lost its last word."""
        awaited = [pending for pending in running if not pending.settled]
        batches = {id(pending.batch): pending.batch for pending in awaited}
        for pending in running:
            pending.engine, pending.batch = "", ()
        if self.whole:
            for batch in batches.values():
                again = tuple(pending.afresh() for pending in batch)
                self._again.append(again)
                self._open.update((one.request.id, one) for one in again if not one.settled)
            return []
        actions: list[Action] = [self._answer(pending, "length") for pending in awaited if pending.complete]
        self._waiting += [pending for pending in awaited if not pending.settled]
        return actions

    # -- weights and pauses -------------------------------------------------------------------------------------

    def loading(self, name: str, step: int) -> None:
        """Weights of this step are on their way into an engine."""
        self.engines[name].load(step)

    def proved(self, name: str, life: int, step: int, now: float) -> bool:
        """An engine showed that it holds the newest weights: it may serve. The only way in. False: it died meanwhile."""
        engine = self.engines[name]
        if engine.life == life:
            engine.prove(step, now)
        return engine.life == life

    def waits(self, name: str) -> None:
        """An engine is up, and its weights are too old for anything."""
        self.engines[name].standing = EngineStatus.WAITING

    def hold(self, name: str, why: str) -> None:
        """Nothing new for an engine, until it is released."""
        self.engines[name].held.add(why)

    def release(self, name: str, why: str, now: float) -> None:
        self.engines[name].held.discard(why)
        self.engines[name].heard_at = now

    def pause(self, now: float) -> None:
        """Nothing is given to any engine, and time stands still for what is open."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        if self._paused_at is not None:
            self._rested_s += now - self._paused_at
            self._paused_at = None
        for engine in self.engines.values():
            engine.heard_at = now

    def time(self, now: float) -> float:
        """What deadlines are of: it stands still while the pool is paused."""
        return (now if self._paused_at is None else self._paused_at) - self._rested_s

    # -- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Time has passed: turns end at their deadlines, and engines that say nothing are found."""
        actions = self._late(self.time(now))
        for engine in self.engines.values():
            silent_s = now - engine.heard_at
            if self._awaited(engine) and silent_s >= self.bounds.stuck_s:
                actions += self._lose(engine, f"{engine.name} said nothing for {silent_s:.0f} s of what it was asked")
        return actions

    def _awaited(self, engine: EngineState) -> bool:
        """Whether an engine should say something."""
        paused = self._paused_at is not None or "paused" in engine.held
        return bool(engine.running) and not paused and not engine.loading

    def _late(self, time: float) -> list[Action]:
        late: list[PendingRequest] = []
        for pending in self._open.values():
            if pending.deadline > time:
                break
            late.append(pending)
        why = f"not sampled within {self.bounds.turn_s:g} s (rollout.turn_timeout_s)"
        answers: list[Action] = [
            self._answer(pending, "length") if pending.complete else self._answer(pending, "deadline", why)
            for pending in late
        ]
        return answers + self._drop(late)

    def _answer(self, pending: PendingRequest, finish: str, error: str = "") -> CompleteRequest:
        pending.settled, pending.finish, pending.error = True, finish, error  # type: ignore[assignment]
        del self._open[pending.request.id]
        return CompleteRequest(pending)


def _give(engine: EngineState, batch: tuple[PendingRequest, ...]) -> Dispatch:
    for pending in batch:
        pending.batch = batch
    return Dispatch(engine.name, engine.life, batch)
