# SPDX-License-Identifier: Apache-2.0
"""Conversion of the values of task files to plain data, which every process, log and chat template accepts.

Plain data are text of whole characters, numbers, true, false, null, lists, and tables with names of text. Bytes and
`EMBEDDED` are kept, because only the caller knows whether a column may hold media.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from relax_core.api.task import half
from relax_core.registry.error_text import too_many_digits

MAX_DEPTH = 100
"""Largest number of nested levels of lists and tables. Messages between processes and Python's stack allow a few more."""


class Embedded:
    """A stand-in for bytes or sound samples of a row that were not read."""


EMBEDDED = Embedded()
_AS_THEY_ARE = frozenset({bool, int, float, bytes, bytearray, type(None), Embedded})


@dataclass(frozen=True, slots=True)
class UnreadableValue:
    """A stand-in for a value of a file that Python can't represent, such as text that is not UTF-8."""

    reason: str


def read_json(text: str | bytes) -> object:
    """Return the value of JSON text, with an `UnreadableValue` for an object that has a key twice. Raises ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except ValueError as error:
        if type(error) is not ValueError:  # such as JSONDecodeError
            raise
        raise ValueError(too_many_digits(text if isinstance(text, str) else text.decode())) from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object] | UnreadableValue:
    table = dict(pairs)
    if len(table) == len(pairs):
        return table
    names = [name for name, _ in pairs]
    return UnreadableValue(f"holds an object with the key {next(n for n in names if names.count(n) > 1)!r} twice")


class NotPlainError(ValueError):
    """A value without a plain form. The text completes a sentence that begins with the name of the column."""


def plain(value: Any, depth: int = 0, text: Callable[[str], str] | None = None) -> Any:
    """Return a value as plain data, with bytes and `EMBEDDED` kept. Raises NotPlainError.

    Dates and times become ISO 8601 text, durations seconds, decimals numbers, or text if a float would lose digits.
    Tuples and numpy arrays become lists; `depth`: number of lists and tables around the value. `text` maps each text to
    whole characters; None: other texts are refused.
    """
    text = text or _whole
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list | tuple | Mapping):
        if depth == MAX_DEPTH:
            raise NotPlainError(f"is nested in more than {MAX_DEPTH} levels")
        if not isinstance(value, Mapping):
            return [plain(item, depth + 1, text) for item in value]
        if strange := [key for key in value if not isinstance(key, str)]:
            raise NotPlainError(f"holds a table with the key {strange[0]!r}, which is not text")
        return {text(key): plain(item, depth + 1, text) for key, item in value.items()}
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        if value.is_finite() and value == value.to_integral_value() and value.adjusted() < 19:
            return int(value)
        near = float(value)
        return near if not value.is_finite() or Decimal(str(near)) == value else format(value, "f")
    if isinstance(value, UUID):
        return str(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # numpy's arrays and scalars
        return plain(value.tolist(), depth, text)
    raise NotPlainError(value.reason if isinstance(value, UnreadableValue) else f"holds a {type(value).__name__}")


def holds_bytes(value: Any) -> bool:
    """Return True if plain data hold bytes or a stand-in for bytes."""
    if type(value) is str:  # as most values are
        return False
    if isinstance(value, Mapping):
        return any(map(holds_bytes, value.values()))
    return any(map(holds_bytes, value)) if isinstance(value, list) else isinstance(value, bytes | bytearray | Embedded)


def without_bytes(value: Any) -> object:
    """Return plain data with None in place of bytes."""
    if isinstance(value, dict):
        return {key: without_bytes(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_bytes(item) for item in value]
    return None if isinstance(value, bytes | bytearray | Embedded) else value


def _whole(text: str) -> str:
    if broken := half(text):
        raise NotPlainError(f"holds {broken}, half of a surrogate pair, which is not a character")
    return str(text)
