# SPDX-License-Identifier: Apache-2.0
"""The requests of a pool, by where they are: waiting for an engine, running on one, or settled. No IO.

A request outlives engines: whoever lets go of it, for a pause, an update or its own death, gives it back with the tokens
it has, and it goes on wherever its group's floor allows. Where `whole` is set (deterministic runs), the batch of an
engine that died is begun again as it was, from the prompts: continued tokens would not be the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from relax_core.api.engine import Delta, FinishReason, GenerateRequest
from relax_core.api.errors import RelaxError
from relax_core.rollout.completion import Completion, GenerateCall, Watch
from relax_core.rollout.router import EngineLoad, choose

Placed: TypeAlias = "tuple[str, tuple[Pending, ...]]"
"""An engine, and what it is given in one call."""


@dataclass(slots=True)
class Pending:
    """A request under way, with the tokens it has so far: they outlive the engine that sampled them."""

    request: GenerateRequest
    watch: Watch | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    oldest_cache: list[int] = field(default_factory=list)
    finish: FinishReason = ""
    error: str = ""
    batch: tuple[Pending, ...] = ()
    """What was given to the engine in one call."""

    def add(self, delta: Delta) -> None:
        """Take tokens; whoever watches them may end the turn here, whatever the engine samples beyond."""
        if self.finish == "stop":
            return
        self.tokens += delta.tokens
        self.log_probs += delta.log_probs
        self.versions += [delta.version] * len(delta.tokens)
        self.oldest_cache += [delta.oldest_cache] * len(delta.tokens)
        self.finish, self.error = delta.finish, delta.error
        if self.watch is not None and delta.tokens and self.watch(self.tokens) and self.finish in ("", "abort"):
            self.finish = "stop"

    def remaining(self) -> GenerateRequest:
        """What is left to ask, on this engine or another: the prompt goes on with the tokens it got."""
        if not self.tokens:
            return self.request
        return replace(
            self.request,
            tokens=self.request.tokens + tuple(self.tokens),
            max_new_tokens=self.request.max_new_tokens - len(self.tokens),
            floor=self.floor,
        )

    @property
    def floor(self) -> int:
        """Where it may go on: its group's floor, or that of its own tokens where it has no group."""
        return self.request.floor if self.request.floor >= 0 else min(self.versions, default=-1)

    @property
    def left(self) -> int:
        """Tokens it may still get."""
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def complete(self) -> bool:
        return self.left <= 0

    def completion(self) -> Completion:
        versions, oldest = tuple(self.versions), tuple(self.oldest_cache)
        kept = oldest if oldest != versions else ()
        return Completion(tuple(self.tokens), tuple(self.log_probs), versions, kept, self.finish, self.error)


class Asked:
    """Turns that were asked together: one future, which has its result when the last of them has ended."""

    def __init__(self, calls: Sequence[GenerateCall]) -> None:
        self.future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._calls, self._missing = calls, len(calls)
        self._completions: dict[int, Completion] = {}

    def settle(self, at: int, completion: Completion) -> None:
        """One of them has ended."""
        if self.future.done():
            return
        self._completions[at] = completion
        if (ended := self._calls[at].ended) is not None:
            ended()
        if len(self._completions) == self._missing:
            self.future.set_result([self._completions[number] for number in range(self._missing)])


