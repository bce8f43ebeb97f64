# SPDX-License-Identifier: Apache-2.0
"""Where each step's time went, of the spans that roles and devices tell: busy, waiting (for whom), idle, bubble.

A step's window lies between two commits, on the hub's clock. It is accounted once every role has told its time up to the
window's end. It holds only the spans of windows still open; the whole story is the trace's.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from relax_core.api.events import Span, TimeSpent

PATIENCE_S = 5.0
"""A role that has told nothing for this long after a step's end is gone, and the step is accounted without it."""
DEVICES_OF = ("actor", "rollout")
"""Whose bubbles are told apart."""


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
    """Spans in, metrics of whole steps out."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._latest = 0.0
        self._roles: set[str] = set()
        self._spans: dict[str, deque[Span]] = defaultdict(deque)
        """By lane, in order."""
        self._teller: dict[str, str] = {}
        """Of each lane: the role it works for."""
        self._owing: dict[str, set[str]] = defaultdict(set)
        self._devices: dict[str, set[str]] = defaultdict(set)
        """By role. A device is known from its first span on, such as the load of the model."""
        self._windows: deque[Window] = deque()
        self._last_end: float | None = None

    def told(self, event: TimeSpent) -> None:
        self._roles.add(event.role)
        self._until[event.role] = float("inf") if event.over else event.until
        self._latest = max(self._latest, event.until)
        for span in event.spans:
            self._spans[span.lane].append(span)
            self._teller[span.lane] = event.role
            self._devices[event.role].update(span.devices)
            if span.kind == "wait":
                self._owing[span.lane].add(debtor(span.owed_by))

    def stepped(self, step: int, at: float, step_s: float) -> Window:
        """A step was committed; the first one's window is as long as the step says."""
        start = self._last_end if self._last_end is not None and self._last_end < at else at - step_s
        window = Window(step, start, at)
        self._windows.append(window)
        self._last_end = at
        return window

    def take(self, finish: bool = False) -> Iterator[tuple[Window, dict[str, float]]]:
        """Steps whose time is wholly told; with `finish` all."""
        while self._windows and (finish or self._is_told(self._windows[0])):
            window = self._windows.popleft()
            yield window, self._metrics(window)
            self._forget(window.end)

    def rewind(self) -> None:
        """The run goes back: steps in the making are none."""
        self._windows.clear()
        self._last_end = None

    def _is_told(self, window: Window) -> bool:
        return bool(self._until) and (
            min(self._until.values()) >= window.end or self._latest >= window.end + PATIENCE_S
        )

    def _metrics(self, window: Window) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for role in sorted(self._roles):
            metrics |= self._of_role(role, window)
        return metrics | self._bubbles(window)

    def _of_role(self, role: str, window: Window) -> dict[str, float]:
        """A role's own lane; what its devices did is the bubbles' business."""
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
        """Shares of device time without work. A device that two lanes share works while either does."""
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
        """Seconds of work, by device."""
        intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for lane, spans in self._spans.items():
            if of in ("", self._teller[lane]):
                for span in clipped(spans, window):
                    for device in span.devices if span.kind == "work" else ():
                        intervals[device].append((span.start, span.end))
        return defaultdict(float, {device: covered(found) for device, found in intervals.items()})

    def _forget(self, before: float) -> None:
        for spans in self._spans.values():
            while spans and spans[0].end <= before:
                spans.popleft()


def debtor(owed_by: str) -> str:
    """Of what a wait says in words, the first name: `rollout, then advantages` is `rollout`."""
    first = owed_by.replace(",", " ").replace("(", " ").split()
    return first[0].replace("/", "-") if first else "nobody"


def clipped(spans: Iterable[Span], window: Window) -> Iterator[Span]:
    """The parts of spans that lie in a window."""
    for span in spans:
        start, end = max(span.start, window.start), min(span.end, window.end)
        if start < end:
            yield Span(span.lane, span.kind, span.name, start, end, span.owed_by, span.devices)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
