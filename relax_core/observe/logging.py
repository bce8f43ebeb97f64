# SPDX-License-Identifier: Apache-2.0
"""The log: JSON lines in `logs/<role>.jsonl`, and readable lines on stderr from a chosen level, both without secrets.

Loggers are made here and passed on; structlog's global configuration stays unchanged. A log that cannot be written is
reported once on stderr and never stops a run. The configuration passes resolved secrets to a `Redactor`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

from relax_core.api.errors import InfrastructureError, printable
from relax_core.observe.files import encode
from relax_core.observe.records import AppendOnlyFile, whole_lines

HIDDEN = "[redacted]"
_KEY = re.compile(
    r"(^|[_-])(secret|password|passwd|token|api_?key|access_?key|authorization|credentials?)$", re.IGNORECASE
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{8,}=*"
    r"|(?<=://)[^/\s:@\"]+:[^/\s@\"]+(?=@)"
)
_SHORTEST = 4
"""Smallest length of a redacted value; redacting shorter values would hide ordinary words."""


class Redactor:
    """Redaction of secrets in text and nested values: known values, strings under secret keys, and token formats."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._known: re.Pattern[str] | None = None
        self._values: set[str] = set()
        self.add(secrets)

    def add(self, secrets: Iterable[str]) -> None:
        """Add secret values to redact, both as plain text and as JSON escapes them."""
        for secret in secrets:
            if len(secret) >= _SHORTEST:
                self._values |= {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
        longest_first = sorted(self._values, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def text(self, text: str) -> str:
        """Return the text without known secret values and strings in the format of an access token."""
        return _SHAPES.sub(HIDDEN, self.known(text))

    def known(self, text: str) -> str:
        """Return the text without known secret values. Keep strings that only have the format of a secret."""
        return self._known.sub(HIDDEN, text) if self._known else text

    def value(self, value: Any) -> Any:
        """Return a nested value without secrets; strings under keys such as `api_key` are redacted whole."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self._entry(str(key), inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.value(inner) for inner in value]
        return value

    def _entry(self, key: str, value: Any) -> Any:
        return HIDDEN if isinstance(value, str) and value and _KEY.search(key) else self.value(value)


def credentials(environment: Mapping[str, str]) -> list[str]:
    """Return the values of environment variables whose names look like credentials."""
    return [value for name, value in environment.items() if _KEY.search(name) and len(value) >= 2 * _SHORTEST]


LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_OWN = ("schema", "time", "level", "role", "event")
Now = Callable[[], datetime]


def _utc() -> datetime:
    return datetime.now(UTC)


class RoleLog:
    """The log of one role or of the controller. Its structlog logger writes to a file and to stderr."""

    def __init__(
        self, directory: Path, role: str, *, level: str = "warning", redactor: Redactor | None = None, now: Now = _utc
    ) -> None:
        self.role, self._now = role, now
        self.path = directory / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', role)}.jsonl"
        self._level = LEVELS.get(level, 30)
        self._redactor = redactor or Redactor()
        self._journal: AppendOnlyFile | None = None
        self._broken = False
        self._one_at_a_time = threading.Lock()
        self.logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
            self,
            processors=[structlog.processors.add_log_level, structlog.processors.format_exc_info, self._finish],
            wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        )

    def write(self, level: str, message: str, /, **fields: Any) -> None:
        """Write one record to the file, and to stderr if `level` is high enough."""
        clean = self.keep(level, message, **fields)
        if LEVELS.get(level, 20) >= self._level:
            _say(human_line(clean))

    def keep(self, level: str, message: str, /, **fields: Any) -> dict[str, Any]:
        """Write a record to the file only; return it as written, with secrets redacted."""
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
        # structlog passes the result of the last processor to the method of the wrapped logger.
        level, message = str(event.pop("level", "info")), str(event.pop("event", ""))
        return (message,), {"level": level, **event}

    def _take(self, message: str, /, *, level: str = "info", **fields: Any) -> None:
        self.write(level, message, **fields)

    debug = info = warning = error = critical = msg = _take

    def _to_file(self, line: str) -> None:
        try:
            if self._journal is None:
                self._journal = AppendOnlyFile(self.path, whole_lines)
            self._journal.append((line + "\n").encode("utf-8", errors="backslashreplace"))
        except InfrastructureError as error:
            if not self._broken:
                _say(f"relax: the log is not written: {error}")
            self._broken = True


def _say(line: str) -> None:
    # sys.stderr is looked up for each line because a live display may replace it. A closed stderr is ignored.
    with contextlib.suppress(OSError, ValueError):
        print(printable(line), file=sys.stderr)


def human_line(record: dict[str, Any]) -> str:
    """Format a record as one line for people."""
    extras = " ".join(f"{key}={value}" for key, value in record.items() if key not in _OWN and value not in ("", None))
    clock = str(record["time"])[11:19]
    line = f"{clock} {record['level']:<7} {record['role']}: {record['event']}"
    return f"{line}  {extras}" if extras else line
