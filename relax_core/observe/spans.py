# SPDX-License-Identifier: Apache-2.0
"""Spans: how a role, an engine or a rank records what it does; how a run accounts for its time; and the trace.

Times are monotonic seconds of one clock. SpanRecorder works beside the work itself, in any process; TimeAccount and Trace
are given the spans that heartbeats bring, and belong to whoever writes the run down.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

from relax_core.api.events import Span, SpanKind, TimeSpent
from relax_core.api.role import Clock

RESOLUTION_S = 1e-4
"""A shorter state belongs to the one before it: the spans stay few, however busy a loop is."""
_SAID = 0
"""The number of the work that `say` named; sections count from 1."""
_PRECEDENCE: tuple[SpanKind, ...] = ("work", "overhead", "wait")


@dataclass(frozen=True, slots=True)
class _State:
    kind: SpanKind
    name: str
    owed_by: str = ""
    holds: bool = field(default=False, compare=False)
    """Nothing else goes on meanwhile."""


class SpanRecorder:
    """Records the time of one track; implements `api.role.SpanTrack`.

    Invariants:
    - Spans never overlap and are in order; gaps are idle. Several things may be open at once: the span is of the one that
      comes first (holding all others, then work, overhead, wait).
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
        """Tell whether some section of work is open."""
        return any(state.kind == "work" for state in self._open.values())

    def rest(self, work: str, kind: SpanKind = "work") -> None:
        """Set what a role does while nothing else is open."""
        self._base = _State(kind, work)
        self._update()

    def say(self, work: str) -> None:
        """Set what it works at from now on; the empty string: nothing."""
        if work:
            self._open[_SAID] = _State("work", work)
        else:
            self._open.pop(_SAID, None)
        self._update()

    @contextmanager
    def section(self, what: str) -> Iterator[None]:
        """Open one of several pieces of work side by side: outside of them the track does nothing of its own."""
        self._by_sections = True
        with self.span("work", what):
            yield

    @contextmanager
    def span(self, kind: SpanKind, name: str, owed_by: str = "", holds: bool = False) -> Iterator[None]:
        """Open something that lasts from entry to exit. `holds`: no work goes on meanwhile, whatever sections are open."""
        self._numbers += 1
        number = self._numbers
        self._open[number] = _State(kind, name, owed_by, holds)
        self._update()
        try:
            yield
        finally:
            del self._open[number]
            self._update()

    def take(self) -> tuple[Span, ...]:
        """Take the spans up to now that were not taken before."""
        self._close(self._clock.now())
        spans, self._spans = tuple(self._spans), []
        return spans

    def _update(self) -> None:
        """Close the span that lasted until now when another state comes first."""
        states = list(self._open.values())
        found = [state for state in states if state.holds]
        for kind in _PRECEDENCE:
            found += [state for state in states if state.kind == kind]
        state = found[0] if found else None if self._by_sections else self._base
        if state != self._current:
            self._close(self._clock.now())
            self._current = state

    def _close(self, now: float) -> None:
        """Record what lasted from `_since` until now; too short a time goes to what came before."""
        start, self._since = self._since, now
        state = self._current
        if now - start < RESOLUTION_S and self._spans and self._spans[-1].end == start:
            before = self._spans.pop()
            self._add(_State(before.kind, before.name, before.owed_by), before.start, now)
        elif state is not None and now > start:
            self._add(state, start, now)

    def _add(self, state: _State, start: float, end: float) -> None:
        last = self._spans[-1] if self._spans else None
        if last and last.end == start and _State(last.kind, last.name, last.owed_by) == state:
            start = self._spans.pop().start
        self._spans.append(Span(self._track, state.kind, state.name, start, end, state.owed_by, self._devices))


