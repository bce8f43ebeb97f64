# SPDX-License-Identifier: Apache-2.0
"""The log of a run: its events and the records of all its processes, in order of time. Reading never affects the run."""

from __future__ import annotations

import heapq
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError
from relax_core.observe.event_log import CONTROLLER, EVENTS, brief, human_line
from relax_core.observe.process_log import BOUND, LEVELS, SCHEMA
from relax_core.observe.records import whole_lines
from relax_core.views.run import RunHealth, RunView, health, process_of

BLOCK_BYTES = 1 << 20
LOOK_S = 0.2
REMARKS = "relax.log-remarks/1"
"""Schema of the last line of a log that a control API sends."""
LAST_RECORDS_S = 60.0
"""Seconds that a follower waits for the process of an ended run, which writes its last records."""
_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class LogFilter:
    """The records to show."""

    roles: Collection[str] = ()
    """Roles or processes; empty: all."""
    level: str = "debug"
    """The lowest level."""
    since: str = ""
    """Time of the earliest record, in the format of records; empty: the begin of the run."""
    step: int | None = None

    def __contains__(self, record: Mapping[str, Any]) -> bool:
        return (
            record["time"] >= self.since
            and LEVELS.index(record["level"]) >= LEVELS.index(self.level)
            and (self.step is None or record.get("step") == self.step)
            and (not self.roles or not {source_of(record), str(record.get("process"))}.isdisjoint(self.roles))
        )


def log_filter(roles: Collection[str], level: str, since: str, step: int | None, wall: float) -> LogFilter:
    """Return the filter of `relax logs` with these options at wall-clock time `wall`. Raises ConfigError."""
    if level not in LEVELS:
        raise ConfigError("--level", level, f"use one of {', '.join(LEVELS)}")
    return LogFilter(roles, level, parsed_since(since, wall), step)


def parsed_since(text: str, wall: float) -> str:
    """Return the time of the earliest record: `text` is an age such as `10m`, or a time in UTC. Raises ConfigError."""
    if not text:
        return ""
    if age := _AGE.fullmatch(text):
        found = datetime.fromtimestamp(max(wall - float(age[1]) * _SECONDS[age[2]], 0.0), UTC)
    else:
        try:
            found = datetime.fromisoformat(text)
            found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
        except (ValueError, OverflowError):
            fix = "give an age such as 30s, 10m, 2h or 1d, or a time such as 2026-11-27T10:45"
            raise ConfigError("--since", text, fix) from None
    return found.isoformat(timespec="milliseconds")


class RunLogs:
    """The records that were added to a run's files since the last call, in order of time.

    Invariants:
    - Each record is returned once, when its line is complete.
    - Lines that are not records are counted and left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[Path, _File] = {}

    def added(self) -> Iterator[dict[str, object]]:
        """Yield the added records; the first call yields all."""
        for pattern in (EVENTS, "logs/*.jsonl", "stages/*/logs/*.jsonl"):
            for path in sorted(self._path.glob(pattern)):
                self._files.setdefault(path, _File(path))
        yield from heapq.merge(*(file.added() for file in self._files.values()), key=lambda record: str(record["time"]))

    def has_processes(self) -> bool:
        """Return True if the run has records of processes, which a run of an earlier version lacks."""
        return any(path.name != EVENTS for path in self._files)

    def outputs(self) -> list[str]:
        """Return the names of the files with the plain output of processes."""
        found = [*self._path.glob("logs/*.log"), *self._path.glob("stages/*/logs/*.log")]
        return sorted(str(path.relative_to(self._path)) for path in found)

    def problems(self, over: bool) -> list[str]:
        """Describe the lines that could not be read. `over`: the run has ended, so an unfinished line stays unfinished."""
        return [
            f"{path.relative_to(self._path)}: {problem}"
            for path, file in self._files.items()
            for problem in file.problems(over)
        ]


class _File:
    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._bad, self._unfinished, self._error = 0, 0, ""

    def added(self) -> Iterator[dict[str, object]]:
        size = BLOCK_BYTES
        while True:
            try:
                with self._path.open("rb") as file:  # not kept open: a run may have more processes than open files
                    file.seek(self._read)
                    data = file.read(size)
            except OSError as error:
                self._error = error.strerror or "an error"
                return
            whole = whole_lines(data)
            if not whole and len(data) == size:
                size *= 2
                continue
            self._read += whole
            self._unfinished = len(data) - whole
            if not whole:
                return
            for line in data[:whole].split(b"\n")[:-1]:
                if (record := parsed_record(line)) is not None:
                    yield record
                elif line:
                    self._bad += 1

    def problems(self, over: bool) -> list[str]:
        found = [f"it can't be read ({self._error})"] if self._error else []
        found += [f"{self._bad} of its lines are not records and are left out"] if self._bad else []
        return [*found, "its last line is cut off and left out"] if self._unfinished and over else found


def parsed_record(line: bytes) -> dict[str, object] | None:
    """Return the record of a line that has all fields of a record, else None."""
    try:
        found: dict[str, Any] = json.loads(line)
        datetime.fromisoformat(found["time"])
        LEVELS.index(found["level"])
        readable_record(found)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return found


def source_of(record: Mapping[str, Any]) -> str:
    """Return the role of a record; records of no role are the controller's."""
    return str(record.get("role") or CONTROLLER)


