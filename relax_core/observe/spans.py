# SPDX-License-Identifier: Apache-2.0
"""Spans (timed intervals of the work of roles, engines and ranks), the time metrics derived from spans, and the trace.

Times are monotonic seconds of one clock. A SpanRecorder records in the process that does the work. Heartbeats carry its
spans to the recorder of the run, which passes them to TimeAccount and Trace.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, count
from statistics import median
from typing import Any

from relax_core.api.events import Span, SpanKind, TimeSpent
from relax_core.api.role import Clock

RESOLUTION_S = 1e-4
"""A state shorter than this many seconds is added to the span before it, so that a busy loop makes few spans."""
_SAID = 0
"""Key in `_open` of the work that `say` has set; keys of spans and sections count from 1."""
_PRECEDENCE: tuple[SpanKind, ...] = ("work", "overhead", "wait")


@dataclass(frozen=True, slots=True)
class _State:
    kind: SpanKind
    name: str
    blocked_by: str = ""
    holds: bool = field(default=False, compare=False)
    """True if the state takes precedence over all states without `holds`."""


class SpanRecorder:
    """A recorder of the spans of one track: `api.role.SpanTrack`.

    Invariants:
    - Spans are in order and never overlap; gaps are idle time. If several states are open, the time belongs to the
      first in this order: a state that `holds`, work, overhead, wait.
    - Every span is taken once.
    """

    def __init__(self, track: str, clock: Clock, devices: tuple[str, ...] = ()) -> None:
        self._track, self._clock, self._devices = track, clock, devices
        self._open: dict[int, _State] = {}
        self._base: _State | None = None
        self._by_sections = False
        self._numbers = 0
        self._current: _State | None = None
        self._since = clock.now()
        self._spans: list[Span] = []

    @property
    def working(self) -> bool:
        """True while a state of kind work is open."""
        return any(state.kind == "work" for state in self._open.values())

    def rest(self, work: str, kind: SpanKind = "work") -> None:
        """Set the state of the track while no span is open and `section` was never used."""
        self._base = _State(kind, work)
        self._update()

    def say(self, work: str) -> None:
        """Set the work of the track from now on; an empty string ends it."""
        if work:
            self._open[_SAID] = _State("work", work)
        else:
            self._open.pop(_SAID, None)
        self._update()

    @contextmanager
    def section(self, what: str) -> Iterator[None]:
        """Record one of several concurrent pieces of work. After the first call, time with nothing open is idle."""
        self._by_sections = True
        with self.span("work", what):
            yield

    @contextmanager
    def span(self, kind: SpanKind, name: str, blocked_by: str = "", holds: bool = False) -> Iterator[None]:
        """Record a state from entry to exit. `holds`: the state takes precedence, also over open sections."""
        self._numbers += 1
        number = self._numbers
        self._open[number] = _State(kind, name, blocked_by, holds)
        self._update()
        try:
            yield
        finally:
            del self._open[number]
            self._update()

    def take(self) -> tuple[Span, ...]:
        """Return the spans up to now that were not taken before."""
        self._close(self._clock.now())
        spans, self._spans = tuple(self._spans), []
        return spans

    def _update(self) -> None:
        """Close the current span if a different state now takes precedence."""
        states = list(self._open.values())
        found = [state for state in states if state.holds]
        for kind in _PRECEDENCE:
            found += [state for state in states if state.kind == kind]
        state = found[0] if found else None if self._by_sections else self._base
        if state != self._current:
            self._close(self._clock.now())
            self._current = state

    def _close(self, now: float) -> None:
        """Record the current state from `_since` until now; add a time below `RESOLUTION_S` to the span before it."""
        start, self._since = self._since, now
        state = self._current
        if now - start < RESOLUTION_S and self._spans and self._spans[-1].end == start:
            before = self._spans.pop()
            self._add(_State(before.kind, before.name, before.blocked_by), before.start, now)
        elif state is not None and now > start:
            self._add(state, start, now)

    def _add(self, state: _State, start: float, end: float) -> None:
        last = self._spans[-1] if self._spans else None
        if last and last.end == start and _State(last.kind, last.name, last.blocked_by) == state:
            start = self._spans.pop().start
        self._spans.append(Span(self._track, state.kind, state.name, start, end, state.blocked_by, self._devices))


class Unwatched:
    """A track that records nothing."""

    def span(self, kind: SpanKind, name: str, blocked_by: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def say(self, work: str) -> None:
        """Do nothing."""


_RANK = re.compile(r"actor-rank-(\d+)")
PATIENCE_S = 5.0
"""Seconds to wait for spans of roles after a step's end; then the step's metrics are computed without missing spans."""
DEVICES_OF = ("actor", "rollout")
"""Roles with a separate bubble fraction."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time from the commit of one step to the commit of the next, in seconds of the hub's clock."""

    step: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class TimeAccount:
    """The time metrics of each step, computed from spans of roles and devices: busy, wait (by blocker), idle, bubbles.

    Invariants:
    - A step's window lies between two commits, on the hub's clock; windows never overlap.
    - A window is taken once every role has sent its spans up to the window's end. Spans of taken windows are dropped.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._latest = 0.0
        self._roles: set[str] = set()
        self._spans: dict[str, deque[Span]] = defaultdict(deque)
        """Spans of open windows by track, in order."""
        self._role_of: dict[str, str] = {}
        """Role to which each track belongs."""
        self._blockers: dict[str, set[str]] = defaultdict(set)
        """Blockers of each track's waits."""
        self._devices: dict[str, set[str]] = defaultdict(set)
        """Devices by role. A device is added at its first span, such as the load of the model."""
        self._windows: deque[Window] = deque()
        self._last_end: float | None = None

    def add(self, event: TimeSpent) -> None:
        self._roles.add(event.role)
        self._until[event.role] = float("inf") if event.over else event.until
        self._latest = max(self._latest, event.until)
        for span in event.spans:
            self._spans[span.track].append(span)
            self._role_of[span.track] = event.role
            self._devices[event.role].update(span.devices)
            if span.kind == "wait":
                self._blockers[span.track].add(first_blocker(span.blocked_by))

    def step(self, step: int, at: float, step_s: float) -> Window:
        """Return the window of the step committed at `at`; the first window lasts `step_s` seconds."""
        start = self._last_end if self._last_end is not None and self._last_end < at else at - step_s
        window = Window(step, start, at)
        self._windows.append(window)
        self._last_end = at
        return window

    def take(self, finish: bool = False) -> Iterator[tuple[Window, dict[str, float]]]:
        """Yield windows whose spans are complete, with their metrics; with `finish`, yield all windows."""
        while self._windows:
            end = self._windows[0].end
            known = bool(self._until) and (min(self._until.values()) >= end or self._latest >= end + PATIENCE_S)
            if not (finish or known):
                return
            window = self._windows.popleft()
            metrics: dict[str, float] = {}
            for role in sorted(self._roles):
                metrics |= self._of_role(role, window)
            yield window, metrics | self._bubbles(window) | self._ranks(window)
            for spans in self._spans.values():
                while spans and spans[0].end <= window.end:
                    spans.popleft()

    def spans(self, window: Window) -> list[Span]:
        """Return the spans in the window that `take` has just yielded; parts of one activity are one span."""
        found: list[Span] = []
        for spans in self._spans.values():
            for at, span in enumerate(clipped(spans, window)):
                last = found[-1] if at else None
                if last and last == replace(span, start=last.start, end=last.end) and last.end == span.start:
                    found[-1] = replace(last, end=span.end)
                else:
                    found.append(span)
        return found

    def rewind(self) -> None:
        """Drop open windows, since the run rolls back."""
        self._windows.clear()
        self._last_end = None

    def _of_role(self, role: str, window: Window) -> dict[str, float]:
        """Return the time metrics of a role's own track, without its devices."""
        spans = list(clipped(self._spans.get(role, ()), window))
        busy = sum(span.end - span.start for span in spans if span.kind != "wait")
        waits = dict.fromkeys(sorted(self._blockers[role]), 0.0)
        for span in spans:
            if span.kind == "wait":
                waits[first_blocker(span.blocked_by)] += span.end - span.start
        waited = sum(waits.values())
        return {
            f"time/{role}/busy_s": busy,
            f"time/{role}/wait_s": waited,
            f"time/{role}/idle_s": max(window.seconds - busy - waited, 0.0),
            **{f"time/{role}/wait/{name}_s": seconds for name, seconds in waits.items()},
        }

    def _ranks(self, window: Window) -> dict[str, float]:
        """Compare the actor's ranks by their time in forward and backward passes; nothing for a single rank."""
        passes: dict[int, float] = {}
        for track, spans in self._spans.items():
            if found := _RANK.fullmatch(track):
                own = (span for span in clipped(spans, window) if span.name == "accumulate")
                passes[int(found[1])] = sum(span.end - span.start for span in own)
        if len(passes) < 2 or not (usual := median(passes.values())):
            return {}
        slowest = max(passes, key=lambda rank: passes[rank])
        return {"trainer/slowest_rank": float(slowest), "trainer/slowest_rank_ratio": passes[slowest] / usual}

    def _bubbles(self, window: Window) -> dict[str, float]:
        """Return the shares of device time without work. A device shared by two tracks works while either works."""
        if window.seconds <= 0:
            return {}
        worked = self._worked(window)
        groups = {"": set().union(*self._devices.values()), **{f"/{role}": self._devices[role] for role in DEVICES_OF}}
        metrics = {
            f"time/bubble_fraction{name}": max(
                1.0 - sum(worked[d] for d in devices) / (len(devices) * window.seconds), 0.0
            )
            for name, devices in groups.items()
            if devices
        }
        generating = self._worked(window, of="rollout")
        return metrics | ({"time/generate_s": sum(generating.values())} if self._devices["rollout"] else {})

    def _worked(self, window: Window, of: str = "") -> dict[str, float]:
        """Return seconds of work by device, of the role `of` or of all roles."""
        intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for track, spans in self._spans.items():
            if of in ("", self._role_of[track]):
                for span in clipped(spans, window):
                    for device in span.devices if span.kind == "work" else ():
                        intervals[device].append((span.start, span.end))
        worked: dict[str, float] = defaultdict(float)
        for device, found in intervals.items():
            reached = float("-inf")  # overlapping intervals count once
            for start, end in sorted(found):
                worked[device] += max(end - max(start, reached), 0.0)
                reached = max(reached, end)
        return worked


