# SPDX-License-Identifier: Apache-2.0
"""The `jsonl` task source: a JSON object a line, `{"prompt": text or messages, "answer": ...}`, or one JSON list.

Every row is read once at `open` and judged; after that only its place in the file is kept (of a list, which
can't be read in part, the rows). Unusable rows are all listed by `problems`.

One row of a task file to a `Task`; what is wrong with it is a `RowError`, one sentence about one column.

The `files` task source: whatever a path is, read by the source for it. JSON lines, or a table or folder of tables.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from relax_core.api.errors import ConfigError
from relax_core.api.options import Options
from relax_core.api.source import BadRow, TaskSource
from relax_core.api.task import Media, Message, Part, Task, ToolCall
from relax_core.data.row_media import (
    MEDIA_KINDS,
    Embedded,
    MediaOrigin,
    RowError,
    listed,
    media_columns,
    medium,
    placed,
    view_of,
)

__all__ = ["RowError", "row_task", "text_or_messages"]

FIELDS = ("prompt", "answer", "id", "environment")
CONVERSATION = "messages"
"""What datasets call a prompt that goes on to the assistant's own turns."""
URLS = {f"{kind}_url": kind for kind in MEDIA_KINDS}
"""Types of parts as some APIs write them."""


def row_task(row: object, columns: Mapping[str, str], default_id: str, home: MediaOrigin) -> Task:
    """`columns` maps our names to the file's; `home` is where the row stands."""
    if not isinstance(row, dict):
        raise RowError(f"the row is {_kind(row)}, not an object")
    values: dict[str, Any] = row
    known = {name: columns.get(name, name) for name in FIELDS}
    if known["prompt"] not in row and CONVERSATION in row:
        known["prompt"] = CONVERSATION
    if known["prompt"] not in row:
        raise RowError(f"no column {known['prompt']!r} for the prompt; it has {', '.join(map(repr, row)) or 'none'}")
    given = {source: name for name, source in columns.items() if name not in FIELDS}
    showing = media_columns(values, columns)
    media = {kind: listed(values, kind, column, home) for kind, column in showing.items()}
    taken = {*known.values(), *showing.values()}
    return Task(
        id=_text(row.get(known["id"]), known["id"], default_id),
        prompt=placed(text_or_messages(row[known["prompt"]], known["prompt"], home), media, showing),
        answer=row.get(known["answer"]),
        metadata={given.get(key, key): _told(value) for key, value in values.items() if key not in taken},
        environment=_text(row.get(known["environment"]), known["environment"], ""),
    )


def _text(value: object, column: str, default: str) -> str:
    if value is None:
        return default
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)
    raise RowError(f"{column!r} is {_kind(value)}, not text")


def _told(value: Any) -> Any:
    """Without bytes that were left in the file."""
    if isinstance(value, dict):
        return {key: _told(inner) for key, inner in value.items()}
    return None if isinstance(value, Embedded) else [_told(one) for one in value] if isinstance(value, list) else value


def text_or_messages(value: object, column: str, home: MediaOrigin) -> str | tuple[Message, ...]:
    """The words of a column that may hold either. Raises RowError."""
    if isinstance(value, str):
        if not value:
            raise RowError(f"{column!r} is empty")
        return value
    if not isinstance(value, list):
        raise RowError(f"{column!r} is {_kind(value)}, not text or a list of messages")
    if not value:
        raise RowError(f"{column!r} has no messages")
    return tuple(_message(message, (column, number), home) for number, message in enumerate(value))


def _message(value: object, at: tuple[str | int, ...], home: MediaOrigin) -> Message:
    where = f"{at[0]}[{at[1]}]"
    if not isinstance(value, dict):
        raise RowError(f"{where} is {_kind(value)}, not a message with role and content")
    if not isinstance(value.get("role"), str) or not value["role"]:
        raise RowError(f"{where} has no role")
    called = value.get("tool_calls") or []
    if not isinstance(called, list):
        raise RowError(f"tool_calls of {where} is {_kind(called)}, not a list")
    calls = tuple(_call(call, where) for call in called)
    content = value.get("content")
    if isinstance(content, str) or (content is None and calls):
        return Message(value["role"], content or "", calls, str(value.get("name") or ""))
    if not isinstance(content, list):
        raise RowError(f"content of {where} is {_kind(content)}, not text or a list of parts")
    parts = tuple(_part(part, where, (*at, "content", number), home) for number, part in enumerate(content))
    return Message(value["role"], parts, calls)


