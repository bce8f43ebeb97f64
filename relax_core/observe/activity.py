# SPDX-License-Identifier: Apache-2.0
"""What one lane (a role, an engine, a rank) does, moment by moment, as spans that never overlap; gaps are idle.

A state machine that takes `now`: several things may be open at once, and the most telling one is what the lane does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from relax_core.api.clock import Clock
from relax_core.api.status import Span, SpanKind

RESOLUTION_S = 1e-4
"""A shorter state belongs to the one before it: what is told stays small, however busy a loop is."""
_SAID = 0
"""The number of what was said; sections count from 1."""
_FIRST: tuple[SpanKind, ...] = ("work", "overhead", "wait")


@dataclass(frozen=True, slots=True)
class _State:
    kind: SpanKind
    name: str
    owed_by: str = ""
    holds: bool = field(default=False, compare=False)
    """Nothing else goes on meanwhile."""


class Activity:
    """One lane's account of its time; implements `api.role.Lane`."""

    def __init__(self, lane: str, clock: Clock, devices: tuple[str, ...] = ()) -> None:
        self._lane, self._clock, self._devices = lane, clock, devices
        self._open: dict[int, _State] = {}
        self._base: _State | None = None
        self._by_sections = False
        self._numbers = 0
        self._now: _State | None = None
        self._since = clock.now()
        self._spans: list[Span] = []

    @property
    def working(self) -> bool:
        """Whether some section of work is open."""
        return any(state.kind == "work" for state in self._open.values())

    def rest(self, work: str, kind: SpanKind = "work") -> None:
        """What a role does where nothing else is open."""
        self._base = _State(kind, work)
        self._turn()

    def say(self, work: str) -> None:
        """It works at this from now on; the empty string: at nothing."""
        if work:
            self._open[_SAID] = _State("work", work)
        else:
            self._open.pop(_SAID, None)
        self._turn()

    @contextmanager
    def section(self, what: str) -> Iterator[None]:
        """One of several pieces of work side by side: outside of them the lane does nothing of its own."""
        self._by_sections = True
        with self.span("work", what):
            yield

    @contextmanager
    def span(self, kind: SpanKind, name: str, owed_by: str = "", holds: bool = False) -> Iterator[None]:
        """Something that lasts from entry to exit. `holds`: no work goes on meanwhile, whatever sections are open."""
        self._numbers += 1
        number = self._numbers
        self._open[number] = _State(kind, name, owed_by, holds)
        self._turn()
        try:
            yield
        finally:
            del self._open[number]
            self._turn()

    def take(self) -> tuple[Span, ...]:
        """Spans up to now that were not taken before."""
        self._close(self._clock.now())
        spans, self._spans = tuple(self._spans), []
        return spans

    def _turn(self) -> None:
        state = self._state()
        if state != self._now:
            self._close(self._clock.now())
            self._now = state

    def _state(self) -> _State | None:
        if held := next((state for state in self._open.values() if state.holds), None):
            return held
        for kind in _FIRST:
            if found := next((state for state in self._open.values() if state.kind == kind), None):
                return found
        return None if self._by_sections else self._base

    def _close(self, now: float) -> None:
        """What lasted from `_since` until now is told; too short a time goes to what came before."""
        start, self._since = self._since, now
        state = self._now
        if now - start < RESOLUTION_S and self._spans and self._spans[-1].end == start:
            before = self._spans.pop()
            self._add(_State(before.kind, before.name, before.owed_by), before.start, now)
        elif state is not None and now > start:
            self._add(state, start, now)

    def _add(self, state: _State, start: float, end: float) -> None:
        last = self._spans[-1] if self._spans else None
        if last and last.end == start and _State(last.kind, last.name, last.owed_by) == state:
            start = self._spans.pop().start
        self._spans.append(Span(self._lane, state.kind, state.name, start, end, state.owed_by, self._devices))


class Unwatched:
    """The lane of a worker whose time nobody asks for."""

    def span(self, kind: SpanKind, name: str, owed_by: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def say(self, work: str) -> None:
        """To nobody."""
