# SPDX-License-Identifier: Apache-2.0
"""The records of one process: `logs/<process>.jsonl` of a run directory, which `relax logs` reads.

A record is one JSON line: `schema`, `time`, `level`, `run`, `process`, `message`, and where they are known `role`, `pid`,
`logger`, `error` (a traceback), `fields` (the `extra` of a logging call, or the keywords of a structlog call) and the work's
fields, which `structlog.contextvars` binds: `step`, `group`, `task` and `sample`. Everything that a library or a plugin
passes to `logging` or structlog becomes a record, and so does the plain output of a child process.

A child process may not write to the run directory. It sends its records to its parent as lines of its standard error that
begin with MARK (as in RFC 7464), and the parent writes them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

if "rich" not in sys.modules and threading.active_count() == 1:
    sys.modules["rich"] = None  # type: ignore[assignment]  # structlog would import rich: 0.2 s in each process of a run
    import structlog  # noqa: F401

    del sys.modules["rich"]
from structlog import configure, is_configured, reset_defaults
from structlog.contextvars import bind_contextvars, get_contextvars
from structlog.processors import JSONRenderer, format_exc_info
from structlog.stdlib import BoundLogger, ExtraAdder, LoggerFactory, ProcessorFormatter, render_to_log_args_and_kwargs
from structlog.typing import EventDict, Processor

from relax_core.observe.files import encode
from relax_core.observe.redaction import Redactor, credentials

SCHEMA = "relax.log/1"
SUFFIX = ".jsonl"
LEVELS = ("debug", "info", "warning", "error", "critical")
MARK = "\x1e"
LONGEST_TEXT = 8192
"""Characters of a message, a traceback or the fields that a record keeps. `logs/<process>.log` has the whole output."""
QUIET = ("httpx",)
"""Loggers that report each request at level `info`. Only their warnings are recorded."""
BOUND = ("role", "step", "group", "task", "sample")
"""Names of the work's fields, in the order of a record."""
_work = copy_context().run(bind_contextvars, relax_work={})["relax_work"].var
"""structlog's variable of the work's fields. One variable for all fields is set in a third of the time of five."""
_SCALARS = (str, int, float)
_for_ever = ExitStack()
_line = JSONRenderer(lambda record, default: encode(record))
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
    "T": "debug",
    "D": "debug",
    "I": "info",
    "W": "warning",
    "E": "error",
    "C": "critical",
    "F": "critical",
}
"""Levels of such lines by the first letter of their word."""


def bound_fields() -> dict[str, object]:
    """Return the work's fields that are bound in this task or thread."""
    fields = _work.get()
    return {} if fields is ... else dict(fields)  # structlog's default is `...`


def bind(**fields: Any) -> None:
    """Add fields to every record that this task makes from now on."""
    _work.set({**bound_fields(), **fields})


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Add fields to every record that the body and the tasks that it starts make; inner values replace outer ones."""
    token = _work.set({**bound_fields(), **fields})
    try:
        yield
    finally:
        _work.reset(token)


def timestamp(seconds: float) -> str:
    """Return seconds since 1970 as the time of a record."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _passed_on(logger: Any, method: str, event: EventDict) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of the call of `logging` for an event of structlog; `logging` refuses some names in `extra`."""
    event.setdefault("event", "")
    args, keywords = render_to_log_args_and_kwargs(logger, method, event)
    return args, {**keywords, "extra": {"_structlog": keywords.get("extra", {})}}


def _described(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Return an event of `logging` as a record."""
    origin, context = (
        event["_record"],
        {name: value for name, value in get_contextvars().items() if name != "relax_work"},
    )
    level = LEVELS[min(max(origin.levelno, logging.DEBUG), logging.CRITICAL) // 10 - 1]
    record = {"time": timestamp(origin.created), "level": level, "pid": os.getpid()}
    work = bound_fields()
    record |= {name: work[name] for name in BOUND if name in work}
    record |= {"logger": origin.name, "message": event["event"]}
    if "exception" in event:
        record["error"] = f"{event['exception']}\n"
    extra = ExtraAdder()(_logger, _method, {"_record": origin}).items()
    own = {name: value for name, value in extra if name[:1] != "_" and name not in ("message", "asctime")}
    if fields := {**context, **own, **getattr(origin, "_structlog", {})}:
        record["fields"] = fields
    return record


def _limited(redactor: Redactor, _logger: Any, _method: str, record: EventDict) -> EventDict:
    """Shorten the texts of a record, and turn its fields into plain values."""
    record["message"] = shortened(record["message"])
    if "error" in record:
        record["error"] = shortened(record["error"], keep_end=True)
    if fields := record.get("fields"):
        flat = {key: each if isinstance(each, _SCALARS) else redactor.text(str(each)) for key, each in fields.items()}
        record["fields"] = flat if len(encode(flat)) <= LONGEST_TEXT else {"left_out": ", ".join(fields)}
    return record


def shortened(text: str, keep_end: bool = False) -> str:
    """Return text of at most about LONGEST_TEXT characters, and the number of characters left out."""
    left_out = len(text) - LONGEST_TEXT
    if left_out <= 64:  # a text that has been shortened has such a note
        return text
    note = f"... ({left_out} characters left out)"
    return f"{note}\n{text[-LONGEST_TEXT:]}" if keep_end else f"{text[:LONGEST_TEXT]}{note}"


@contextmanager
def captured(stream: Any, processors: Sequence[Processor], mark: str = "") -> Iterator[None]:
    """Write all records of `logging` and structlog in this process to a stream while the body runs.

    Loggers that keep their records from the root logger, such as Ray's, pass theirs too. A program that has configured
    `logging` keeps its handlers and its level, and a program that has configured structlog keeps its configuration.
    Otherwise the level becomes `info`, and warnings are printed on standard error as before. `mark` begins each line of
    a stream to the parent, which decides what is printed.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(stream)]
    chain: list[Processor] = [format_exc_info, _described, *processors]
    handlers[0].setFormatter(ProcessorFormatter(processors=chain, fmt=f"{mark}%(message)s"))
    configured = is_configured()
    if not configured:
        configure([_passed_on], BoundLogger, logger_factory=LoggerFactory())
    root, before = logging.getLogger(), logging.getLogger().level
    quiet = [logger for logger in map(logging.getLogger, QUIET) if logger.level == logging.NOTSET]
    bare = bool(mark) or not root.handlers
    if bare:
        root.setLevel(logging.INFO)
        handlers += [logging.lastResort] if logging.lastResort is not None and not mark else []
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
        if bare:
            root.setLevel(before)
            for logger in quiet:
                logger.setLevel(logging.NOTSET)
        if not configured:
            reset_defaults()