def readable_record(record: Mapping[str, Any]) -> str:
    """Return a record as text for people: a line, and the further lines of a message or traceback."""
    if record.get("schema") != SCHEMA:
        return human_line(dict(record))
    process, role = str(record["process"]), source_of(record)
    who = process if process == role else f"{role}/{process}"
    fields = {name: record[name] for name in BOUND[1:] if name in record} | dict(record.get("fields") or {})
    facts = "".join(f"  {name}={brief(value)}" for name, value in fields.items())
    first, *more = str(record["message"]).splitlines() or [""]
    text = f"{record['time'][11:19]} {record['level']:<7} {who}: {first}{facts}"
    return "\n".join([text, *more, *str(record.get("error", "")).splitlines()])


def follow(
    view: RunView, logs: RunLogs, sleep: Callable[[float], None] = time.sleep, now: Callable[[], float] = time.time
) -> Iterator[dict[str, object]]:
    """Yield the records of a run as they are written, until the run has ended or is lost."""
    for records, over in looks(view, logs, now):
        yield from records
        if not over:
            sleep(LOOK_S)


def looks(
    view: RunView, logs: RunLogs, now: Callable[[], float] = time.time
) -> Iterator[tuple[Iterator[dict[str, object]], bool]]:
    """Yield the records that each look at the run's files finds, and True at the last look.

    The last look comes when the run has ended or is lost. The caller waits between two looks.
    """
    deadline = math.inf
    while True:
        state = health(view, now())  # read first: a run writes its last records before it writes its end
        if state.ended:
            deadline = min(deadline, now() + LAST_RECORDS_S)
        over = is_over(state) and (not process_of(view) or now() >= deadline)
        yield logs.added(), over
        if over:
            return


def is_over(state: RunHealth) -> bool:
    """Return True if a run writes no more records unless a person resumes it."""
    return state.ended or state.state == "lost"


def chosen(records: Iterable[dict[str, object]], wanted: LogFilter, sources: set[str]) -> Iterator[dict[str, object]]:
    """Yield the wanted records; add the roles and processes of all records to `sources`."""
    for record in records:
        sources |= {source_of(record), str(record.get("process") or source_of(record))}
        if record in wanted:
            yield record


def remarks(view: RunView, logs: RunLogs, wanted: LogFilter, sources: Collection[str], followed: bool) -> Iterator[str]:
    """Yield sentences about what is missing, damaged or still to come."""
    state = health(view, time.time())
    over = is_over(state)
    if missing := sorted(set(wanted.roles).difference(sources)):
        yield f"no record of {' and '.join(missing)}; there are records of {', '.join(sorted(sources)) or 'no role'}"
    if not logs.has_processes():
        if over:
            yield f"{view.name} has no records of its processes, as runs of earlier versions of Relax; its events are shown"
        elif not sources:
            yield f"{view.name} has logged nothing yet; with --follow, this command waits for records"
    yield from logs.problems(over)
    if outputs := logs.outputs():
        yield f"plain output of processes: {view.path / 'logs'} ({', '.join(outputs)})"
    if state.state == "lost":
        yield f"{view.name}: {state.detail}"
    elif not over and not followed:
        yield f"{view.name} is {state.state}; --follow shows further records"
