# SPDX-License-Identifier: Apache-2.0
"""The events of a run: lines of `events.jsonl`, which all views read. Warnings and errors are also printed on stderr.

A line has the event's name and fields. Metrics, samples, spans, the configuration, the summary and a guard's evidence
are in files of their own. Lines are never removed: a step that was undone stays, and its repetition follows.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from relax_core.api import events
from relax_core.api.errors import InfrastructureError, printable
from relax_core.api.events import Event
from relax_core.api.weights import Version
from relax_core.observe.files import encode
from relax_core.observe.records import AppendOnlyFile, whole_lines
from relax_core.observe.redaction import Redactor

EVENTS = "events.jsonl"
UNWRITTEN = (events.SamplesScored, events.RolloutMeasured, events.TimeSpent, events.FirstStepSeen)
"""Events that are not written: they only hold samples, metrics, spans or facts for the checks of step 1."""
ELSEWHERE = ("metrics", "samples", "tasks", "config", "summary", "evidence")
"""Fields of events that are left out of `events.jsonl`, because other files of the run directory hold them."""
WARNINGS = (
    events.RoleFailed, events.RolledBack, events.RunRestarted, events.WorkRetried, events.GuardFired,
    events.EventsDropped,
)  # fmt: skip
PRINTED = ("warning", "error", "critical")
CONTROLLER = "controller"
LONGEST_FACT = 120
"""Characters of a list or table that a line for people shows; `relax logs --json` prints the whole."""


class EventLog:
    """The writer of a run's events, without secrets; threads may share it.

    A file that cannot be written is reported once on stderr and never stops the run.
    """

    def __init__(
        self, run_dir: Path, redactor: Redactor, *, wall: Callable[[], float] = time.time, stderr: bool = True
    ) -> None:
        self._path, self._redactor, self._wall, self._stderr = run_dir / EVENTS, redactor, wall, stderr
        self._file: AppendOnlyFile | None = None
        self._broken = False
        self._one_at_a_time = threading.Lock()

    def write(self, event: Event) -> dict[str, object] | None:
        """Write an event to the file, and to stderr if it is a warning or an error; return its record, if any."""
        if isinstance(event, UNWRITTEN):
            return None
        ends_run = isinstance(event, events.RoleFailed) and event.fatal  # the command prints this error
        warns = isinstance(event, WARNINGS) or (
            isinstance(event, events.FirstStepChecked) and bool(_failed(event.checks))
        )
        level = "error" if ends_run else "warning" if warns else "info"
        facts = {field.name: getattr(event, field.name) for field in fields(event) if field.name not in ELSEWHERE}
        record = {
            "schema": "relax.event/1",
            "time": datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="milliseconds"),
            "level": level,  # a `Logged` event brings its own
            "event": event_name(type(event)),
            **{name: str(value) if isinstance(value, Version) else value for name, value in facts.items()},
        }
        clean = self._redactor.document(record)
        with self._one_at_a_time:
            try:
                if self._file is None:
                    self._file = AppendOnlyFile(self._path, whole_lines)
                self._file.append((encode(clean) + "\n").encode("utf-8", errors="backslashreplace"))
            except InfrastructureError as error:
                if not self._broken:
                    _say(f"relax: {EVENTS} is not written: {error}")
                self._broken = True
        if self._stderr and clean["level"] in PRINTED and not ends_run:
            _say(human_line(clean))
        return clean

    def note(self, level: str, message: str, /, **facts: Any) -> None:
        """Write a message of the controller."""
        self.write(events.Logged(level, CONTROLLER, message, facts))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def event_name(kind: type) -> str:
    """Return the name of a type of event in `events.jsonl`: `role failed` for `RoleFailed`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()


_KINDS: Mapping[str, type[Event]] = {event_name(kind): kind for kind in get_args(Event)}


def recorded_event(record: Mapping[str, Any]) -> Event:
    """Return the event of a record of `events.jsonl`, without the content that other files have."""
    kind = _KINDS[record["event"]]
    known = {field.name for field in fields(kind)}
    facts: dict[str, Any] = {name: {} for name in known.intersection(ELSEWHERE) - {"samples"}}
    facts |= {name: value for name, value in record.items() if name in known}
    if "version" in facts:
        model, _, numbers = facts["version"].rpartition("@")
        facts["version"] = Version(model, *map(int, numbers.split(".")))
    return kind(**facts)


def human_line(record: dict[str, Any]) -> str:
    """Format a record as one line for people."""
    who, what, facts = CONTROLLER, record["event"], record
    if what == "logged":
        who, what, facts = record["role"], record["message"], record["fields"]
    elif what == event_name(events.FirstStepChecked):
        failed = _failed(record["checks"])
        what = f"step {record['step']} passed its checks"
        if failed:
            what = (
                f"step {record['step']} failed {len(failed)} of its checks, which `relax why` explains: "
                f"{', '.join(failed)}"
            )
        facts = {}
    shown = {key: value for key, value in facts.items() if key not in ("schema", "time", "level", "event")}
    extras = " ".join(f"{key}={brief(value)}" for key, value in shown.items() if value not in ("", None))
    line = f"{record['time'][11:19]} {record['level']:<7} {who}: {what}"
    return f"{line}  {extras}" if extras else line


def brief(value: Any) -> str:
    """Return a fact of a record for people: floats with 4 digits, long lists and tables cut; texts stay whole."""
    if isinstance(value, str):
        return value
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST_FACT else f"{text[:LONGEST_FACT]}..."


def _failed(checks: Iterable[Mapping[str, str]]) -> list[str]:
    return [check["name"] for check in checks if check["state"] == "failed"]


def _say(line: str) -> None:
    # sys.stderr is looked up for each line because a live display may replace it. A closed stderr is ignored.
    with contextlib.suppress(OSError, ValueError):
        print(printable(line), file=sys.stderr)
