# SPDX-License-Identifier: Apache-2.0
"""Layers of a configuration (files, mappings from Python, overrides) merged into one tree that knows where each value is from.

Tables merge key by key, everything else is replaced whole. Nothing is validated here.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from relax_core.api.component import BY_TABLE
from relax_core.api.errors import ConfigError
from relax_core.config.annotation import annotation_of, holds_path, holds_secret, holds_text, models_in
from relax_core.config.run_config import OUTLIVE_NAME
from relax_core.config.toml_text import key_lines

KeyPath: TypeAlias = tuple[str, ...]
Source: TypeAlias = "Path | str | Mapping[str, Any]"
COMMAND_LINE = "command line"
NESTED_COMPONENTS = {"engines": "engine", "environments": "algorithm"}
"""By array of tables, the key in each of its tables that chooses a component."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where a value was written."""

    source: str
    """A file as the user named it, `command line`, `python` or `default`."""
    line: int = 0
    directory: Path = Path()
    """The directory that relative paths start from."""

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


def read_layers(sources: Sequence[Source], overrides: Sequence[str], directory: Path) -> tuple[Tree, list[str]]:
    """Merge all layers into one tree; also give a line for every change of a component that dropped options."""
    notices: list[str] = []
    tree: Tree = {}
    for source in sources:
        tree = cast(Tree, merge(tree, read_layer(source, directory), notices))
    origin = Origin(COMMAND_LINE, directory=directory)
    # Choices of components go first, so that the order of the arguments does not matter.
    for override in sorted(map(parse_override, overrides), key=lambda override: not override.chooses):
        tree = cast(Tree, _place(tree, override.path, (), override.value, origin, notices))
    return tree, notices


