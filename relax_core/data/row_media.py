# SPDX-License-Identifier: Apache-2.0
"""Media of a row of a task file: what its parts and media columns name, and where placeholders in its texts put them.

Bytes that stand in the row itself are named by their cell, so that a task never carries them. Nothing is read here.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from relax_core.api.task import Media, MediaKind, Message, Part
from relax_core.media.embedded import SAMPLES, EmbeddedMedia, embedded, named

MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
COLUMNS: Mapping[MediaKind, tuple[str, str]] = {
    "image": ("images", "image"), "video": ("videos", "video"), "audio": ("audios", "audio"),
}  # fmt: skip
"""Columns that hold media for the placeholders of a row: the first of each that a row has."""
INLINE = 1 << 12
"""Characters of a data-URI that a task may carry; a longer one stays in its row."""


class RowError(ValueError):
    """Why a row can't be used."""


class Embedded:
    """Stands for bytes or samples of a row that were not read."""


EMBEDDED = Embedded()


@dataclass(frozen=True, slots=True)
class MediaOrigin:
    """Where a row stands."""

    folder: Path
    """What its relative paths are relative to."""
    file: str = ""
    """Empty: its cells can't be read alone, so that a task carries their bytes."""
    row: int = 0


def medium(kind: MediaKind, value: object, at: tuple[str | int, ...], home: MediaOrigin) -> Media:
    """A medium of whatever form a row gives it in. Raises RowError."""
    return Media(kind, _source(kind, value, at, home), view=_view(value))


def _source(kind: MediaKind, value: object, at: tuple[str | int, ...], home: MediaOrigin) -> str:
    held = value.get("bytes", value.get(SAMPLES)) if isinstance(value, Mapping) else value
    own = isinstance(held, bytes | bytearray | Embedded) or (isinstance(value, Mapping) and held is not None)
    source = None if own else named(value, kind)
    if source is None and not own:
        what = "neither path, url nor bytes" if isinstance(value, Mapping) else "no path, URL, bytes or media dict"
        raise RowError(f"the {kind} at {_place(at)} has {what}")
    if source is not None and not (source.startswith("data:") and len(source) > INLINE and home.file):
        return source if ":" in source else str(home.folder / source)
    if home.file:
        return str(EmbeddedMedia(home.file, home.row, at))
    return source or _as_uri(kind, value, at)


def _as_uri(kind: str, value: object, at: tuple[str | int, ...]) -> str:
    try:
        data = embedded(value)
    except ValueError as error:
        raise RowError(f"the {kind} at {_place(at)}: {error}") from error
    if not data:
        raise RowError(f"the {kind} at {_place(at)} has no bytes")
    return "data:;base64," + base64.b64encode(data).decode()


def _view(value: object) -> tuple[float, float] | None:
    return view_of(value.get("view"), "a medium") if isinstance(value, Mapping) else None


def view_of(value: object, where: str) -> tuple[float, float] | None:
    """A part of a medium in seconds."""
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(isinstance(bound, int | float) for bound in value):
        return float(value[0]), float(value[1])
    raise RowError(f"view of {where} is not [start, end] in seconds")


def media_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[MediaKind, str]:
    """The column of the row that holds media of each kind; `columns` maps our names to the file's."""
    found: dict[MediaKind, str] = {}
    for kind, names in COLUMNS.items():
        told = next((columns[name] for name in names if name in columns), None)
        name = told if told is not None else next((name for name in names if name in row), "")
        if name in row:
            found[kind] = name
    return found


def listed(row: Mapping[str, Any], kind: MediaKind, column: str, home: MediaOrigin) -> list[Media]:
    """The media of a column that holds one or a list of them. Raises RowError."""
    value = row[column]
    if value is None:
        return []
    if isinstance(value, list):
        return [medium(kind, one, (column, number), home) for number, one in enumerate(value)]
    return [medium(kind, value, (column,), home)]


Prompt = str | tuple[Message, ...]


def placed(prompt: Prompt, media: Mapping[MediaKind, Sequence[Media]], columns: Mapping[MediaKind, str]) -> Prompt:
    """The prompt with media of columns where `<image>` and its like stand in texts, and where parts name none.

    A prompt of plain text becomes a message of the user where it shows media. Raises RowError where the two differ in number.
    """
    waiting = {kind: iter(found) for kind, found in media.items()}
    counts = dict.fromkeys(media, 0)
    messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    made = tuple(replace(message, content=_content(message, waiting, counts)) for message in messages)
    for kind, found in media.items():
        if counts[kind] != len(found):
            got = f"{counts[kind]} places for {kind} in the prompt and {len(found)} in {columns[kind]!r}"
            raise RowError(f"{got}: write <{kind}> once for each where it belongs, or fill the column")
    return made if any(not isinstance(message.content, str) for message in made) else prompt


def _content(
    message: Message, waiting: Mapping[MediaKind, Iterator[Media]], counts: dict[MediaKind, int]
) -> str | tuple[Part, ...]:
    parts = (Part(message.content),) if isinstance(message.content, str) else message.content
    made = [piece for part in parts for piece in _pieces(part, waiting, counts)]
    shows = any(piece.media is not None for piece in made)
    return tuple(made) if shows or not isinstance(message.content, str) else message.content


def _pieces(part: Part, waiting: Mapping[MediaKind, Iterator[Media]], counts: dict[MediaKind, int]) -> Iterator[Part]:
    if part.media is not None:
        slot = part.media
        found = slot if slot.source else _next(slot.kind, waiting, counts)
        yield Part(media=replace(found, view=slot.view or found.view))
        return
    marks = re.split("|".join(f"(<{kind}>)" for kind in waiting), part.text) if waiting else [part.text]
    for text in marks:
        kind = next((kind for kind in waiting if text == f"<{kind}>"), None)
        if kind is not None:
            yield Part(media=_next(kind, waiting, counts))
        elif text:
            yield Part(text)


def _next(kind: MediaKind, waiting: Mapping[MediaKind, Iterator[Media]], counts: dict[MediaKind, int]) -> Media:
    """The next of its column; one too many is counted, and told once all are."""
    if kind not in waiting:
        raise RowError(f"a part of type {kind} without path or URL, in a row without a column {COLUMNS[kind][0]!r}")
    counts[kind] += 1
    return next(waiting[kind], Media(kind, ""))


def _place(at: tuple[str | int, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at).lstrip(".")