class Unwatched:
    """The track of a worker whose time nobody records."""

    def span(self, kind: SpanKind, name: str, owed_by: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def say(self, work: str) -> None:
        """Record nothing."""


PATIENCE_S = 5.0
"""A role that has sent nothing for this long after a step's end is gone, and the step is accounted without it."""
DEVICES_OF = ("actor", "rollout")
"""Roles with a bubble fraction of their own."""


@dataclass(frozen=True, slots=True)
class Window:
    """One step, from commit to commit."""

    step: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class TimeAccount:
    """Accounts for each step's time by spans of roles and devices: busy, waiting (for whom), idle, bubble.

    Invariants:
    - A step's window lies between two commits, on the hub's clock; windows never overlap.
    - A window is accounted once every role has sent its spans up to the window's end; only spans of open windows are held.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._latest = 0.0
        self._roles: set[str] = set()
        self._spans: dict[str, deque[Span]] = defaultdict(deque)
        """By track, in order."""
        self._role_of: dict[str, str] = {}
        """Role that a track works for."""
        self._owing: dict[str, set[str]] = defaultdict(set)
        self._devices: dict[str, set[str]] = defaultdict(set)
        """By role. A device is known from its first span on, such as the load of the model."""
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
                self._owing[span.track].add(debtor(span.owed_by))

    def step(self, step: int, at: float, step_s: float) -> Window:
        """Close the window of a committed step; the first one's is as long as the step says."""
        start = self._last_end if self._last_end is not None and self._last_end < at else at - step_s
        window = Window(step, start, at)
        self._windows.append(window)
        self._last_end = at
        return window

    def take(self, finish: bool = False) -> Iterator[tuple[Window, dict[str, float]]]:
        """Yield the steps whose time is wholly known; with `finish` all."""
        while self._windows:
            end = self._windows[0].end
            known = bool(self._until) and (min(self._until.values()) >= end or self._latest >= end + PATIENCE_S)
            if not (finish or known):
                return
            window = self._windows.popleft()
            metrics: dict[str, float] = {}
            for role in sorted(self._roles):
                metrics |= self._of_role(role, window)
            yield window, metrics | self._bubbles(window)
            for spans in self._spans.values():
                while spans and spans[0].end <= window.end:
                    spans.popleft()

    def rewind(self) -> None:
        """Forget open windows: the run goes back."""
        self._windows.clear()
        self._last_end = None

    def _of_role(self, role: str, window: Window) -> dict[str, float]:
        """Account a role's own track; its devices count in the bubbles."""
        spans = list(clipped(self._spans.get(role, ()), window))
        busy = sum(span.end - span.start for span in spans if span.kind != "wait")
        owed = dict.fromkeys(sorted(self._owing[role]), 0.0)
        for span in spans:
            if span.kind == "wait":
                owed[debtor(span.owed_by)] += span.end - span.start
        waited = sum(owed.values())
        return {
            f"time/{role}/busy_s": busy,
            f"time/{role}/wait_s": waited,
            f"time/{role}/idle_s": max(window.seconds - busy - waited, 0.0),
            **{f"time/{role}/wait/{name}_s": seconds for name, seconds in owed.items()},
        }

    def _bubbles(self, window: Window) -> dict[str, float]:
        """Compute shares of device time without work. A device that two tracks share works while either does."""
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
        """Return seconds of work by device; `of` one role, or all."""
        intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for track, spans in self._spans.items():
            if of in ("", self._role_of[track]):
                for span in clipped(spans, window):
                    for device in span.devices if span.kind == "work" else ():
                        intervals[device].append((span.start, span.end))
        worked: dict[str, float] = defaultdict(float)
        for device, found in intervals.items():
            reached = float("-inf")  # the union's length: what overlaps counts once
            for start, end in sorted(found):
                worked[device] += max(end - max(start, reached), 0.0)
                reached = max(reached, end)
        return worked


def debtor(owed_by: str) -> str:
    """Return the first name of those that a wait says in words: `rollout, then advantages` is `rollout`."""
    first = owed_by.replace(",", " ").replace("(", " ").split()
    return first[0].replace("/", "-") if first else "nobody"


def clipped(spans: Iterable[Span], window: Window) -> Iterator[Span]:
    """Yield the parts of spans that lie in a window."""
    for span in spans:
        start, end = max(span.start, window.start), min(span.end, window.end)
        if start < end:
            yield replace(span, start=start, end=end)


MAX_EVENTS = 100_000
PROCESSES = ("run", "roles", "devices")
"""Tracks are grouped as Chrome's processes, in this order."""
_COLOURS = {"wait": "grey", "overhead": "yellow"}


class Trace:
    """Spans of roles, engines and ranks as Chrome trace events, a track each; `document` is `trace.json` for Perfetto.

    Invariants: spans on one track never overlap, as viewers draw no two there; the oldest events go beyond `max_events`.
    """

    def __init__(self, origin: float, max_events: int = MAX_EVENTS) -> None:
        self._origin = origin
        self._events: deque[dict[str, Any]] = deque(maxlen=max_events)
        self._tracks: dict[tuple[str, str], int] = {}
        self._last: dict[str, tuple[tuple[str, str, float], dict[str, Any]]] = {}
        """Last event of each track, and what it did, for whom it waited, until when."""
        self._ends: dict[tuple[str, str], float] = {}
        """End of the last span, by track of the run."""
        self._steps: list[tuple[float, int]] = []
        """(end, number) of every step, in order."""

    def span(self, name: str, track: str, start: float, end: float, process: str = "run", **arguments: Any) -> None:
        """Add something that lasted, on the track or the first beside it where nothing lasts longer than `start`."""
        tracks = chain((track,), (f"{track} {number}" for number in count(2)))
        track = next(name for name in tracks if self._at(self._ends.get((process, name), start)) <= self._at(start))
        self._ends[process, track] = max(end, self._ends.get((process, track), end))
        self._add("X", name, process, track, start, dur=max(self._at(end) - self._at(start), 0), args=arguments)

    def mark(self, name: str, track: str, at: float) -> None:
        """Add something that happened."""
        self._add("i", name, "run", track, at, s="t")

    def add(self, spans: Iterable[Span]) -> None:
        """Add what tracks did."""
        for span in spans:
            wait = span.kind == "wait"
            arguments = {"kind": span.kind, **({"owed_by": span.owed_by} if span.owed_by else {})}
            extra = {"cname": _COLOURS[span.kind]} if span.kind in _COLOURS else {}
            name = f"waits for {span.name}" if wait else span.name
            process = "devices" if span.devices else "roles"
            before = self._last.get(span.track)
            if before is not None and before[0] == (name, span.owed_by, span.start):
                event = before[1]  # it came in parts, with the heartbeats
                event["dur"] = self._at(span.end) - event["ts"]
            else:
                duration = max(self._at(span.end) - self._at(span.start), 0)
                event = self._add("X", name, process, span.track, span.start, dur=duration, args=arguments, **extra)
            self._last[span.track] = (name, span.owed_by, span.end), event

    def step(self, step: int, start: float, end: float, counters: Mapping[str, Mapping[str, float]]) -> None:
        """Add a committed step; spans that began within it carry its number. Counters are drawn as curves."""
        self._steps.append((end, step))
        self.span(f"step {step}", "steps", start, end, step=step)
        for name, values in counters.items():
            if values:
                self._add("C", name, "run", "steps", end, args=dict(values))

    def document(self) -> Mapping[str, Any]:
        events = sorted((self._numbered(event) for event in self._events), key=lambda event: event["ts"])
        return {"displayTimeUnit": "ms", "traceEvents": [*self._names(), *events]}

    def _names(self) -> list[dict[str, Any]]:
        used = {process for process, _ in self._tracks}
        processes = [
            {"name": name, "ph": "M", "pid": at, "args": {key: value}}
            for at, process in enumerate(PROCESSES, start=1)
            if process in used
            for name, key, value in (("process_name", "name", process), ("process_sort_index", "sort_index", at))
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

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        """Add the step that an event began in."""
        if event["ph"] != "X" or "step" in event["args"] or event["ts"] < 0:
            return event
        at = bisect_left(self._steps, (event["ts"] / 1e6 + self._origin + 1e-6, 0))
        if at == len(self._steps):
            return event
        return {**event, "args": {**event["args"], "step": self._steps[at][1]}}

    def _add(self, phase: str, name: str, process: str, track: str, at: float, **more: Any) -> dict[str, Any]:
        event = {
            "name": name, "cat": "relax", "ph": phase, "pid": PROCESSES.index(process) + 1,
            "tid": self._tracks.setdefault((process, track), len(self._tracks) + 1), "ts": self._at(at), **more,
        }  # fmt: skip
        self._events.append(event)
        return event

    def _at(self, seconds: float) -> int:
        """Convert to microseconds; both ends of a span are rounded alike, so that neighbours meet."""
        return round((seconds - self._origin) * 1e6)
