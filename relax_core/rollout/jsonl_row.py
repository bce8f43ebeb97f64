# SPDX-License-Identifier: Apache-2.0
"""One row of a task file to a `Task`; what is wrong with it is a `RowError`, one sentence about one column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_core.api.task import Media, Message, Part, Task, ToolCall
from relax_core.rollout.row_media import (
    MEDIA_KINDS,
    Embedded,
    Home,
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


def row_task(row: object, columns: Mapping[str, str], default_id: str, home: Home) -> Task:
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


def text_or_messages(value: object, column: str, home: Home) -> str | tuple[Message, ...]:
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


def _message(value: object, at: tuple[str | int, ...], home: Home) -> Message:
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


def _part(value: object, where: str, at: tuple[str | int, ...], home: Home) -> Part:
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
