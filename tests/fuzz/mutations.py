# SPDX-License-Identifier: Apache-2.0
"""Mutations of valid inputs, all drawn from one seeded source: of bytes, and of trees of plain data (TOML, JSON, messages)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

KEYS = ("", " ", "name", "schema", "a.b", "__class__", "\x1b[31m", "ключ", "x" * 300, "0", "-1")
SCALARS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.0, -0.5, 1e308, float("nan"), float("inf"),
    float("-inf"), "", " ", "0", "-1", "nan", "true", "a\nb", "\x1b[2J\x07", "\u202eevil", "\x00", "../../etc/passwd",
    "/dev/zero", "/proc/self/mem", "~", "file:///etc/passwd", "env:HOME", "{{ 9 ** 9 }}", "x" * 5000, "\ud800", [], {},
    [[]], {"": {}}, [None], "😀",
)  # fmt: skip
"""Values that stand in for others."""


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Change a few places: bits, runs of bytes, lengths, the order of pieces, or the end."""
    body = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        size = len(body)
        at, length = (random.randrange(size) if size else 0), random.choice((1, 1, 2, 4, 8, 64))
        choice = random.randrange(9)
        if choice == 0 and size:
            body[at] ^= 1 << random.randrange(8)
        elif choice == 1:
            body[at : at + length] = random.randbytes(length)
        elif choice == 2:
            del body[at : at + length]
        elif choice == 3:
            body[at:at] = body[at : at + length]
        elif choice == 4:
            body[at : at + length] = random.choice((b"\xff", b"\x00", b"\x7f", b"\x80")) * length
        elif choice == 5:
            del body[at:]
        elif choice == 6:
            body[at:at] = random.choice(
                (b"\x00", b"\n", b'"', b"\\", b"{", b"]", b"\x1b[31m", b"\xc3\x28", b"\xed\xa0\x80")
            )
        elif choice == 7 and size > 8:
            other = random.randrange(size)
            body[at : at + 8], body[other : other + 8] = body[other : other + 8], body[at : at + 8]
        elif choice == 8:
            number = random.choice((0, 1, -1, 2**31 - 1, 2**32 - 1, 2**63 - 1)) & (2**64 - 1)
            width = random.choice((2, 4, 8))
            body[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, random.choice(("little", "big")))
    return bytes(body)


def mutate_tree(tree: Any, random: Random) -> Any:
    """Change a few places of plain data: drop, double, rename or move keys, change types, nest deeply."""
    copy = json.loads(json.dumps(tree))
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        places = list(_places(copy, lambda value: None))
        if not places:
            return random.choice(SCALARS)
        held, key, put = random.choice(places)
        value, choice = held[key], random.randrange(9)
        if choice <= 2:
            put(random.choice(SCALARS))
        elif choice == 3:
            del held[key]
        elif choice == 4 and isinstance(held, dict):
            held[random.choice((*KEYS, f"{key}s", str(key)[:-1], str(key).upper()))] = held.pop(key)
        elif choice == 4:
            held.insert(key, json.loads(json.dumps(value)))
        elif choice == 5:
            other, place, _ = random.choice(places)
            if place in other if isinstance(other, dict) else place < len(other):
                put(json.loads(json.dumps(other[place])))
        elif choice == 6:
            put(random.choice(([value], {"name": value}, str(value), [value, value])))
        elif choice == 7:
            put(_nested(random.choice((3, 60, 200)), random.random() < 0.5))
        elif choice == 8 and isinstance(value, (int, float)) and not isinstance(value, bool):
            put(random.choice((value * -1, value + 1, value * 10**6, str(value), [value])))
    return copy


def json_bytes(tree: Any, random: Random) -> bytes:
    """A mutated tree as JSON, whose text is broken too now and then."""
    text = json.dumps(mutate_tree(tree, random), ensure_ascii=random.random() < 0.5)
    body = text.encode("utf-8", errors="surrogatepass")
    if random.random() < 0.02:
        deep = random.choice((500, 100_000))
        body = b'{"a":' * deep + b"1" + b"}" * deep
    return mutate_bytes(body, random) if random.random() < 0.25 else body


def _nested(depth: int, in_lists: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if in_lists else {"a": value}
    return value


def _places(value: Any, put: Callable[[Any], None]) -> Iterator[tuple[Any, Any, Callable[[Any], None]]]:
    """Every value within a tree: what holds it, under which key, and how to put another one there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:

        def replace(new: Any, held: Any = value, key: Any = key) -> None:
            held[key] = new

        yield value, key, replace
        if _depth_of(value[key]) < 40:
            yield from _places(value[key], replace)


def _depth_of(value: Any) -> int:
    """How deep a tree is along its first branches."""
    depth = 0
    while isinstance(value, (dict, list)) and value:
        value, depth = next(iter(value.values() if isinstance(value, dict) else value)), depth + 1
    return depth
