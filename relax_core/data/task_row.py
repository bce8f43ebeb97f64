# SPDX-License-Identifier: Apache-2.0
"""Conversion of one row of a task file to a `Task`: its prompt, its columns and its media.

Media are named by message parts, by columns, and by marks such as `<image>` in texts. A fault raises `RowError`, one
sentence about one column. No media are read: if possible, a task refers to the cell of the file that holds the bytes.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from relax_core.api.task import Media, MediaKind, Message, Part, Task, ToolCall, half, without_halves
from relax_core.data.plain_data import (
    Embedded,
    NotPlainError,
    UnreadableValue,
    holds_bytes,
    plain,
    read_json,
    without_bytes,
)
from relax_core.media.source import SAMPLES, EmbeddedMedia, embedded, in_uri, is_path, named

MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
COLUMNS: Mapping[MediaKind, tuple[str, str]] = {
    "image": ("images", "image"), "video": ("videos", "video"), "audio": ("audios", "audio"),
}  # fmt: skip
"""Names of the columns with a row's media, by kind. The first of the two names that the row has is used."""
Prompt = str | tuple[Message, ...]
INLINE = 1 << 12
"""Characters of a data-URI above which a task references its cell in the file instead."""
FIELDS = ("prompt", "answer", "id", "environment")
CONVERSATION = "messages"
"""Column used as the prompt if the prompt's column is missing: a conversation with the assistant's turns."""
READ = ("completion", "chosen", "rejected", "tools")
"""Further columns that the model reads in some runs; their values are never mended."""
SHOWN = frozenset((*(name for names in COLUMNS.values() for name in names), "prompt", CONVERSATION, *READ))
"""Columns that may hold media which the model reads."""
_PLACED = {*FIELDS, *(name for names in COLUMNS.values() for name in names)}
URLS = {f"{kind}_url": kind for kind in MEDIA_KINDS}
"""Kinds of media by the `type` of a message part in some APIs, such as `image_url`."""


MESSAGE_FIELDS = frozenset(("role", "content", "tool_calls", "name"))
"""Fields of a message that `Message` holds by name; the template gets all others unchanged."""
CALL_FIELDS = frozenset(("id", "type"))
MEDIUM_FIELDS = frozenset(("type", "path", "url", "bytes", "base64", "view"))


class RowError(ValueError):
    """A fault of a row, described in one sentence."""


@dataclass(frozen=True, slots=True)
class MediaOrigin:
    """The location of a row, from which references to its media are made."""

    folder: Path
    """Folder to which paths in the row are relative."""
    file: str = ""
    """Absolute path of the task file; empty if single cells can't be read from the file: tasks then carry the bytes."""
    row: int = 0
    """Index of the row in a table, or byte offset of its line."""


def row_task(
    row: object, columns: Mapping[str, str], default_id: str, origin: MediaOrigin, faults: dict[str, str] | None = None
) -> Task:
    """Return the task of a row as plain data; `columns` maps Relax's column names to the file's. Raises RowError.

    A column that `columns` names hides a column of the file that has Relax's name. A value that has no plain form is an
    error in `READ` and in the columns that `columns` names. Any other column gets a replacement character or None in
    its place, and `faults` gets the reason by column. NaN counts as missing, because table libraries fill empty cells with NaN.
    """
    if isinstance(row, UnreadableValue):
        raise RowError(f"the row {row.reason}")
    if not isinstance(row, dict):
        raise RowError(f"the row is {_kind(row)}, not an object")
    names_in_file = {name: columns.get(name, name) for name in FIELDS}
    conversation = columns.get(CONVERSATION, CONVERSATION)
    if "prompt" not in columns and "prompt" not in row and conversation in row:
        names_in_file["prompt"] = conversation
    if names_in_file["prompt"] not in row:
        raise RowError(
            f"no prompt column {names_in_file['prompt']!r}; the row has {', '.join(map(repr, row)) or 'no columns'}"
        )
    showing: dict[MediaKind, str] = {}
    media: dict[MediaKind, list[Media]] = {}
    for kind, names in COLUMNS.items():
        if not columns and row.keys().isdisjoint(names):
            continue
        mapped = [columns[name] for name in names if name in columns]
        if len(mapped) > 1:
            raise RowError(f"`columns` names a column for {names[0]!r} and another for {names[1]!r}; name one")
        there = mapped or sorted((name for name in names if name in row), key=lambda name: _empty(row[name]))
        if there and there[0] in row:
            value, column = row[there[0]], there[0]
            showing[kind] = column
            held = list(enumerate(value)) if isinstance(value, list) else [] if _is_null(value) else [(-1, value)]
            media[kind] = [
                _medium(kind, entry, (column, number) if number >= 0 else (column,), origin) for number, entry in held
            ]
    given = {name: column for name, column in columns.items() if name not in _PLACED and column in row}
    hidden = {
        *names_in_file,
        *names_in_file.values(),
        *showing.values(),
        *columns.values(),
        *(name for name in columns if columns[name]),
    }
    others = {key: key for key in row if key not in hidden} | given
    faults = {} if faults is None else faults
    answer = _plain(row, names_in_file["answer"])
    if holds_bytes(answer):
        raise RowError(f"{names_in_file['answer']!r} holds bytes; write text, numbers, lists or tables of them")
    return Task(
        id=_text(_plain(row, names_in_file["id"]), names_in_file["id"], default_id),
        prompt=_placed(
            text_or_messages(_plain(row, names_in_file["prompt"]), names_in_file["prompt"], origin), media, showing
        ),
        answer=answer,
        metadata={
            without_halves(name): _other(row, column, column in READ or name in given, faults)
            for name, column in others.items()
        },
        environment=_text(_plain(row, names_in_file["environment"]), names_in_file["environment"], ""),
    )