def first_blocker(blocked_by: str) -> str:
    """Return the first name in the words of a wait's `blocked_by`: `rollout` for `rollout, then advantages`."""
    first = blocked_by.replace(",", " ").replace("(", " ").split()
    return first[0].replace("/", "-") if first else "nobody"


def clipped(spans: Iterable[Span], window: Window) -> Iterator[Span]:
    """Yield the parts of spans inside a window."""
    for span in spans:
        start, end = max(span.start, window.start), min(span.end, window.end)
        if start < end:
            yield replace(span, start=start, end=end)


MAX_EVENTS = 100_000
PROCESSES = ("run", "roles", "devices")
"""Groups of tracks, shown as processes of a Chrome trace in this order."""
_COLOURS = {"wait": "grey", "overhead": "yellow"}


class Trace:
    """Spans as Chrome trace events, with one track per role, engine and rank; Perfetto reads the `document`.

    Invariants: spans on one track never overlap, since viewers cannot draw that. Beyond `max_events`, the oldest events
    are dropped.
    """

    def __init__(self, origin: float, max_events: int = MAX_EVENTS) -> None:
        self._origin = origin
        self._events: deque[dict[str, Any]] = deque(maxlen=max_events)
        self._tracks: dict[tuple[str, str], int] = {}
        self._last: dict[str, tuple[tuple[str, str, float], dict[str, Any]]] = {}
        """((name, blocker, end) of the last span, the span's trace event), by track."""
        self._ends: dict[tuple[str, str], float] = {}
        """End of the last span, by (process, track)."""
        self._steps: list[tuple[float, int]] = []
        """(end, step) of every committed step, in order."""

    def span(self, name: str, track: str, start: float, end: float, process: str = "run", **arguments: Any) -> None:
        """Add a span on `track`, or on the first of `track 2`, `track 3`, ... that is free at `start`."""
        tracks = chain((track,), (f"{track} {number}" for number in count(2)))
        track = next(name for name in tracks if self._at(self._ends.get((process, name), start)) <= self._at(start))
        self._ends[process, track] = max(end, self._ends.get((process, track), end))
        self._add("X", name, process, track, start, dur=max(self._at(end) - self._at(start), 0), args=arguments)

    def mark(self, name: str, track: str, at: float) -> None:
        """Add an instant event."""
        self._add("i", name, "run", track, at, s="t")

    def add(self, spans: Iterable[Span]) -> None:
        """Add recorded spans. A span that continues the last span of its track extends that span."""
        for span in spans:
            wait = span.kind == "wait"
            arguments = {"kind": span.kind, **({"blocked_by": span.blocked_by} if span.blocked_by else {})}
            extra = {"cname": _COLOURS[span.kind]} if span.kind in _COLOURS else {}
            name = f"waits for {span.name}" if wait else span.name
            process = "devices" if span.devices else "roles"
            before = self._last.get(span.track)
            if before is not None and before[0] == (name, span.blocked_by, span.start):
                event = before[1]  # a further part of the same span
                event["dur"] = self._at(span.end) - event["ts"]
            else:
                duration = max(self._at(span.end) - self._at(span.start), 0)
                event = self._add("X", name, process, span.track, span.start, dur=duration, args=arguments, **extra)
            self._last[span.track] = (name, span.blocked_by, span.end), event

    def step(self, step: int, start: float, end: float, counters: Mapping[str, Mapping[str, float]]) -> None:
        """Add a committed step. Spans that began in the step get its number; viewers draw `counters` as curves."""
        self._steps.append((end, step))
        self.span(f"step {step}", "steps", start, end, step=step)
        for name, values in counters.items():
            if values:
                self._add("C", name, "run", "steps", end, args=dict(values))

    def document(self) -> Mapping[str, object]:
        events = [self._numbered(event) for event in sorted(self._events, key=lambda event: event["ts"])]
        return {"displayTimeUnit": "ms", "traceEvents": [*self._names(), *events]}

    def _names(self) -> list[dict[str, object]]:
        used = {process for process, _ in self._tracks}
        processes = [
            {"name": name, "ph": "M", "pid": number, "args": {key: value}}
            for number, process in enumerate(PROCESSES, start=1)
            if process in used
            for name, key, value in (("process_name", "name", process), ("process_sort_index", "sort_index", number))
        ]
        threads = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": PROCESSES.index(process) + 1,
                "tid": track,
                "args": {"name": name},
            }
            for (process, name), track in self._tracks.items()
        ]
        return [*processes, *threads]

    def _numbered(self, event: dict[str, Any]) -> dict[str, object]:
        """Return the event with the number of the step in which it began."""
        if event["ph"] != "X" or "step" in event["args"] or event["ts"] < 0:
            return event
        index = bisect_left(self._steps, (event["ts"] / 1e6 + self._origin + 1e-6, 0))
        if index == len(self._steps):
            return event
        return {**event, "args": {**event["args"], "step": self._steps[index][1]}}

    def _add(self, phase: str, name: str, process: str, track: str, at: float, **more: Any) -> dict[str, object]:
        event = {
            "name": name, "cat": "relax", "ph": phase, "pid": PROCESSES.index(process) + 1,
            "tid": self._tracks.setdefault((process, track), len(self._tracks) + 1), "ts": self._at(at), **more,
        }  # fmt: skip
        self._events.append(event)
        return event

    def _at(self, seconds: float) -> int:
        """Convert to microseconds since the origin; equal times round equally, so adjacent spans meet."""
        return round((seconds - self._origin) * 1e6)
