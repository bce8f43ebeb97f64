# SPDX-License-Identifier: Apache-2.0
"""On which line of a TOML file a key stands.

tomlkit and tomllib keep no positions, so the text is cut into statements: a statement is the fewest lines
that tomllib can parse. The text is known to be valid TOML.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from relax_core.options.tree import KeyPath


def lines(text: str) -> dict[KeyPath, int]:
    """Line of every table header and key; indices of arrays of tables count as keys."""
    found: dict[KeyPath, int] = {}
    sizes: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, statement in _statements(text):
        if statement.lstrip().startswith("["):
            table = _indexed(_header(statement), sizes, statement.lstrip().startswith("[["))
            found.setdefault(table, number)
            continue
        for path in _keys(tomllib.loads(statement)):
            found[(*table, *path)] = number
    return found


def _statements(text: str) -> Iterator[tuple[int, str]]:
    start, pending = 1, ""
    for number, line in enumerate(text.split("\n"), start=1):
        if not pending:
            start = number
        pending = f"{pending}\n{line}" if pending else line
        try:
            tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            continue
        if pending.strip() and not pending.lstrip().startswith("#"):
            yield start, pending
        pending = ""


def _header(statement: str) -> KeyPath:
    path: list[str] = []
    node: Any = tomllib.loads(statement)
    while node:
        if isinstance(node, list):
            node = node[0]
            continue
        key, node = next(iter(node.items()))
        path.append(key)
    return tuple(path)


def _indexed(path: KeyPath, sizes: dict[KeyPath, int], opens: bool) -> KeyPath:
    """The path with the index of each array of tables it goes through; `opens` starts a new element of the last."""
    full: KeyPath = ()
    for depth, key in enumerate(path, start=1):
        full = (*full, key)
        if opens and depth == len(path):
            sizes[full] = sizes.get(full, 0) + 1
        if full in sizes:
            full = (*full, str(sizes[full] - 1))
    return full


def _keys(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _keys(item, (*path, str(key)))
