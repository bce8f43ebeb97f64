# SPDX-License-Identifier: Apache-2.0
"""Spans of roles as Chrome trace events, a lane a role: open `trace.json` in Perfetto or chrome://tracing.

Times are monotonic seconds of one clock; the oldest spans go when there are too many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from relax_core.api.status import Beat

MOST = 100_000
_QUIET = ("waiting", "stopped")


class Trace:
    """Collects spans; `document` is the file."""

    def __init__(self, origin: float, most: int = MOST) -> None:
        self._origin = origin
        self._spans: deque[dict[str, Any]] = deque(maxlen=most)
        self._lanes: dict[str, int] = {}
        self._doing: dict[str, tuple[str, float]] = {}

    def span(self, name: str, role: str, start: float, end: float, **arguments: Any) -> None:
        """Something a role did."""
        self._spans.append({
            "name": name, "cat": "relax", "ph": "X", "pid": 1, "tid": self._lane(role),
            "ts": round((start - self._origin) * 1e6), "dur": max(round((end - start) * 1e6), 0), "args": arguments,
        })  # fmt: skip

    def mark(self, name: str, role: str, at: float) -> None:
        """Something that happened."""
        self._spans.append({
            "name": name, "cat": "relax", "ph": "i", "s": "t", "pid": 1, "tid": self._lane(role),
            "ts": round((at - self._origin) * 1e6),
        })  # fmt: skip

    def beat(self, beat: Beat) -> None:
        """Heartbeats give the spans of roles that report nothing finer."""
        doing = (beat.doing or beat.state) if beat.state not in _QUIET else ""
        name, since = self._doing.get(beat.role, ("", beat.at))
        if doing == name:
            return
        if name:
            self.span(name, beat.role, since, beat.at)
        self._doing[beat.role] = (doing, beat.at)

    def finish(self, now: float) -> None:
        """End what is open."""
        for role, (name, since) in self._doing.items():
            if name:
                self.span(name, role, since, now)
        self._doing.clear()

    def document(self) -> Mapping[str, Any]:
        names = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": role}}
            for role, lane in self._lanes.items()
        ]
        return {"displayTimeUnit": "ms", "traceEvents": [*names, *self._spans]}

    def _lane(self, role: str) -> int:
        return self._lanes.setdefault(role, len(self._lanes) + 1)
