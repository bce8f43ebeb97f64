# SPDX-License-Identifier: Apache-2.0
"""The live display of a run in another process, made from the files of its run directory.

Steps and evaluations come from `metrics.jsonl`, role states from `status.json`, failures and recoveries from the
controller's log. Following a run only reads, so it never affects the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from relax_core.api import events
from relax_core.api.events import Event
from relax_core.api.role import Heartbeat, Wait
from relax_core.observe.metrics import evaluations
from relax_core.observe.recorder import Display
from relax_core.observe.records import records, whole_lines
from relax_core.views.display import WIDTH
from relax_core.views.run import RunHealth, RunView, health

_HEARTBEAT = {field.name for field in fields(Heartbeat)} - {"waits", "spans", "sent"}


class LineFollower:
    """A reader of the lines that were added to a JSON-lines file since the last call.

    Invariants:
    - Each line is returned once, when it is complete.
    - After a rollback replaced the file with a shorter version, only later lines are returned.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._read = 0, 0
        self.replaced = False
        """True if the last call found a new file, which a rollback of the run has written."""

    def added(self) -> list[dict[str, Any]]:
        """Return the added records; the first call returns all records."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                self.replaced = self._inode not in (0, inode)
                if self.replaced:
                    self._read = whole_lines(file.read())
                self._inode = inode
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = whole_lines(data)
        self._read += whole
        return list(records(data[:whole]))


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
        self._metrics = LineFollower(view.path / "metrics.jsonl")
        self._log = LineFollower(view.path / "logs" / "controller.jsonl")
        self._log.added()
        self._step = 0
        self._recent: list[dict[str, Any]] = self._metrics.added()[-WIDTH:]
        if self._recent:  # the display measures time from the first step that it shows
            self.clock.recorded_at = float(self._recent[0].get("time") or time.time())

    def look(self, display: Display, wall: float) -> RunHealth:
        """Send new records to the display, and return the run's health; the first call sends only recent steps."""
        state = health(self.view, wall)  # read first: a run writes its last records before it writes its end
        added = self._metrics.added()
        if self._metrics.replaced:
            self._step = 0
        for record in (*self._recent, *added):
            self.clock.recorded_at = float(record.get("time") or wall)
            for event in self._steps(record):
                display.event(event)
        self._recent = []
        self.clock.recorded_at = None
        for record in self._log.added():
            for event in _logged(record):
                display.event(event)
        status = self.view.status()
        if state.ended:
            display.event(events.RunFinished(state.state, {}))
        elif status:
            display.heartbeats(heartbeats(status))
        return state

    def _steps(self, record: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a line of metrics; the first line of a step means that the step has finished."""
        metrics = {key: value for key, value in record.items() if "/" in key and value is not None}
        step = int(record.get("step", 0))
        judged = evaluations(metrics)
        for name, measure in sorted(judged):
            group = f"eval/{name}"
            yield events.EvalFinished(
                step, name, metrics[f"{group}/{measure}"], int(metrics[f"{group}/count"]),
                metrics.get(f"{group}/temperature", 0.0), measure=measure,
            )  # fmt: skip
        if all(key.startswith("eval/") for key in metrics):
            return
        if step <= self._step:
            yield events.StepMeasured(step, metrics)
        else:
            self._step = step
            yield events.StepFinished(step, metrics)


def heartbeats(status: Mapping[str, Any]) -> tuple[Heartbeat, ...]:
    """Return the roles' heartbeats of a status document, with times of the wall clock in seconds."""
    shift = float(status["written_at"]) - float(status["now"])
    found = []
    for role in status.get("roles", ()):
        waits = tuple(
            Wait(**{**wait, "since": wait["since"] + shift, "deadline": wait["deadline"] + shift})
            for wait in role.get("waits", ())
        )
        known = {key: value for key, value in role.items() if key in _HEARTBEAT}
        found.append(Heartbeat(**{**known, "at": float(role.get("at") or 0.0) + shift}, waits=waits))
    return tuple(found)


def _logged(record: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the event of a record of the controller's log, if the display shows such events."""
    match record.get("event"):
        case "role failed":
            yield events.RoleFailed(record["failed"], record["error"], int(record.get("exit_code") or 1), False)
        case "role recovered":
            yield events.RoleRecovered(record["recovered"], float(record["seconds"]), record.get("detail", ""))
        case "run restarted":
            yield events.RunRestarted(*(record[name] for name in ("step", "reason", "in_a_row", "limit")))
        case message if "from_role" in record:
            yield events.Logged(str(record.get("level")), str(record["from_role"]), str(message))