def _part(value: object, where: str, at: tuple[str | int, ...], home: MediaOrigin) -> Part:
    """`{"type": "text", "text": ...}` or `{"type": "image", "image": path, URL or media dict, "view": [start_s, end_s]}`.

    A medium that names none is the next one of its column.
    """
    written: Any = value.get("type") if isinstance(value, dict) else None
    kind: Any = URLS.get(written, written)
    if not isinstance(value, dict) or (kind != "text" and kind not in MEDIA_KINDS):
        raise RowError(f"a part of {where} has no type of text, {', '.join(MEDIA_KINDS)}")
    if kind == "text":
        if not isinstance(value.get("text"), str):
            raise RowError(f"a part of {where} has no 'text' with its words")
        return Part(value["text"])
    view = view_of(value.get("view"), f"a part of {where}")
    for key in (written, kind, "path", "url", "bytes", "base64"):
        if value.get(key) is not None:
            whole = key in ("bytes", "base64")
            found = medium(kind, value if whole else value[key], at if whole else (*at, key), home)
            return Part(media=found if view is None else Media(kind, found.source, view=view))
    return Part(media=Media(kind, "", view=view))


def _call(value: object, where: str) -> ToolCall:
    call = value if isinstance(value, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"a tool call of {where} has no name")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, dict):
        raise RowError(f"arguments of tool call {function['name']} of {where} are {_kind(arguments)}, not an object")
    return ToolCall(function["name"], arguments, str(call.get("id", "")))


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


FIELD = "data"


class JsonLines(TaskSource[Options]):
    """Tasks of a `.jsonl` or `.json` file."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json")

    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """Raises ConfigError at the first unusable row; the usable ones can be read all the same."""
        self._path, self._columns = Path(path), dict(columns)
        self._starts, self._lengths, self._lines = array("q"), array("q"), array("q")
        self._rows: list[Any] = []
        self._bad: list[BadRow] = []
        self._ids: set[str] = set()
        self._file = _open(self._path)
        if self._path.suffix == ".json":
            self._scan_list()
        else:
            self._scan_lines()
        self._ids.clear()
        self._refuse()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._rows:
            return self._task(self._rows[index], self._lines[index], None)
        return self._task(self._read(index), self._lines[index], self._starts[index])

    def where(self, index: int) -> str:
        return self._where(self._lines[index])

    def problems(self) -> Iterator[BadRow]:
        return iter(self._bad)

    def _scan_lines(self) -> None:
        start = 0
        for number, line in enumerate(self._file, 1):
            if line.strip() and self._keep(line, number, start):
                self._starts.append(start)
                self._lengths.append(len(line))
            start += len(line)

    def _scan_list(self) -> None:
        try:
            rows = json.loads(self._file.read())
        except (ValueError, RecursionError) as error:
            self._bad.append(BadRow(f"{self._path}:{getattr(error, 'lineno', 1)}", f"malformed JSON: {error}"))
            return
        if not isinstance(rows, list):
            self._bad.append(BadRow(f"{self._path}:1", "a .json file holds one list; name objects a line .jsonl"))
            return
        self._rows = [row for number, row in enumerate(rows, 1) if self._keep(row, number)]

    def _keep(self, row: Any, number: int, start: int | None = None) -> bool:
        """Judge one row, given as its line with where that begins, or as what a list holds."""
        try:
            task = self._task(_parse(row) if isinstance(row, bytes) else row, number, start)
            self._once(task.id)
        except RowError as error:
            self._bad.append(BadRow(self._where(number), str(error)))
            return False
        self._lines.append(number)
        return True

    def _once(self, task_id: str) -> None:
        if "id" not in self._columns and task_id in self._ids:
            raise RowError(f"id {task_id!r} is used twice")
        self._ids.add(task_id)

    def _read(self, index: int) -> Any:
        start, length = self._starts[index], self._lengths[index]
        try:
            return _parse(os.pread(self._file.fileno(), length, start))
        except RowError as error:
            raise ConfigError(FIELD, f"{self.where(index)}, changed since it was opened", "start again") from error

    def _task(self, row: Any, number: int, start: int | None) -> Task:
        folder = self._path.parent
        home = MediaOrigin(folder) if start is None else MediaOrigin(folder, str(self._path.absolute()), start)
        return row_task(row, self._columns, f"{self._path.stem}:{number}", home)

    def _where(self, number: int) -> str:
        return f"{self._path}:{number}" if self._path.suffix != ".json" else f"{self._path} item {number}"

    def _refuse(self) -> None:
        if self._bad:
            first, others = self._bad[0], len(self._bad) - 1
            got = f"{first.where}: {first.reason}" + (f" (and {others} more bad rows)" if others else "")
            raise ConfigError(FIELD, got, f"correct the file; `relax data check {self._path}` lists every bad row")
        if not self._lines:
            raise ConfigError(FIELD, f"{self._path}, which holds no rows", 'write rows {"prompt": ..., "answer": ...}')


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(
            FIELD, f"{path}: {error.strerror}", "name a readable .jsonl or .json file of tasks"
        ) from error


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise RowError(f"malformed JSON: {error}") from error
    except RecursionError as error:
        raise RowError("malformed JSON: nested too deeply") from error
