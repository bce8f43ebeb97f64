# SPDX-License-Identifier: Apache-2.0
"""Spans of roles, engines and ranks as Chrome trace events, a lane each: open `trace.json` in Perfetto or chrome://tracing.

Times are monotonic seconds of one clock; the oldest spans go when there are too many. What lanes do is told by
`TimeSpent`; steps, publishes and checkpoints by whoever writes the run down.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain, count
from typing import Any

from relax_core.api.status import Span

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