class Requests:
    """All that somebody awaits."""

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole
        self._waiting: list[Pending] = []
        self._again: list[tuple[Pending, ...]] = []
        """whole: batches to be begun again."""
        self._asked: dict[str, tuple[Asked, int]] = {}
        """By request: what it was asked with, and its place there."""
        self._aborted: set[str] = set()
        """Running requests that nobody awaits and whose engine has been told so."""
        self._interrupted: set[str] = set()
        """Running requests that were told to leave their engine, to go on later with the tokens they have."""

    def add(
        self, requests: Sequence[GenerateRequest], calls: Sequence[GenerateCall]
    ) -> asyncio.Future[list[Completion]]:
        """What comes of the calls; each has a request."""
        asked = Asked(calls)
        for at, request in enumerate(requests):
            self._asked[request.id] = asked, at
            self._waiting.append(Pending(request, calls[at].watch))
        return asked.future

    @property
    def open(self) -> bool:
        """Whether somebody awaits something."""
        return any(not asked.future.done() for asked, _ in self._asked.values())

    # -- to engines -----------------------------------------------------------------------------------------------

    def place(self, loads: Callable[[], Iterable[EngineLoad]], give: Callable[[str, Pending], None]) -> list[Placed]:
        """Give waiting requests to the engines that may run them: (engine, batch) for each call to be made."""
        placed: list[Placed] = []
        for batch in self._again[:]:
            if (name := choose(loads(), max(pending.floor for pending in batch))) is not None:
                self._again.remove(batch)
                placed.append((name, batch))
                for pending in batch:
                    give(name, pending)
        batches: dict[str, list[Pending]] = {}
        held: list[Pending] = []
        for pending in self._waiting:
            name = choose(loads(), pending.floor)
            if name is None:
                held.append(pending)
                continue
            give(name, pending)
            batches.setdefault(name, []).append(pending)
        self._waiting = held
        placed += [(name, tuple(batch)) for name, batch in batches.items()]
        for _, batch in placed:
            for pending in batch:
                pending.batch = batch
        return placed

    def give_up(self, running: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Requests that nobody awaits any more leave the queue; returns those running, by engine, which it must hear of."""
        unwanted = {name for name, (asked, _) in self._asked.items() if asked.future.cancelled()}
        if not unwanted:
            return {}
        for pending in self._waiting:
            if pending.request.id in unwanted:
                del self._asked[pending.request.id]
        self._waiting = [pending for pending in self._waiting if pending.request.id not in unwanted]
        told = {
            engine: [name for name in names if name in unwanted - self._aborted] for engine, names in running.items()
        }
        self._aborted.update(name for names in told.values() for name in names)
        return {engine: names for engine, names in told.items() if names}

    def interrupt(self, names: Sequence[str]) -> None:
        """These will be told to leave their engine, and are to go on."""
        self._interrupted.update(names)

    # -- from engines ---------------------------------------------------------------------------------------------

    def ended(self, pending: Pending) -> None:
        """An engine is done with a request: it is settled, or goes on elsewhere."""
        name = pending.request.id
        awaited = name in self._asked and not self._asked[name][0].future.done()
        if name in self._interrupted and pending.finish == "abort" and awaited and not pending.complete:
            pending.finish = ""
            self._waiting.append(pending)
        else:
            if pending.finish == "abort" and pending.complete:
                pending.finish = "length"
            self._settle(pending)
        self._interrupted.discard(name)

    def take_back(self, running: Sequence[Pending]) -> None:
        """Their engine died. One that had all tokens asked for only lost its last word."""
        self._interrupted.difference_update(pending.request.id for pending in running)
        if self.whole:
            batches = {id(pending.batch): pending.batch for pending in running if pending.request.id in self._asked}
            self._again += [tuple(Pending(old.request, old.watch) for old in batch) for batch in batches.values()]
            return
        for pending in running:
            if pending.request.id not in self._asked:
                continue
            if pending.complete:
                pending.finish = "length"
                self._settle(pending)
            else:
                self._waiting.append(pending)

    def refuse(self, batch: Sequence[Pending], error: str) -> None:
        """The engine would not take the batch: the requests are wrong, not the engine."""
        for pending in batch:
            pending.finish, pending.error = "error", error
            self._settle(pending)

    def fail(self, error: RelaxError) -> None:
        """Whoever waits learns why there is nothing to wait for."""
        for asked, _ in self._asked.values():
            if not asked.future.done():
                asked.future.set_exception(error)
        self._asked.clear()

    def _settle(self, pending: Pending) -> None:
        self._aborted.discard(pending.request.id)
        pending.batch = ()  # a batch holds its members: a ring that only the collector would find
        asked, at = self._asked.pop(pending.request.id, (None, 0))
        if asked is not None:
            asked.settle(at, pending.completion())
