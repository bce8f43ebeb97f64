# SPDX-License-Identifier: Apache-2.0
"""Conversion of Gymnasium spaces: values to JSON, and the policy's text to actions.

An action that can't be read raises `UnreadableAction`, whose message is shown to the policy. To support a new type of
space, add a case in `plain`, `value_of` and `unwritable_part`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium import spaces

MOST_NUMBERS = 256
"""Maximum count of numbers in an observation or action that is written as text."""
_TAG = re.compile(r"<(/?)action>", re.IGNORECASE)


class UnreadableAction(Exception):
    """Error for a text that contains no valid action; the policy gets the error's message."""


def unwritable_part(space: spaces.Space[Any]) -> str:
    """Return a description of the part of a space that can't be written as text; empty if there is no such part."""
    match space:
        case spaces.Discrete() | spaces.Text():
            return ""
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            size = int(np.prod(space.shape))
            return f"{space}, which has {size} numbers," if size > MOST_NUMBERS else ""
        case spaces.Tuple():
            return next(filter(None, map(unwritable_part, space.spaces)), "")
        case spaces.Dict():
            return next(filter(None, map(unwritable_part, space.spaces.values())), "")
    return str(space)


def plain(space: spaces.Space[Any], value: Any, digits: int) -> Any:
    """Convert a value of a space to plain JSON data, with floats rounded to `digits` decimal places."""
    match space:
        case spaces.Discrete():
            return int(value)
        case spaces.Tuple():
            return [plain(part, one, digits) for part, one in zip(space.spaces, value, strict=True)]
        case spaces.Dict():
            return {name: plain(part, value[name], digits) for name, part in space.spaces.items()}
        case spaces.Text():
            return str(value)
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = array.astype(np.float64).round(digits) + 0.0  # float64 avoids float32's extra digits; + 0.0 avoids -0.0
    return array.tolist()


def value_of(space: spaces.Space[Any], data: Any) -> Any:
    """Convert plain JSON data to a value of a space. Raises UnreadableAction if the value is not in the space."""
    try:
        value = _converted(space, data)
        inside = space.contains(value)
    except UnreadableAction:
        raise
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError):
        inside = False
    if not inside:
        raise UnreadableAction(f"{json.dumps(data)[:200]} is not in {space}")
    return value


def read_action(space: spaces.Space[Any], text: str, names: Sequence[str]) -> Any:
    """Read the action in the last `<action>..</action>` of a response, else in its last line that is not empty.

    In a `Discrete` space the action is a number or a name, alone or as the only action that the text mentions. In a
    `Text` space the action is the text. In all remaining spaces the action is JSON. Raises UnreadableAction.
    """
    tags = list(_TAG.finditer(text))
    tagged = [text[a.end() : b.start()] for a, b in pairwise(tags) if (a[1], b[1]) == ("", "/")]
    said = (tagged or [line for line in text.splitlines() if line.strip()] or [""])[-1].strip()
    if isinstance(space, spaces.Discrete):
        return value_of(space, _numbered(space, said, names))
    if isinstance(space, spaces.Text):
        return value_of(space, said)
    begin = min((place for place in map(said.find, "[{") if place >= 0), default=0)
    end = max(map(said.rfind, "]}")) + 1 or len(said)
    try:
        data = json.loads(said[begin:end], parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise UnreadableAction(f"{said[-200:]!r} is not a JSON list of {space}") from None
    return value_of(space, data)


def actions_of(space: spaces.Space[Any], names: Sequence[str]) -> str:
    """Describe the actions of a space for the policy."""
    if not isinstance(space, spaces.Discrete):
        return f"JSON of {space}"
    first, count = int(space.start), int(space.n)
    return ", ".join(names) if names else f"a number from {first} to {first + count - 1}"


def _numbered(space: spaces.Discrete, said: str, names: Sequence[str]) -> int:
    first = int(space.start)
    numbers = {str(first + place): first + place for place in range(int(space.n))}
    numbers |= {name.casefold(): first + place for place, name in enumerate(names)}
    bare = said.casefold().strip(" .!\"'`*[]()")
    if bare in numbers:
        return numbers[bare]
    longest_first = "|".join(re.escape(word) for word in sorted(numbers, key=len, reverse=True))
    words = re.findall(rf"(?<![\w.+-])(?:{longest_first})(?![\w+-]|\.\d)", said.casefold())
    mentioned = {numbers[word] for word in words}
    if len(mentioned) != 1:
        raise UnreadableAction(f"{said[-200:]!r} names {len(mentioned) or 'no'} action{'s' * (len(mentioned) > 1)}")
    return mentioned.pop()


def _converted(space: spaces.Space[Any], data: Any) -> Any:
    match space:
        case spaces.Discrete() if type(data) is not int:
            raise ValueError("a whole number is required")
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            given = np.asarray(data)
            value = given.astype(space.dtype)
            if given.dtype.kind not in "iuf" or not np.isfinite(given).all():
                raise ValueError("finite numbers are required")
            if value.dtype.kind != "f" and (value != given).any():
                raise ValueError("whole numbers in the range of the type are required")
            return value
        case spaces.Tuple():
            return tuple(value_of(part, one) for part, one in zip(space.spaces, data, strict=True))
        case spaces.Dict():
            if set(data) != set(space.spaces):
                raise ValueError("wrong names")
            return {name: value_of(part, data[name]) for name, part in space.spaces.items()}
    return data


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
