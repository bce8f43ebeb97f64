# SPDX-License-Identifier: Apache-2.0
"""Spaces of Gymnasium in words: values told as JSON, and actions read from what the policy wrote.

An action that can't be read is an `UnreadableAction`, whose message is for the policy. A new sort of space is a case in
`plain`, `value_of` and `untold`.
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
"""Most numbers of an observation that are still told in words."""
_TAG = re.compile(r"<(/?)action>", re.IGNORECASE)


class UnreadableAction(Exception):
    """Tell the policy: no action of the space was found in what it wrote."""


def untold(space: spaces.Space[Any]) -> str:
    """Name the part of a space that has no words: empty where all can be told and read."""
    match space:
        case spaces.Discrete() | spaces.Text():
            return ""
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            size = int(np.prod(space.shape))
            return f"{space}, which has {size} numbers," if size > MOST_NUMBERS else ""
        case spaces.Tuple():
            return next(filter(None, map(untold, space.spaces)), "")
        case spaces.Dict():
            return next(filter(None, map(untold, space.spaces.values())), "")
    return str(space)


def plain(space: spaces.Space[Any], value: Any, digits: int) -> Any:
    """Make a value of a space into what JSON has."""
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
        array = array.astype(np.float64).round(digits) + 0.0  # no digits of float32's own, and no negative zero
    return array.tolist()


def value_of(space: spaces.Space[Any], data: Any) -> Any:
    """Make what JSON has into a value of a space. Raises UnreadableAction where it is none."""
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
    """Read the action of a response: in its last `<action>..</action>`, else in its last line. Of a space of numbered
    actions a number or a name, alone or the only one that is mentioned; of other spaces JSON."""
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
        raise UnreadableAction(f"{said[-200:]!r} is no JSON list of {space}") from None
    return value_of(space, data)


def actions_of(space: spaces.Space[Any], names: Sequence[str]) -> str:
    """Say in words which actions there are."""
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
            raise ValueError("no whole number")
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            given = np.asarray(data)
            value = given.astype(space.dtype)
            if given.dtype.kind not in "iuf" or not np.isfinite(given).all():
                raise ValueError("no numbers")
            if value.dtype.kind != "f" and (value != given).any():
                raise ValueError("no whole numbers, or too large")
            return value
        case spaces.Tuple():
            return tuple(value_of(part, one) for part, one in zip(space.spaces, data, strict=True))
        case spaces.Dict():
            if set(data) != set(space.spaces):
                raise ValueError("other names")
            return {name: value_of(part, data[name]) for name, part in space.spaces.items()}
    return data


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
