# SPDX-License-Identifier: Apache-2.0
"""One row of a task file to a `Task`; what is wrong with it is a `RowError`, one sentence about one column."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from relax_core.api.task import Media, MediaKind, Message, Part, Task, ToolCall

FIELDS = ("prompt", "answer", "id", "environment")
CONVERSATION = "messages"
"""What datasets call a prompt that goes on to the assistant's own turns."""
MEDIA_KINDS = get_args(MediaKind)


class RowError(ValueError):
    """Why a row can't be used."""


def row_task(row: object, columns: Mapping[str, str], default_id: str, folder: Path) -> Task:
    """`columns` maps our names to the file's; media paths are relative to `folder`."""
    if not isinstance(row, dict):
        raise RowError(f"the row is {_kind(row)}, not an object")
    values: dict[str, Any] = row
    known = {name: columns.get(name, name) for name in FIELDS}
    if known["prompt"] not in row and CONVERSATION in row:
        known["prompt"] = CONVERSATION
    if known["prompt"] not in row:
        raise RowError(f"no column {known['prompt']!r} for the prompt; it has {', '.join(map(repr, row)) or 'none'}")
    given = {source: name for name, source in columns.items() if name not in FIELDS}
    taken = set(known.values())
    return Task(
        id=_text(row.get(known["id"]), known["id"], default_id),
        prompt=text_or_messages(row[known["prompt"]], known["prompt"], folder),
        answer=row.get(known["answer"]),
        metadata={given.get(key, key): value for key, value in values.items() if key not in taken},
        environment=_text(row.get(known["environment"]), known["environment"], ""),
    )


def _text(value: object, column: str, default: str) -> str:
    if value is None:
        return default
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)
    raise RowError(f"{column!r} is {_kind(value)}, not text")


def text_or_messages(value: object, column: str, folder: Path) -> str | tuple[Message, ...]:
    """The words of a column that may hold either. Raises RowError."""
    if isinstance(value, str):
        if not value:
            raise RowError(f"{column!r} is empty")
        return value
    if not isinstance(value, list):
        raise RowError(f"{column!r} is {_kind(value)}, not text or a list of messages")
    if not value:
        raise RowError(f"{column!r} has no messages")
    return tuple(_message(message, f"{column}[{number}]", folder) for number, message in enumerate(value))


def _message(value: object, where: str, folder: Path) -> Message:
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
    return Message(value["role"], tuple(_part(part, where, folder) for part in content), calls)


def _part(value: object, where: str, folder: Path) -> Part:
    """`{"type": "text", "text": ...}` or `{"type": "image", "image": path or URL, "view": [start_s, end_s]}`."""
    kind: Any = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or (kind != "text" and kind not in MEDIA_KINDS):
        raise RowError(f"a part of {where} has no type of text, {', '.join(MEDIA_KINDS)}")
    content = value.get(kind)
    if not isinstance(content, str):
        raise RowError(f"a part of {where} has no {kind!r} with its {'words' if kind == 'text' else 'path or URL'}")
    if kind == "text":
        return Part(content)
    source = content if ":" in content else str(folder / content)
    return Part(media=Media(kind, source, view=_view(value.get("view"), where)))


def _view(value: object, where: str) -> tuple[float, float] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(isinstance(bound, (int, float)) for bound in value):
        return float(value[0]), float(value[1])
    raise RowError(f"view of a part of {where} is not [start, end] in seconds")


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
