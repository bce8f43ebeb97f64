# SPDX-License-Identifier: Apache-2.0
"""The log: JSON lines in `logs/<role>.jsonl`, and readable lines on stderr from a chosen level. Secrets reach neither.

Loggers are made here and passed on; structlog's global configuration is left alone. A log that can't be written is said
once on stderr and never stops a run.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

from relax_core.api.errors import InfrastructureError
from relax_core.observe.document import encode
from relax_core.observe.journal import Journal, whole_lines
from relax_core.observe.redaction import Redactor

LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_OWN = ("schema", "time", "level", "role", "event")
Now = Callable[[], datetime]


def _utc() -> datetime:
    return datetime.now(UTC)


class RoleLog:
    """The log of one role (or of the controller): a file, stderr, and a structlog logger in front of both."""

    def __init__(
        self, directory: Path, role: str, *, level: str = "warning", redactor: Redactor | None = None, now: Now = _utc
    ) -> None:
        self.role, self._now = role, now
        self.path = directory / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', role)}.jsonl"
        self._level = LEVELS.get(level, 30)
        self._redactor = redactor or Redactor()
        self._journal: Journal | None = None
        self._broken = False
        self._one_at_a_time = threading.Lock()
        self.logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
            self,
            processors=[structlog.processors.add_log_level, structlog.processors.format_exc_info, self._finish],
            wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        )

    def write(self, level: str, message: str, /, **fields: Any) -> None:
        """One record, also for a `Logged` event of another process."""
        clean = self.keep(level, message, **fields)
        if LEVELS.get(level, 20) >= self._level:
            _say(human_line(clean))

    def keep(self, level: str, message: str, /, **fields: Any) -> dict[str, Any]:
        """The same, in the file alone: for what a person is told elsewhere. Returns the record as it was written."""
        record = {
            "schema": "relax.log/1",
            "time": self._now().isoformat(timespec="milliseconds"),
            "level": level,
            "role": self.role,
            "event": message,
            **{f"{key}_" if key in _OWN else key: value for key, value in fields.items()},
        }
        clean: dict[str, Any] = self._redactor.value(record)
        with self._one_at_a_time:
            self._to_file(encode(clean))
        return clean

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _finish(self, _logger: WrappedLogger, _method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
        # structlog calls the wrapped logger's method with what the last processor returns.
        level, message = str(event.pop("level", "info")), str(event.pop("event", ""))
        return (message,), {"level": level, **event}

    def _take(self, message: str, /, *, level: str = "info", **fields: Any) -> None:
        self.write(level, message, **fields)

    debug = info = warning = error = critical = msg = _take

    def _to_file(self, line: str) -> None:
        try:
            if self._journal is None:
                self._journal = Journal(self.path, whole_lines)
            self._journal.append((line + "\n").encode("utf-8", errors="backslashreplace"))
        except InfrastructureError as error:
            if not self._broken:
                _say(f"relax: the log is not written: {error}")
            self._broken = True


class LibraryLogs(logging.Handler):
    """Brings what libraries log through the standard module into a role's log."""

    def __init__(self, log: RoleLog, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            message = str(record.msg)
        self._log.write(record.levelname.lower(), message, library=record.name)


def _say(line: str) -> None:
    # Looked up each time: a live display takes stderr's place. Where stderr is closed there is nobody to tell.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr)


def human_line(record: dict[str, Any]) -> str:
    """A record as one line for people."""
    extras = " ".join(f"{key}={value}" for key, value in record.items() if key not in _OWN and value not in ("", None))
    clock = str(record["time"])[11:19]
    line = f"{clock} {record['level']:<7} {record['role']}: {record['event']}"
    return f"{line}  {extras}" if extras else line