def read_layer(source: Source, directory: Path) -> Tree:
    """Read one file or mapping; short forms are written out. Raises ConfigError for a file that is no TOML."""
    data: Mapping[str, Any]
    positions: dict[KeyPath, int] = {}
    if isinstance(source, Mapping):
        data = source
        anywhere = Origin("python", directory=directory)
    else:
        text = _text(source)
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(str(source), f"text that is not TOML: {error}", "correct it there") from error
        positions = key_lines(text)
        anywhere = Origin(str(source), 0, Path(os.path.abspath(source)).parent)

    def locate(path: KeyPath) -> Origin:
        known = (positions[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in positions)
        return Origin(anywhere.source, next(known, 0), anywhere.directory)

    return cast(Tree, with_origins({key: expand((key,), value) for key, value in data.items()}, locate))


def _text(source: Path | str) -> str:
    try:
        return Path(source).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("configuration", f"{source}, which does not exist", "name a TOML file or a recipe") from None
    except OSError as error:
        raise ConfigError(str(source), error.strerror or "an error", "name a TOML file that can be read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(source), "bytes that are not UTF-8", "save it as UTF-8 text") from error


def plugin_files(
    sources: Sequence[Source], overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Absolute paths of the files that `plugins` names: the catalogue has to know them before options can be checked."""
    return plugins_of(read_layers([base or {}, *sources], overrides, Path.cwd())[0])


def plugins_of(tree: Tree) -> tuple[str, ...]:
    """Absolute paths of the files that `plugins` of this tree names."""
    leaf = tree.get("plugins")
    if not isinstance(leaf, Leaf) or not isinstance(leaf.value, list | tuple):
        return ()
    return tuple(_absolute(str(item) or ".", leaf.origin) for item in leaf.value)


def expand(path: KeyPath, value: Any) -> Any:
    """Write a short form out: `grpo` at `algorithm` is `{name = "grpo"}`, `async` at `placement` is `{mode = "async"}`, a
    folder at `teachers` is one teacher, and the engine of a pool is a component like that of the run."""
    table, depth = path[0], len(path)
    if path == ("placement",) and isinstance(value, str):
        return {"mode": value}
    if path == ("teachers",):
        teachers = [value] if isinstance(value, str | os.PathLike | Mapping) else value
        if not isinstance(teachers, list | tuple):
            return value
        return [{"path": teacher} if isinstance(teacher, str | os.PathLike) else teacher for teacher in teachers]
    if path == ("engines",):
        return [expand(("engines", ""), pool) for pool in value] if isinstance(value, list | tuple) else value
    nested = NESTED_COMPONENTS.get(table)
    if nested and depth == 2 and isinstance(value, Mapping) and nested in value:
        return {**value, nested: expand((*path, nested), value[nested])}
    kind = BY_TABLE.get(table)
    if kind is not None and kind.many and depth == 1:
        items = [value] if isinstance(value, str | Mapping) else value
        return [expand((*path, ""), item) for item in items] if isinstance(items, list | tuple) else value
    chooses = is_component(path) or (depth == 3 and path[-1] == nested)
    return {"name": value} if chooses and isinstance(value, str) else value


def with_origins(value: Any, locate: Callable[[KeyPath], Origin], path: KeyPath = ()) -> Node:
    """Give every leaf of plain data its origin. A None is a key that was not written."""
    if isinstance(value, Mapping) and (value or not path):
        items = {str(key): item for key, item in value.items() if item is not None}
        return {key: with_origins(item, locate, (*path, key)) for key, item in items.items()}
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if is_list and value and all(isinstance(item, Mapping) for item in value):
        return [with_origins(item, locate, (*path, str(index))) for index, item in enumerate(value)]
    return Leaf(value, locate(path))


def plain(node: Node) -> Any:
    """Strip the origins off."""
    if isinstance(node, Leaf):
        return node.value
    if isinstance(node, list):
        return [plain(item) for item in node]
    return {key: plain(item) for key, item in node.items()}


def leaves(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Leaf]]:
    """Walk over the leaves with their paths; indices of arrays count as keys."""
    if isinstance(node, Leaf):
        yield path, node
        return
    for key, item in enumerate(node) if isinstance(node, list) else node.items():
        yield from leaves(item, (*path, str(key)))


def origin_at(tree: Node, key: str) -> Origin:
    """Find where a key was written; for a table its first line, for an absent key `default`."""
    node: Node | None = tree
    for part in key.split("."):
        if isinstance(node, Leaf):
            return node.origin
        if isinstance(node, list):
            node = node[int(part)] if part.isdecimal() and int(part) < len(node) else None
        elif node is not None:
            node = node.get(part)
    first = next(leaves(node), None) if node is not None else None
    return first[1].origin if first else DEFAULT


def merge(lower: Node | None, upper: Node, notices: list[str], path: KeyPath = ()) -> Node:
    """Lay `upper` over `lower`; a component of another name starts without the options of the former."""
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
        change = f"{'.'.join(path)} is {new.value} ({new.origin}) instead of {old.value} ({old.origin})"
        notices.append(f"{change}: dropped {', '.join(dropped)}")
    return kept


@dataclass(frozen=True, slots=True)
class Override:
    """A key of the command line and its value."""

    path: KeyPath
    value: Any

    @property
    def chooses(self) -> bool:
        """Whether it may choose a component."""
        kind = BY_TABLE.get(self.path[0])
        named = self.path[:-1] if self.path[-1] == "name" else self.path
        return kind is not None and len(named) <= 1 + kind.many


def parse_override(text: str) -> Override:
    """Parse `a.b.c=VALUE`: VALUE is TOML where it parses, else text; a number in the key indexes an array.

    Raises ConfigError for what is not `key=value`.
    """
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(COMMAND_LINE, repr(text), "write an override as table.key=value")
    value = value.strip()
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    return Override(path, parsed["value"] if parsed.keys() == {"value"} else value)


def _place(node: Node | None, rest: KeyPath, path: KeyPath, value: Any, origin: Origin, notices: list[str]) -> Node:
    """Put a value at `rest` below the node that stands at `path`."""
    if not rest:
        return merge(node, with_origins(expand(path, value), lambda _: origin, path), notices, path)
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
    """Put a value at or below an item of an array; the index after its last item adds one."""
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


def resolve_paths(node: Node, annotation: Any) -> Node:
    """Make paths absolute: each is relative to the file it was written in, those of the command line to its directory.

    The annotation says what is a path. Where it allows text too, text with a `{` or a line break is no path.
    """
    if isinstance(node, list):
        return [resolve_paths(item, annotation) for item in node]
    if isinstance(node, Leaf):
        return Leaf(_absolute_value(node.value, annotation, node.origin), node.origin)
    models = models_in(annotation)
    if not models:
        return {key: resolve_paths(item, annotation) for key, item in node.items()}
    fields = {name: annotation_of(field) for model in models for name, field in model.model_fields.items()}
    return {key: resolve_paths(item, fields[key]) if key in fields else item for key, item in node.items()}


def _absolute_value(value: Any, annotation: Any, origin: Origin) -> Any:
    if isinstance(value, list | tuple):
        return [_absolute_value(item, annotation, origin) for item in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return value
    if holds_secret(annotation) and value.startswith("file:"):
        return f"file:{_absolute(value.removeprefix('file:'), origin)}"
    if not holds_path(annotation) or (holds_text(annotation) and ("{" in value or "\n" in value)):
        return value
    return _absolute(value, origin)


def _absolute(path: str, origin: Origin) -> str:
    """Links stay links: an interpreter of a virtual environment is found by its own path."""
    return os.path.abspath(origin.directory / Path(path).expanduser()) if path else path