def record_process(log: ProcessLog | None) -> None:
    """Pass all records of this process to its log until the process ends, beginning with its start."""
    if log is None:
        return
    output = os.readlink("/proc/self/fd/1") if os.path.exists("/proc/self/fd/1") else ""
    where = f"; output: {output}" if output.startswith("/") else ""
    log.append({"level": "info", "pid": os.getpid(), "message": f"process {os.getpid()} starts{where}"})
    _for_ever.enter_context(captured(log, log.processors))


def send_to_parent() -> None:
    """Send all records and warnings of this process to its parent, as marked lines of standard error."""
    logging.captureWarnings(True)
    stream = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115 open to the end
    redactor = Redactor(credentials(os.environ))
    _for_ever.enter_context(captured(stream, (redactor, partial(_limited, redactor), _line), MARK))


class ProcessLog:
    """The file of one process's records, without secrets; threads may share it.

    A file that can't be written never stops the process; the records are then lost.
    """

    def __init__(
        self, path: Path, redactor: Redactor, about: Mapping[str, Any], wall: Callable[[], float] = time.time
    ) -> None:
        """`about`: the fields of every record: `run`, `process`, and `role` if the process belongs to one."""

        def complete(_logger: Any, _method: str, record: EventDict) -> EventDict:
            return {"schema": SCHEMA, "time": timestamp(wall()), **record, **about}

        self._path = path
        self.processors: tuple[Processor, ...] = (complete, redactor, partial(_limited, redactor), _line)
        """Processors that make a record a line; `redactor` comes before a limit could cut a secret in two."""
        self._file: int | None = None
        self._one_at_a_time = threading.Lock()

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record; `about` replaces fields of the same name."""
        line: Any = record
        for processor in self.processors:
            line = processor(None, "", line)
        self.write(f"{line}\n")

    def write(self, text: str) -> None:
        """Append whole lines, as a stream of `logging`."""
        with self._one_at_a_time, suppress(OSError):
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                os.fchmod(self._file, 0o600)
                if (size := os.fstat(self._file).st_size) and os.pread(self._file, 1, size - 1) != b"\n":
                    os.write(self._file, b"\n")  # a killed process left its last line unfinished
            os.write(self._file, text.encode(errors="backslashreplace"))

    def output(self, text: str) -> str:
        """Append records of a child's output, marked or plain; return the output as text for people."""
        shown = []
        for number, piece in enumerate(text.split(MARK)):
            line, _, rest = piece.partition("\n")
            if number and (record := _received(line)) is not None:
                self.append(record)
                head = f"{record['level']} {record.get('logger', '')}: {record['message']}"
                shown += [f"{text}\n" for text in (head, record.get("error", "").rstrip("\n")) if text]
            else:
                rest = piece
            self._plain(rest)
            shown.append(rest)
        return "".join(shown)

    def _plain(self, text: str) -> None:
        """Append a record for each part of plain output that begins like a line of a log, or like a traceback."""
        start, level = 0, "info"
        for begin in (*_BEGINS.finditer(text), None):
            end = begin.start() if begin else len(text)
            if message := text[start:end].strip("\n"):
                self.append({"level": level, "message": shortened(message, keep_end=level == "error")})
            if begin:
                word = begin["word"] or begin["letter"]
                start, level = end, "error" if begin["traceback"] else _OUTPUT_LEVELS[word[0]] if word else "warning"

    def close(self) -> None:
        with self._one_at_a_time:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def _received(line: str) -> dict[str, Any] | None:
    """Return the record of a marked line, with known fields only, since the child may be hostile; else None."""
    try:
        sent = json.loads(line)
        datetime.fromisoformat(sent["time"])
        record: dict[str, Any] = {"level": LEVELS[LEVELS.index(sent["level"])], "message": str(sent["message"])}
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    record |= {name: sent[name] for name in ("time", "logger", "error") if isinstance(sent.get(name), str)}
    record |= {name: sent[name] for name in (*BOUND, "pid") if isinstance(sent.get(name), int | str)}
    if isinstance(fields := sent.get("fields"), dict):
        record["fields"] = {name: value for name, value in fields.items() if isinstance(value, _SCALARS)}
    return record
