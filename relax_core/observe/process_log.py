# SPDX-License-Identifier: Apache-2.0
"""The records of one process: `logs/<process>.jsonl` of a run directory, which `relax logs` reads.

A record is one JSON line: `schema`, `time`, `level`, `run`, `process`, `message`, and where they are known `role`, `pid`,
`logger`, `error` (a traceback), `fields` (the `extra` of a logging call) and the fields that `bound` adds, such as `step`,
`group` and `sample`. Everything that a library or a plugin passes to the module `logging` becomes a record, and so does
the plain output of a child process.

A child process may not write to the run directory. It sends its records to its parent as lines of its standard error that
begin with MARK (as in RFC 7464), and the parent writes them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relax_core.observe.files import encode
from relax_core.observe.redaction import Redactor

SCHEMA = "relax.log/1"
SUFFIX = ".jsonl"
LEVELS = ("debug", "info", "warning", "error", "critical")
MARK = "\x1e"
LONGEST_TEXT = 8192
"""Characters of a message, a traceback or the fields that a record keeps. `logs/<process>.log` has the whole output."""
QUIET = ("httpx",)
"""Loggers that report each request at level `info`. Only their warnings are recorded."""
BOUND = ("role", "step", "group", "task", "sample")
"""Names of the fields that `bound` adds."""
_SCALARS = (str, int, float)
_TEXTS = ("time", "logger", "error")
_NO_EXTRA = frozenset(vars(logging.makeLogRecord({})) | {"message": "", "asctime": "", "taskName": ""})
"""Attributes of every record of `logging`; all further attributes are the `extra` of the call."""
_BEGINS = re.compile(
    r"^(?:[(\[][^)\]\n]{0,200}[)\]]:? ?|[\d/T-]+[ ,][\d:.,]+ )*"
    r"(?:(?P<word>TRACE|DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b"
    r"|(?P<letter>[DIWEF])\d{4} \d\d:"
    r"|(?P<traceback>Traceback \(most recent call last\):)"
    r"|(?P<warning>[^\s:]{1,300}:\d+: \w{0,40}Warning:))",
    re.MULTILINE,
)
"""Lines of output that begin a record: the formats of logging, vLLM, Ray and glog, Python's tracebacks and warnings."""
_OUTPUT_LEVELS = {
    "TRACE": "debug", "DEBUG": "debug", "D": "debug", "INFO": "info", "I": "info", "WARN": "warning",
    "WARNING": "warning", "W": "warning", "ERROR": "error", "E": "error", "CRITICAL": "critical", "FATAL": "critical",
    "F": "critical",
}  # fmt: skip

_bound: ContextVar[Mapping[str, Any]] = ContextVar("log_fields", default={})  # noqa: B039 the mapping never changes


def bound_fields() -> dict[str, Any]:
    """Return the fields that are bound in this task or thread."""
    return dict(_bound.get())


