# SPDX-License-Identifier: Apache-2.0
"""Layers of a configuration (files, mappings, overrides), merged into one tree with the origin of each value.

Tables merge key by key; any value that is not a table replaces the earlier value. Nothing is validated here.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from relax_core.api.component import BY_TABLE
from relax_core.api.errors import ConfigError
from relax_core.api.files import read_text
from relax_core.api.options import Secret
from relax_core.config.annotation import annotation_of, holds_path, models_in, types_in
from relax_core.config.run_config import OUTLIVE_NAME
from relax_core.registry.error_text import too_many_digits

KeyPath: TypeAlias = tuple[str, ...]
Source: TypeAlias = "Path | str | Mapping[str, Any]"
COMMAND_LINE = "command line"
MODULE_AND_NAME = re.compile(r"(?!\w+\.py:)[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""Text that names code in an importable module (`module:name`), rather than code in a file (`name.py:name`)."""
FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")
"""Text that names a function in a Python file."""
NESTED_COMPONENTS = {"engines": "engine", "environments": "algorithm"}
"""Array of tables -> key with which each of its tables chooses a second component."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where a value was written."""

    source: str
    """A file as the user named it, `command line`, `python` or `default`."""
    line: int = 0
    directory: Path = Path()
    """Directory to which relative paths in the value refer."""

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
    """Merge all layers into one tree; also return a notice for each change of a component that dropped options."""
    notices: list[str] = []
    tree: Tree = {}
    for source in sources:
        tree = cast(Tree, merge(tree, read_layer(source, directory), notices))
    origin = Origin(COMMAND_LINE, directory=directory)

    def chooses(path: KeyPath) -> bool:
        kind, named = BY_TABLE.get(path[0]), path[:-1] if path[-1] == "name" else path
        return kind is not None and len(named) <= 1 + kind.many

    # Choices of components go first, so that the order of the arguments does not matter.
    for path, value in sorted(map(parse_override, overrides), key=lambda override: not chooses(override[0])):
        tree = cast(Tree, _place(tree, path, (), value, origin, notices))
    return tree, notices