def _plain(row: Mapping[str, Any], column: str) -> object:
    """Return a column of a row as plain data; None if the column is missing or NaN. Raises RowError."""
    try:
        value = plain(row.get(column))
    except NotPlainError as error:
        raise RowError(f"{column!r} {error}") from error
    return None if isinstance(value, float) and math.isnan(value) else value


def _other(row: Mapping[str, Any], column: str, must: bool, faults: dict[str, str]) -> object:
    """Return a column of a task's metadata. Raises RowError if `must`, else adds to `faults`."""
    if half(column):
        faults[without_halves(column)] = f"the name {column!a} holds half of a surrogate pair"
    try:
        value = _plain(row, column)
    except RowError as error:
        if must:
            raise
        faults[without_halves(column)] = str(error)
        try:
            value = plain(row[column], text=without_halves)
        except NotPlainError:
            return None
    if holds_bytes(value):
        faults[without_halves(column)] = f"{column!r} holds bytes"
    return without_bytes(value)


def _is_null(value: object) -> bool:
    """Return True for null, and for an object of nulls alone, which some tables have in place of null."""
    return value is None or (isinstance(value, dict) and bool(value) and all(map(_is_null, value.values())))


def _text(value: object, column: str, default: str) -> str:
    if value is None:
        return default
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)
    raise RowError(f"{column!r} is {_kind(value)}, not text")


def text_or_messages(value: object, column: str, origin: MediaOrigin) -> str | tuple[Message, ...]:
    """Return the value of a column as text or messages. Raises RowError."""
    if isinstance(value, str):
        if not value:
            raise RowError(f"{column!r} is empty")
        if value.lstrip().startswith("[{") and _is_messages(value):
            raise RowError(
                f"{column!r} is JSON text of messages, which the model would get as it stands; write the list"
            )
        return value
    if not isinstance(value, list):
        raise RowError(f"{column!r} is {_kind(value)}, not text or a list of messages")
    if not value:
        raise RowError(f"{column!r} has no messages")
    return tuple(_message(message, (column, number), origin) for number, message in enumerate(value))


def _is_messages(text: str) -> bool:
    """Return True for JSON text of a list of messages."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and all(
        isinstance(message, dict) and {"role", "content"} <= {*message} for message in value
    )


def _message(value: object, at: tuple[str | int, ...], origin: MediaOrigin) -> Message:
    where = f"{at[0]}[{at[1]}]"
    if not isinstance(value, dict):
        raise RowError(f"{where} is {_kind(value)}, not a message with role and content")
    if not isinstance(value.get("role"), str) or not value["role"]:
        raise RowError(f"{where} has no role")
    called = value.get("tool_calls") or []
    if not isinstance(called, list):
        raise RowError(f"tool_calls of {where} is {_kind(called)}, not a list")
    calls = tuple(_call(call, where) for call in called)
    content, name = value.get("content"), value.get("name") or ""
    if not isinstance(name, str):
        raise RowError(f"the name of {where} is {_kind(name)}, not text")
    extra = {
        key: without_nulls(field) for key, field in value.items() if key not in MESSAGE_FIELDS and not _empty(field)
    }
    if isinstance(content, str) or (content is None and calls):
        return Message(value["role"], content or "", calls, name, extra)
    if not isinstance(content, list):
        raise RowError(f"content of {where} is {_kind(content)}, not text or a list of parts")
    parts = tuple(_part(part, where, (*at, "content", number), origin) for number, part in enumerate(content))
    return Message(value["role"], parts, calls, name, extra)


def without_nulls(value: object) -> object:
    """Return plain data without the keys whose value is None: in a table, an object has the keys of all its rows."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _empty(value: object) -> bool:
    return _is_null(value) or value in ("", [], {})


