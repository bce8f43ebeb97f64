# SPDX-License-Identifier: Apache-2.0
"""What one lane (a role, an engine, a rank) does, moment by moment, as spans that never overlap; gaps are idle.

A state machine that takes `now`: several things may be open at once, and the most telling one is what the lane does.

Spans of roles, engines and ranks as Chrome trace events, a lane each: open `trace.json` in Perfetto or chrome://tracing.

Times are monotonic seconds of one clock; the oldest spans go when there are too many. What lanes do is told by
`TimeSpent`; steps, publishes and checkpoints by whoever writes the run down.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

from relax_core.api.clock import Clock
from relax_core.api.events import Span, SpanKind

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


class SpanRecorder:
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


MOST = 100_000
PROCESSES = ("run", "roles", "devices")
"""Lanes are grouped as Chrome's processes, in this order."""
_COLOURS = {"wait": "grey", "overhead": "yellow"}


class Trace:
    """Collects spans; `document` is the file."""

    def __init__(self, origin: float, most: int = MOST) -> None:
        self._origin = origin
        self._events: deque[dict[str, Any]] = deque(maxlen=most)
        self._lanes: dict[tuple[str, str], int] = {}
        self._last: dict[str, tuple[tuple[str, str, float], dict[str, Any]]] = {}
        """Of each lane: what it did last, for whom it waited, until when, and its event."""
        self._ends: dict[tuple[str, str], float] = {}
        """Of lanes of the run: when the last span ends."""
        self._steps: list[tuple[float, int]] = []
        """(end, number) of every step, in order."""

    def span(self, name: str, lane: str, start: float, end: float, process: str = "run", **arguments: Any) -> None:
        """Something that lasted; beside what the lane has not ended by then, as viewers draw no two on one lane."""
        lane = self._free(process, lane, start)
        self._ends[process, lane] = max(end, self._ends.get((process, lane), end))
        self._add("X", name, process, lane, start, dur=max(self._at(end) - self._at(start), 0), args=arguments)

    def mark(self, name: str, lane: str, at: float) -> None:
        """Something that happened."""
        self._add("i", name, "run", lane, at, s="t")

    def spent(self, spans: Iterable[Span]) -> None:
        """What lanes did."""
        for span in spans:
            wait = span.kind == "wait"
            arguments = {"kind": span.kind, **({"owed_by": span.owed_by} if span.owed_by else {})}
            extra = {"cname": _COLOURS[span.kind]} if span.kind in _COLOURS else {}
            name = f"waits for {span.name}" if wait else span.name
            process = "devices" if span.devices else "roles"
            before = self._last.get(span.lane)
            if before is not None and before[0] == (name, span.owed_by, span.start):
                event = before[1]  # told in parts, with the beats
                event["dur"] = self._at(span.end) - event["ts"]
            else:
                duration = max(self._at(span.end) - self._at(span.start), 0)
                event = self._add("X", name, process, span.lane, span.start, dur=duration, args=arguments, **extra)
            self._last[span.lane] = (name, span.owed_by, span.end), event

    def step(self, step: int, start: float, end: float, counters: Mapping[str, Mapping[str, float]]) -> None:
        """A step was committed; spans that began within it carry its number. Counters are drawn as curves."""
        self._steps.append((end, step))
        self.span(f"step {step}", "steps", start, end, step=step)
        for name, values in counters.items():
            if values:
                self._add("C", name, "run", "steps", end, args=dict(values))

    def document(self) -> Mapping[str, Any]:
        events = sorted((self._numbered(event) for event in self._events), key=lambda event: event["ts"])
        return {"displayTimeUnit": "ms", "traceEvents": [*self._names(), *events]}

    def _names(self) -> list[dict[str, Any]]:
        used = {process for process, _ in self._lanes}
        processes = [
            {"name": name, "ph": "M", "pid": at, "args": {key: value}}
            for at, process in enumerate(PROCESSES, start=1)
            if process in used
            for name, key, value in (("process_name", "name", process), ("process_sort_index", "sort_index", at))
        ]
        threads = [
            {"name": "thread_name", "ph": "M", "pid": PROCESSES.index(process) + 1, "tid": lane, "args": {"name": name}}
            for (process, name), lane in self._lanes.items()
        ]
        return [*processes, *threads]

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        """With the step that it began in."""
        if event["ph"] != "X" or "step" in event["args"] or event["ts"] < 0:
            return event
        at = bisect_left(self._steps, (event["ts"] / 1e6 + self._origin + 1e-6, 0))
        if at == len(self._steps):
            return event
        return {**event, "args": {**event["args"], "step": self._steps[at][1]}}

    def _free(self, process: str, lane: str, start: float) -> str:
        """The lane, or the first beside it where nothing lasts longer than `start`."""
        lanes = chain((lane,), (f"{lane} {number}" for number in count(2)))
        return next(name for name in lanes if self._at(self._ends.get((process, name), start)) <= self._at(start))

    def _add(self, phase: str, name: str, process: str, lane: str, at: float, **more: Any) -> dict[str, Any]:
        event = {
            "name": name, "cat": "relax", "ph": phase, "pid": PROCESSES.index(process) + 1,
            "tid": self._lanes.setdefault((process, lane), len(self._lanes) + 1), "ts": self._at(at), **more,
        }  # fmt: skip
        self._events.append(event)
        return event

    def _at(self, seconds: float) -> int:
        """Microseconds; both ends of a span are rounded alike, so that neighbours meet."""
        return round((seconds - self._origin) * 1e6)
