# SPDX-License-Identifier: Apache-2.0
"""One `a.b.c=VALUE` of the command line: VALUE is TOML where it parses, else a string; a number indexes an array."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any, cast

from relax_core.api.errors import ConfigError
from relax_core.api.kinds import BY_TABLE
from relax_core.options.shorthand import expand
from relax_core.options.tree import KeyPath, Leaf, Node, Origin, Tree, is_component, merge, sourced


@dataclass(frozen=True, slots=True)
class Override:
    """A key and its value."""

    path: KeyPath
    value: Any

    @property
    def chooses(self) -> bool:
        """Whether it may choose a component: these go first, so that the order of arguments does not matter."""
        kind = BY_TABLE.get(self.path[0])
        named = self.path[:-1] if self.path[-1] == "name" else self.path
        return kind is not None and len(named) <= 1 + kind.many


def parse(text: str) -> Override:
    """Raises ConfigError for what is not `key=value`."""
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError("command line", repr(text), "write an override as table.key=value")
    return Override(path, _value(value.strip()))


def apply(tree: Tree, override: Override, origin: Origin, notices: list[str]) -> Tree:
    """The tree with one more value."""
    return cast(Tree, _place(tree, override.path, (), override.value, origin, notices))


def _place(node: Node | None, rest: KeyPath, path: KeyPath, value: Any, origin: Origin, notices: list[str]) -> Node:
    if not rest:
        return merge(node, sourced(expand(path, value), lambda _: origin, path), notices, path)
    head, here = rest[0], (*path, rest[0])
    if isinstance(node, list) or (isinstance(node, Leaf) and isinstance(node.value, list | tuple)):
        return _place_item(node, rest, path, value, origin, notices)
    if isinstance(node, Leaf) and node.value != {}:
        raise ConfigError(".".join(here), repr(value), f"{'.'.join(path)} is not a table ({node.origin})")
    if node is None and head.isdecimal():
        raise ConfigError(".".join(here), repr(value), f"write the whole list first: {'.'.join(path)}=[...]")
    table = node if isinstance(node, dict) else {}
    item = _place(table.get(head), rest[1:], here, value, origin, notices)
    return merge(table, {head: item}, notices, path) if is_component(path) else {**table, head: item}


def _place_item(
    node: Node, rest: KeyPath, path: KeyPath, value: Any, origin: Origin, notices: list[str]
) -> list[Node] | Leaf:
    items: list[Any] = list(node.value if isinstance(node, Leaf) else node)
    index = int(rest[0]) if rest[0].isdecimal() else -1
    if not 0 <= index <= len(items):
        fix = f"{'.'.join(path)} is a list of {len(items)}: write {'.'.join(path)}.0 to .{len(items)}"
        raise ConfigError(".".join((*path, rest[0])), repr(value), fix)
    scalars = isinstance(node, Leaf) and bool(items)
    if scalars and len(rest) == 1:
        return Leaf([*items[:index], value, *items[index + 1 :]], origin)
    if scalars:
        raise ConfigError(".".join((*path, *rest)), repr(value), f"{'.'.join(path)} is a list of plain values")
    old = items[index] if index < len(items) else None
    new = _place(old, rest[1:], (*path, rest[0]), value, origin, notices)
    if isinstance(new, Leaf) and isinstance(node, Leaf):
        return Leaf([new.value], origin)
    return [*items[:index], new, *items[index + 1 :]]


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text