def _refuse_others(value: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Raise RowError naming a field that has a value and that no template would get."""
    left = next((key for key, field in value.items() if key not in known and not _empty(field)), None)
    if left is not None:
        raise RowError(f"{where} has the field {left!r}, which no prompt shows; remove it")


def _part(value: object, where: str, at: tuple[str | int, ...], origin: MediaOrigin) -> Part:
    """Read a part of a message. Raises RowError.

    A part is `{"type": "text", "text": ...}` or `{"type": "image", "image": path, URL or media dict, "view": [start_s,
    end_s]}`. A part without path, URL or bytes shows the next medium of its kind's column.
    """
    written: Any = value.get("type") if isinstance(value, dict) else None
    kind: Any = URLS.get(written, written) if isinstance(written, str) else None
    if not isinstance(value, dict) or (kind != "text" and kind not in MEDIA_KINDS):
        raise RowError(f"a part of {where} has no known type; use text, {', '.join(MEDIA_KINDS)}")
    if kind == "text":
        if not isinstance(value.get("text"), str):
            raise RowError(f"a part of {where} has no 'text' with its words")
        _refuse_others(value, frozenset(("type", "text")), f"a part of {where}")
        return Part(value["text"])
    _refuse_others(value, MEDIUM_FIELDS | {written, kind}, f"a part of {where}")
    view = _view_of(value.get("view"), f"a part of {where}")
    for key in (written, kind, "path", "url", "bytes", "base64"):
        if not _is_null(value.get(key)):
            whole = key in ("bytes", "base64")
            medium = _medium(kind, value if whole else value[key], at if whole else (*at, key), origin)
            return Part(media=medium if view is None else Media(kind, medium.source, view=view))
    return Part(media=Media(kind, "", view=view))


def _call(value: object, where: str) -> ToolCall:
    call = value if isinstance(value, dict) else {}
    function = call.get("function") or call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"a tool call of {where} has no name")
    named = f"tool call {function['name']} of {where}"
    arguments = without_nulls(function.get("arguments"))
    if isinstance(arguments, str):  # as APIs write them; their nulls were meant
        try:
            arguments = plain(read_json(arguments))
        except NotPlainError as error:
            raise RowError(f"the text with the arguments of {named} {error}") from error
        except (ValueError, RecursionError) as error:
            raise RowError(f"arguments of {named} are not JSON: {error}") from error
    if holds_bytes(arguments):
        raise RowError(f"arguments of {named} hold bytes")
    if not _is_finite(arguments):
        raise RowError(f"arguments of {named} hold NaN or an infinite number, which JSON does not have")
    if not isinstance(arguments, dict | None):
        raise RowError(f"arguments of {named} are {_kind(arguments)}, not an object")
    if call.get("type") not in (None, "function"):
        raise RowError(f"{named} has the type {call['type']!r}; the only type is 'function'")
    shown = frozenset(("name", "arguments"))
    _refuse_others(call, CALL_FIELDS | (shown if function is call else {"function"}), named)
    _refuse_others(function, shown | (CALL_FIELDS if function is call else frozenset()), named)
    return ToolCall(function["name"], arguments or {}, str(call.get("id") or ""))


def _is_finite(value: object) -> bool:
    """Return False for plain data with a number that is NaN or infinite."""
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null",
             bytes: "bytes", Embedded: "bytes"}  # fmt: skip
    return names.get(type(value), "a number")


def _medium(kind: MediaKind, value: object, at: tuple[str | int, ...], origin: MediaOrigin) -> Media:
    """Read a medium given as path, URL, bytes or media dict. Raises RowError."""
    view = _view_of(value.get("view"), "a medium") if isinstance(value, Mapping) else None
    return Media(kind, _source(kind, value, at, origin), view=view)


def _source(kind: MediaKind, value: object, at: tuple[str | int, ...], origin: MediaOrigin) -> str:
    held = value
    if isinstance(value, Mapping):
        held = value.get(SAMPLES) if value.get("bytes") is None else value["bytes"]
        if held is value.get("bytes") and not isinstance(held, bytes | bytearray | Embedded | str | None):
            raise RowError(f"the bytes of the {kind} at {_place(at)} are {_kind(held)}; write them as base64 text")
    holds_data = isinstance(held, bytes | bytearray | Embedded) or (isinstance(value, Mapping) and held is not None)
    source = None if holds_data else named(value, kind)
    if source is not None and half(source):
        raise RowError(f"the {kind} at {_place(at)} is named by text with half of a surrogate pair")
    if source is None and not holds_data:
        what = "neither path, url nor bytes" if isinstance(value, Mapping) else "no path, URL, bytes or media dict"
        raise RowError(f"the {kind} at {_place(at)} has {what}")
    if source is not None and not source.startswith("data:"):
        return str(origin.folder / source) if is_path(source) else source
    cell = str(EmbeddedMedia(origin.file, origin.row, at)) if origin.file else ""
    if cell and source is None and not isinstance(held, str):  # checked when the medium is read
        return cell
    try:
        data = embedded(value) if source is None else in_uri(source)
    except ValueError as error:
        raise RowError(f"the {kind} at {_place(at)}: {error}") from error
    if not data:
        raise RowError(f"the {kind} at {_place(at)} has no bytes")
    if source is not None and (not cell or len(source) <= INLINE):
        return source
    return cell or "data:;base64," + base64.b64encode(data).decode()


def _view_of(value: object, where: str) -> tuple[float, float] | None:
    """Read a view of a medium: (start, end) in seconds. Raises RowError."""
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(isinstance(bound, int | float) for bound in value):
        with suppress(OverflowError):
            start, end = map(float, value)
            if math.isfinite(start) and math.isfinite(end):
                return start, end
    raise RowError(f"view of {where} is not [start, end] in seconds")


def _placed(prompt: Prompt, media: Mapping[MediaKind, Sequence[Media]], columns: Mapping[MediaKind, str]) -> Prompt:
    """Put the media of a row's columns into its prompt: at marks such as `<image>`, and in parts that name no medium.

    A plain-text prompt that shows media becomes a user message. Raises RowError if places and media differ in number.
    """
    if not media and (isinstance(prompt, str) or all(isinstance(message.content, str) for message in prompt)):
        return prompt
    waiting = {kind: iter(found) for kind, found in media.items()}
    counts = dict.fromkeys(media, 0)
    messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    made = []
    for message in messages:
        parts = (Part(message.content),) if isinstance(message.content, str) else message.content
        pieces = tuple(piece for part in parts for piece in _pieces(part, waiting, counts))
        shows = any(piece.media is not None for piece in pieces)
        made.append(replace(message, content=pieces) if shows or not isinstance(message.content, str) else message)
    for kind, found in media.items():
        if counts[kind] != len(found):
            got = f"{counts[kind]} places for {kind} in the prompt, but {len(found)} media in {columns[kind]!r}"
            raise RowError(f"{got}: write <{kind}> once for each medium, at its position, or fill the column")
    return tuple(made) if any(not isinstance(message.content, str) for message in made) else prompt


def _pieces(part: Part, waiting: Mapping[MediaKind, Iterator[Media]], counts: dict[MediaKind, int]) -> Iterator[Part]:
    if part.media is not None:
        slot = part.media
        medium = slot if slot.source else _next(slot.kind, waiting, counts)
        yield Part(media=replace(medium, view=slot.view or medium.view))
        return
    marks = re.split("|".join(f"(<{kind}>)" for kind in waiting), part.text) if waiting else [part.text]
    for text in marks:
        kind = next((kind for kind in waiting if text == f"<{kind}>"), None)
        if kind is not None:
            yield Part(media=_next(kind, waiting, counts))
        elif text:
            yield Part(text)


def _next(kind: MediaKind, waiting: Mapping[MediaKind, Iterator[Media]], counts: dict[MediaKind, int]) -> Media:
    """Return the next medium of a kind's column. After the last, return an empty medium; `_placed` raises RowError."""
    if kind not in waiting:
        raise RowError(f"a part of type {kind} without path or URL, in a row without a column {COLUMNS[kind][0]!r}")
    counts[kind] += 1
    return next(waiting[kind], Media(kind, ""))


def _place(at: tuple[str | int, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at).lstrip(".")
