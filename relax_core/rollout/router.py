# SPDX-License-Identifier: Apache-2.0
"""The router of an engine pool: events in, actions out. It has no IO and no clock; `now` is passed in.

It decides which engine gets a request (`homes`), when one goes on elsewhere, with the tokens it has, which engines are
not to be trusted, when a turn's time is over, and how much may be open at all. Where `whole` is set (deterministic
runs), the batch of an engine that died is begun again as it was: continued tokens would not be the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relax_core.api.engine import Delta, GenerateRequest
from relax_core.api.request_checks import check_ids
from relax_core.rollout.engine_state import EngineState, Standing, lie
from relax_core.rollout.homes import Homes
from relax_core.rollout.requests import Pending
from relax_core.rollout.router_actions import Abort, Action, Answer, Give, GiveUp, Quarantine

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
        self._open: dict[str, Pending] = {}
        """Awaited, in the order in which they were asked, which is that of their deadlines."""
        self._waiting: list[Pending] = []
        self._again: list[tuple[Pending, ...]] = []
        """whole: batches to be begun again."""
        self._homes = Homes()
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

    def ask(self, asked: Sequence[Pending], now: float) -> list[Action]:
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

    def _drop(self, settled: Sequence[Pending]) -> list[Action]:
        """They wait no more; engines that run them hear of it."""
        told: dict[str, list[str]] = {}
        for pending in settled:
            pending.settled = True
            if pending.engine:
                told.setdefault(pending.engine, []).append(pending.request.id)
        if len(told) < len(settled):
            self._waiting = [pending for pending in self._waiting if not pending.settled]
        return [Abort(engine, ids) for engine, ids in told.items()]

    # -- to engines ---------------------------------------------------------------------------------------------

    def place(self, now: float) -> list[Give]:
        """Give what waits to the engines that may run it; the requests of one engine go together."""
        if self._paused_at is not None or not (self._waiting or self._again):
            return []
        able, most = [engine for engine in self.engines.values() if engine.able], self.bounds.per_engine
        given = self._begin_again(able)
        if most and not self.whole:
            able = [engine for engine in able if len(engine.running) < most]
        batches: dict[str, list[Pending]] = {}
        held: list[Pending] = []
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

    def _begin_again(self, able: Sequence[EngineState]) -> list[tuple[EngineState, tuple[Pending, ...]]]:
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
                if wrong := lie(delta, pending, engine.most, vocab_size):
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
            actions.append(Abort(name, enough))
        return actions

    def _left(self, pending: Pending) -> list[Action]:
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

    def ended(self, name: str, life: int, batch: tuple[Pending, ...]) -> list[Action]:
        """An engine has no more to say about a batch that it was given: each of its requests has had its last word."""
        engine = self.engines[name]
        owed = [pending for pending in batch if pending.batch is batch]
        if engine.life == life and owed:
            return self._lose(engine, f"{name} ended its answer without {owed[0].request.id!r}")
        return []

    def refused(self, name: str, life: int, batch: tuple[Pending, ...], error: str) -> list[Action]:
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
        return [] if engine.life != life or engine.standing is Standing.OUT else self._lose(engine, why)

    def kept_out(self, name: str, why: str) -> list[Action]:
        """A fresh engine did not come up, or did not prove its weights."""
        return self._lose(self.engines[name], why)

    def _lose(self, engine: EngineState, why: str) -> list[Action]:
        engine.standing, engine.loading = Standing.OUT, False
        engine.life, engine.cache, engine.failures = engine.life + 1, engine.cache + 1, engine.failures + 1
        running = list(engine.running.values())
        engine.running.clear()
        engine.held.clear()
        engine.work = 0
        actions = self._take_back(running)
        if engine.failures > MAX_FAILURES:
            return [*actions, GiveUp(f"{engine.name} failed {MAX_FAILURES} times in a row, last: {why}")]
        return [*actions, Quarantine(engine.name, why)]

    def _take_back(self, running: Sequence[Pending]) -> list[Action]:
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
        self.engines[name].standing = Standing.WAITING

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
        late: list[Pending] = []
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

    def _answer(self, pending: Pending, finish: str, error: str = "") -> Answer:
        pending.settled, pending.finish, pending.error = True, finish, error  # type: ignore[assignment]
        del self._open[pending.request.id]
        return Answer(pending)


def _give(engine: EngineState, batch: tuple[Pending, ...]) -> Give:
    for pending in batch:
        pending.batch = batch
    return Give(engine.name, engine.life, batch)
