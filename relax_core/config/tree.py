# SPDX-License-Identifier: Apache-2.0
"""A layer as a tree whose leaves know where they were written; merging two of them.

Tables merge key by key, everything else is replaced whole. Nothing here knows a model or a file.

On which line of a TOML file a key stands.

tomlkit and tomllib keep no positions, so the text is cut into statements: a statement is the fewest lines
that tomllib can parse. The text is known to be valid TOML.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from relax_core.api.component import BY_TABLE
from relax_core.config.choice import OUTLIVE_NAME

KeyPath: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written."""

    source: str
    """A file as the user named it, `command line`, `python` or `default`."""
    line: int = 0
    directory: Path = Path()
    """What relative paths are relative to."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value: a scalar, a list of scalars, or an empty table."""

    value: Any
    origin: Origin


Node: TypeAlias = "dict[str, Node] | list[Node] | Leaf"
Tree: TypeAlias = "dict[str, Node]"


def sourced(value: Any, locate: Callable[[KeyPath], Origin], path: KeyPath = ()) -> Node:
    """Plain data with an origin at every leaf. A None is a key that was not written."""
    if isinstance(value, Mapping) and (value or not path):
        return {str(key): sourced(item, locate, (*path, str(key))) for key, item in value.items() if item is not None}
    if _is_tables(value):
        return [sourced(item, locate, (*path, str(index))) for index, item in enumerate(value)]
    return Leaf(value, locate(path))


def plain(node: Node) -> Any:
    """The values alone."""
    if isinstance(node, Leaf):
        return node.value
    if isinstance(node, list):
        return [plain(item) for item in node]
    return {key: plain(item) for key, item in node.items()}


def leaves(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Leaf]]:
    """Every leaf with its path; indices of arrays count as keys."""
    if isinstance(node, Leaf):
        yield path, node
        return
    items = enumerate(node) if isinstance(node, list) else node.items()
    for key, item in items:
        yield from leaves(item, (*path, str(key)))


def merge(lower: Node | None, upper: Node, notices: list[str], path: KeyPath = ()) -> Node:
    """`upper` over `lower`; a component of another name starts without the options of the former."""
    if isinstance(upper, Leaf) and upper.value == {} and isinstance(lower, dict):
        return lower
    if not (isinstance(lower, dict) and isinstance(upper, dict)):
        return upper
    if is_component(path):
        lower = _without_replaced(lower, upper, notices, path)
    merged = dict(lower)
    for key, item in upper.items():
        merged[key] = merge(lower.get(key), item, notices, (*path, key))
    return merged


def is_component(path: KeyPath) -> bool:
    """Whether the table at this path chooses a component."""
    kind = BY_TABLE.get(path[0]) if path else None
    return kind is not None and len(path) == (2 if kind.many else 1)


def _without_replaced(lower: Tree, upper: Tree, notices: list[str], path: KeyPath) -> Tree:
    old, new = lower.get("name"), upper.get("name")
    if not (isinstance(old, Leaf) and isinstance(new, Leaf)) or old.value == new.value:
        return lower
    kept = {key: item for key, item in lower.items() if key == "name" or (len(path) == 2 and key in OUTLIVE_NAME)}
    dropped = [f"{key} ({next(leaves(item))[1].origin})" for key, item in lower.items() if key not in kept]
    if dropped:
        table = ".".join(path)
        change = f"{table} is {new.value} ({new.origin}) instead of {old.value} ({old.origin})"
        notices.append(f"{change}: dropped {', '.join(dropped)}")
    return kept


def _is_tables(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and bool(value) and all(isinstance(item, Mapping) for item in value)


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