def read_layer(source: Source, directory: Path) -> Tree:
    """Read one file or mapping, with short forms expanded. Raises ConfigError for a file that is not TOML."""
    data: Mapping[str, Any]
    positions: dict[KeyPath, int] = {}
    if isinstance(source, Mapping):
        data = source
        anywhere = Origin("python", directory=directory)
    else:
        text = _text(source)
        try:
            data = tomllib.loads(text)
            repr(data)  # a hexadecimal number is read, but may have too many digits to be shown
        except (ValueError, RecursionError) as error:
            is_long = type(error) is ValueError
            fault = too_many_digits(text) if is_long else f"text that is not TOML: {error}"
            raise ConfigError(str(source), fault, "correct that line") from error
        positions = key_lines(text)
        anywhere = Origin(str(source), 0, Path(os.path.abspath(source)).parent)

    def locate(path: KeyPath) -> Origin:
        known = (positions[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in positions)
        return Origin(anywhere.source, next(known, 0), anywhere.directory)

    return cast(Tree, with_origins({key: expand((key,), value) for key, value in data.items()}, locate))


def _text(source: Path | str) -> str:
    try:
        return read_text(source, "utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("configuration", f"{source}, which does not exist", "name a TOML file or a recipe") from None
    except OSError as error:
        raise ConfigError(str(source), error.strerror or "an error", "name a readable TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(source), "bytes that are not UTF-8", "save the file as UTF-8 text") from error


def plugins_of(tree: Tree) -> tuple[str, ...]:
    """Return the absolute paths of the files in the tree's `plugins`."""
    leaf = tree.get("plugins")
    if not isinstance(leaf, Leaf) or not isinstance(leaf.value, list | tuple):
        return ()
    return tuple(_absolute(str(item) or ".", leaf.origin) for item in leaf.value)


def expand(path: KeyPath, value: Any) -> object:
    """Expand the short form of a table; return any other value unchanged.

    `algorithm = "grpo"` becomes `{name = "grpo"}`, and the engine of a pool likewise. `placement = "async"` becomes
    `{mode = "async"}`. A folder at `teachers` becomes a list with one teacher. The reward `"file.py:name"` becomes the
    reward `function` with the label `name`.
    """
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
    chosen = {"name": value} if chooses and isinstance(value, str) else value
    if table == "rewards" and depth == 2 and isinstance(chosen, Mapping):
        return _with_function(chosen)
    return chosen


def _with_function(reward: Mapping[str, Any]) -> Mapping[str, object]:
    """Return a reward's table with a function that is named in the place of a component as the option `function`."""
    place = reward.get("name")
    if not isinstance(place, str) or not (FUNCTION.fullmatch(place) or MODULE_AND_NAME.fullmatch(place)):
        return reward
    label = place.rpartition(":")[2].replace("_", "-").strip("-")
    return {"label": label, **reward, "name": "function", "function": place}


def with_origins(value: Any, locate: Origin | Callable[[KeyPath], Origin], path: KeyPath = ()) -> Node:
    """Return plain data as a tree whose leaves have origins; a key with the value None is left out."""
    if isinstance(value, Mapping) and (value or not path):
        items = {str(key): item for key, item in value.items() if item is not None}
        return {key: with_origins(item, locate, (*path, key)) for key, item in items.items()}
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if is_list and value and all(isinstance(item, Mapping) for item in value):
        return [with_origins(item, locate, (*path, str(index))) for index, item in enumerate(value)]
    return Leaf(value, locate if isinstance(locate, Origin) else locate(path))


def plain(node: Node, annotation: Any = None) -> object:
    """Return a tree as plain data without origins, with paths made absolute.

    A path in a file is relative to the file's folder; a path on the command line, to the current directory. The
    annotation tells which values are paths. If the annotation also allows text, a value that contains `{` or a line
    break, or that names code as `module:name`, is text.
    """
    if isinstance(node, list):
        return [plain(item, annotation) for item in node]
    if isinstance(node, dict):
        models = models_in(annotation)
        fields = {name: annotation_of(field) for model in models for name, field in model.model_fields.items()}
        return {key: plain(item, fields.get(key) if models else annotation) for key, item in node.items()}
    value = node.value
    if annotation is None:
        return value
    if isinstance(value, list | tuple):
        return [plain(Leaf(item, node.origin), annotation) for item in value]
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(text, str):
        if Secret in types_in(annotation) and text.startswith("file:"):
            return f"file:{_absolute(text.removeprefix('file:'), node.origin)}"
        is_text = "{" in text or "\n" in text or MODULE_AND_NAME.fullmatch(text)
        if holds_path(annotation) and not (str in types_in(annotation) and is_text):
            return _absolute(text, node.origin)
    return text


def leaves(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Leaf]]:
    """Yield all leaves with their paths; an index of an array counts as a key."""
    if isinstance(node, Leaf):
        yield path, node
        return
    for key, item in enumerate(node) if isinstance(node, list) else node.items():
        yield from leaves(item, (*path, str(key)))


def origin_at(tree: Node, key: str) -> Origin:
    """Return the origin of a key: for a table the origin of its first leaf, for an absent key `DEFAULT`."""
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
    """Return `lower` overridden by `upper`; a table that changes its component drops the former component's options."""
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
    """Return True if the table at this path chooses a component."""
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


def parse_override(text: str) -> tuple[KeyPath, object]:
    """Parse `a.b.c=VALUE` into a path and a value: VALUE is TOML if it parses as TOML, else text.

    A number in the path is an index of an array. Raises ConfigError if the text is not `key=value`.
    """
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(COMMAND_LINE, repr(text), "write an override as table.key=value")
    value = value.strip()
    try:
        parsed = tomllib.loads(f"value = {value}")
        repr(parsed)  # raises ValueError for a number of too many digits
    except (ValueError, RecursionError):
        parsed = {}
    return path, parsed["value"] if parsed.keys() == {"value"} else value


def _place(node: Node | None, rest: KeyPath, path: KeyPath, value: Any, origin: Origin, notices: list[str]) -> Node:
    """Return a copy of `node`, which is at `path`, with a value placed at the relative path `rest`."""
    if not rest:
        return merge(node, with_origins(expand(path, value), origin, path), notices, path)
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
    """Return an array with a value set at or below an item; the index after the last item appends an item."""
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


def _absolute(path: str, origin: Origin) -> str:
    """Return an absolute path with links unresolved: Python finds a virtual environment by the interpreter's path."""
    return os.path.abspath(origin.directory / Path(path).expanduser()) if path else path


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line of every table header and key of valid TOML; an index of an array counts as a key.

    The text is split into statements; a statement is the smallest number of lines that parses.
    """
    found: dict[KeyPath, int] = {}
    sizes: dict[KeyPath, int] = {}
    table: KeyPath = ()
    start, pending = 1, ""
    for number, line in enumerate(text.split("\n"), start=1):
        if not pending:
            start = number
        pending = f"{pending}\n{line}" if pending else line
        try:
            data = tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            continue
        header = pending.lstrip()
        pending = ""
        if header.startswith("["):
            table = _header_path(data, sizes, opens=header.startswith("[["))
            found.setdefault(table, start)
        else:
            found.update({(*table, *path): start for path in _key_paths(data)})
    return found


def _header_path(node: Any, sizes: dict[KeyPath, int], *, opens: bool) -> KeyPath:
    """Return the path of a parsed header, with an index after each array of tables; `opens`: for `[[...]]`."""
    path: KeyPath = ()
    while node:
        if isinstance(node, list):
            node = node[0]
            continue
        key, node = next(iter(node.items()))
        path = (*path, key)
        if opens and node == [{}]:
            sizes[path] = sizes.get(path, 0) + 1
        if path in sizes:
            path = (*path, str(sizes[path] - 1))
    return path


def _key_paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _key_paths(item, (*path, str(key)))
