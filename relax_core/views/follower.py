# SPDX-License-Identifier: Apache-2.0
"""The live display of a run in another process, made from the files of its run directory.

Events come from `events.jsonl`, the metrics of steps from `metrics.jsonl`, and role states from `status.json`.
Following a run only reads, so it never affects the run.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from relax_core.api import events
from relax_core.api.events import Event
from relax_core.observe.event_log import EVENTS, event_name, recorded_event
from relax_core.observe.recorder import Display
from relax_core.observe.records import records, whole_lines
from relax_core.observe.status import heartbeats
from relax_core.views.display import WIDTH
from relax_core.views.run import RunHealth, RunView, health

_STEP, _MEASURED = event_name(events.StepFinished), event_name(events.StepMeasured)
_EVALUATED = event_name(events.EvalFinished)
_LOGGED = event_name(events.Logged)
PROFILE_FACT = "trace_bytes"
"""Field of the log line that a role writes for each profiled step."""


class LineFollower:
    """A reader of the lines that were added to a JSON-lines file since the last call.

    Invariants:
    - Each line is returned once, when it is complete.
    - After a rollback replaced the file, all lines of the new file are returned.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._read = 0, 0

    def added(self) -> list[dict[str, Any]]:
        """Return the added records; the first call returns all records."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._read = inode, 0
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = whole_lines(data)
        self._read += whole
        return list(records(data[:whole]))


class EvaluationCount:
    """The number of evaluations of a set that a run has finished; evaluations that a rollback undid count, too."""

    def __init__(self, view: RunView) -> None:
        table = view.config.get("eval", {})
        self.sets: int = (len(table.get("sets", ())) or 1) if table.get("every", 1) else 0
        """Number of evaluation sets of the run; 0: it has none."""
        self._events, self._count = LineFollower(view.path / EVENTS), 0

    def now(self) -> int:
        """Return the count. Each call reads only the events that were written since the previous call."""
        self._count += sum(record["event"] == _EVALUATED for record in self._events.added())
        return self._count


class ProfileCount:
    """The number of steps of the actor that a run has profiled; a step that was profiled twice counts twice."""

    def __init__(self, view: RunView) -> None:
        self._events, self._count = LineFollower(view.path / EVENTS), 0

    def now(self) -> int:
        """Return the count. Each call reads only the events that were written since the previous call."""
        self._count += sum(
            record["event"] == _LOGGED and record["role"] == "actor" and PROFILE_FACT in record["fields"]
            for record in self._events.added()
        )
        return self._count


class WallClock:
    """A wall clock that shows `recorded_at` while past records are replayed."""

    def __init__(self) -> None:
        self.recorded_at: float | None = None

    def now(self) -> float:
        return time.time() if self.recorded_at is None else self.recorded_at

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError("a display does not sleep")


class RunFollower:
    """A source of display events from a run's files; use one instance for as long as the run is watched."""

    def __init__(self, view: RunView) -> None:
        self.view, self.clock = view, WallClock()
        self._events, self._metrics = LineFollower(view.path / EVENTS), LineFollower(view.path / "metrics.jsonl")
        self._by_step: dict[int, dict[str, float]] = {}
        past = without_repeated_steps(self._events.added())
        steps = [at for at, record in enumerate(past) if record["event"] == _STEP]
        self._recent = past[steps[-WIDTH:][0] :] if steps else []
        if self._recent:  # the display measures time from the first step that it shows
            self.clock.recorded_at = _time(self._recent[0])

    def look(self, display: Display, wall: float) -> RunHealth:
        """Send new events to the display, and return the run's health; the first call sends only recent events."""
        state = health(self.view, wall)  # read first: a run writes its last records before it writes its end
        recent, self._recent = self._recent, []
        for record in (*recent, *self._events.added()):
            if event := self._event(record):
                self.clock.recorded_at = _time(record)
                display.event(event)
        self.clock.recorded_at = None
        status = self.view.status()
        if state.ended:
            display.event(events.RunFinished(state.state, {}))
        elif status:
            display.heartbeats(heartbeats(status))
        return state

    def _event(self, record: Mapping[str, Any]) -> Event | None:
        """Return the event of a record; None for the start and end of the run, and for steps that were undone."""
        event = recorded_event(record)
        match event:
            case events.RunStarted() | events.RunFinished():
                return None
            case events.StepFinished(step) | events.StepMeasured(step):
                for line in self._metrics.added():
                    values = {key: value for key, value in line.items() if "/" in key and value is not None}
                    self._by_step.setdefault(line["step"], {}).update(values)
                self._by_step = {number: values for number, values in self._by_step.items() if number > step - WIDTH}
                metrics = dict(self._by_step.get(step, {}))
                return replace(event, metrics=metrics) if metrics else None
        return event


def without_repeated_steps(past: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """Return the records of events without the steps that a rollback undid and that were trained again later."""
    kept: list[dict[str, Any]] = []
    repeated = math.inf  # earliest step whose repetition is recorded later
    for record in reversed(past):
        if record["event"] in (_STEP, _MEASURED) and record["step"] >= repeated:
            continue
        if record["event"] == _STEP:
            repeated = record["step"]
        kept.append(record)
    return kept[::-1]


def _time(record: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()