def bind(**fields: Any) -> None:
    """Add fields to every record that this task makes from now on."""
    _bound.set({**_bound.get(), **fields})


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Add fields to every record that the body and the tasks that it starts make; inner values replace outer ones."""
    token = _bound.set({**_bound.get(), **fields})
    try:
        yield
    finally:
        _bound.reset(token)


def timestamp(seconds: float) -> str:
    """Return seconds since 1970 as the time of a record."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class RecordHandler(logging.Handler):
    """A handler of the module `logging` that passes each record as plain data to `write`."""

    def __init__(self, write: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(_described(record))
        except RecursionError:
            raise
        except Exception:  # a message whose arguments do not fit its format
            self.handleError(record)


def _described(record: logging.LogRecord) -> dict[str, Any]:
    number = min(max(record.levelno, logging.DEBUG), logging.CRITICAL) // 10 - 1
    found: dict[str, Any] = {
        "time": timestamp(record.created),
        "level": LEVELS[number],
        "pid": os.getpid(),
        **_bound.get(),
    }
    found |= {"logger": record.name, "message": shortened(record.getMessage())}
    if record.exc_info and record.exc_info[1] is not None:
        found["error"] = shortened("".join(traceback.format_exception(record.exc_info[1])), keep_end=True)
    if extra := {name: value for name, value in vars(record).items() if name not in _NO_EXTRA and name[0] != "_"}:
        fields = {name: value if isinstance(value, _SCALARS) else str(value) for name, value in extra.items()}
        found["fields"] = fields if len(encode(fields)) <= LONGEST_TEXT else {"left_out": ", ".join(extra)}
    return found


def shortened(text: str, keep_end: bool = False) -> str:
    """Return text of at most about LONGEST_TEXT characters, and the number of characters left out."""
    left_out = len(text) - LONGEST_TEXT
    if left_out <= 0:
        return text
    note = f"... ({left_out} characters left out)"
    return f"{note}\n{text[-LONGEST_TEXT:]}" if keep_end else f"{text[:LONGEST_TEXT]}{note}"


@contextmanager
def captured(write: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Pass all records of `logging` in this process to `write` while the body runs.

    Loggers that keep their records from the root logger, such as Ray's, pass theirs too. A program that has configured
    `logging` keeps its handlers and its level. Otherwise the level becomes `info`, and warnings are printed on standard
    error as before.
    """
    root, before = logging.getLogger(), logging.getLogger().level
    handlers: list[logging.Handler] = [RecordHandler(write)]
    quiet = [logger for logger in map(logging.getLogger, QUIET) if logger.level == logging.NOTSET]
    if not root.handlers:
        root.setLevel(logging.INFO)
        handlers += [logging.lastResort] if logging.lastResort is not None else []
        for logger in quiet:
            logger.setLevel(logging.WARNING)
    for handler in handlers:
        root.addHandler(handler)
    apart = [one for one in root.manager.loggerDict.values() if isinstance(one, logging.Logger) and not one.propagate]
    for logger in apart:
        logger.addHandler(handlers[0])
    try:
        yield
    finally:
        for logger in apart:
            logger.removeHandler(handlers[0])
        for handler in handlers:
            root.removeHandler(handler)
        if len(handlers) > 1:
            root.setLevel(before)
            for logger in quiet:
                logger.setLevel(logging.NOTSET)


def record_process(log: ProcessLog | None) -> None:
    """Pass all records of `logging` in this process to its log until the process ends, beginning with its start."""
    if log is None:
        return
    output = os.readlink("/proc/self/fd/1") if os.path.exists("/proc/self/fd/1") else ""
    where = f"; output: {output}" if output.startswith("/") else ""
    log.write({"level": "info", "pid": os.getpid(), "message": f"process {os.getpid()} starts{where}"})
    _for_ever.enter_context(captured(log.write))


_for_ever = ExitStack()


def send_to_parent() -> None:
    """Send all records of `logging` and all warnings of this process to its parent, as marked lines of standard error."""

    def write(record: Mapping[str, Any]) -> None:
        data = memoryview(f"{MARK}{encode(record)}\n".encode(errors="backslashreplace"))
        with suppress(OSError):  # the parent has ended
            while data:
                data = data[os.write(2, data) :]

    root = logging.getLogger()
    root.addHandler(RecordHandler(write))
    root.setLevel(logging.INFO)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)


class ProcessLog:
    """The file of one process's records, without secrets; threads may share it.

    A file that can't be written never stops the process; the records are then lost.
    """

    def __init__(
        self, path: Path, redactor: Redactor, about: Mapping[str, Any], wall: Callable[[], float] = time.time
    ) -> None:
        """`about`: the fields of every record: `run`, `process`, and `role` if the process belongs to one."""
        self._path, self._redactor, self._about, self._wall = path, redactor, dict(about), wall
        self._file: int | None = None
        self._one_at_a_time = threading.Lock()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; `about` replaces fields of the same name."""
        clean = self._redactor.value({"schema": SCHEMA, "time": timestamp(self._wall()), **record, **self._about})
        data = f"{encode(clean)}\n".encode(errors="backslashreplace")
        with self._one_at_a_time, suppress(OSError):
            if self._file is None:
                self._file = _opened(self._path)
            os.write(self._file, data)

    def output(self, text: str) -> str:
        """Append records of a child's output, marked or plain; return the output as text for people."""
        plain_text, *marked = text.split(MARK)
        shown = [plain_text]
        self._plain(plain_text)
        for piece in marked:
            line, _, rest = piece.partition("\n")
            record = _received(line)
            if record is None:
                rest = piece
            else:
                self.write(record)
                shown.append(_readable(record))
            self._plain(rest)
            shown.append(rest)
        return "".join(shown)

    def _plain(self, text: str) -> None:
        """Append a record for each part of plain output that begins like a line of a log, or like a traceback."""
        parts, start, level = [], 0, "info"
        for begin in _BEGINS.finditer(text):
            parts.append((level, text[start : begin.start()]))
            word = begin["word"] or begin["letter"]
            level = _OUTPUT_LEVELS[word] if word else "error" if begin["traceback"] else "warning"
            start = begin.start()
        parts.append((level, text[start:]))
        for level, part in parts:
            if message := part.strip("\n"):
                self.write({"level": level, "message": shortened(message, keep_end=level == "error")})

    def close(self) -> None:
        with self._one_at_a_time:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def _opened(path: Path) -> int:
    """Open a file of records for appending. A line that a killed process left unfinished is ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.fchmod(file, 0o600)
    if (size := os.fstat(file).st_size) and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file


def _received(line: str) -> dict[str, Any] | None:
    """Return the record of a marked line, with known fields only, since the child may be hostile; else None."""
    try:
        sent = json.loads(line)
        datetime.fromisoformat(sent["time"])
        record: dict[str, Any] = {
            "level": LEVELS[LEVELS.index(sent["level"])],
            "message": shortened(str(sent["message"])),
        }
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    record |= {name: sent[name] for name in _TEXTS if isinstance(sent.get(name), str)}
    record |= {name: sent[name] for name in (*BOUND, "pid") if isinstance(sent.get(name), int | str)}
    if isinstance(fields := sent.get("fields"), dict):
        record["fields"] = {name: value for name, value in fields.items() if isinstance(value, _SCALARS)}
    return record


def _readable(record: Mapping[str, Any]) -> str:
    lines = [f"{record['level']} {record.get('logger', '')}: {record['message']}", record.get("error", "").rstrip("\n")]
    return "".join(f"{line}\n" for line in lines if line)
