# SPDX-License-Identifier: Apache-2.0
"""The layers of a configuration read and merged: component defaults, files or mappings left to right, overrides.

The result is a tree with origins; nothing is validated here.

One `a.b.c=VALUE` of the command line: VALUE is TOML where it parses, else a string; a number indexes an array.

Bare strings written out as the tables they are short for.

Relative paths made absolute: each is relative to the file it was written in, those of the command line to its directory.

What is a path is said by the annotation. Where it allows text too, text with a `{` or a line break is no path.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from relax_core.api.component import BY_TABLE
from relax_core.api.errors import ConfigError
from relax_core.config.annotation import annotation_of, holds_path, holds_secret, holds_text, models_in
from relax_core.config.tree import KeyPath, Leaf, Node, Origin, Tree, is_component, lines, merge, sourced


def written_out(data: Mapping[str, Any]) -> dict[str, Any]:
    """A whole layer."""
    return {key: expand((key,), value) for key, value in data.items()}


def expand(path: KeyPath, value: Any) -> Any:
    """`grpo` at `algorithm` is `{name = "grpo"}`, `async` at `placement` is `{mode = "async"}`, a folder at `teachers` one
    teacher, and the engine of a pool is a component like that of the run."""
    if path == ("placement",) and isinstance(value, str):
        return {"mode": value}
    if path == ("teachers",):
        teachers = [value] if isinstance(value, str | os.PathLike | Mapping) else value
        if not isinstance(teachers, list | tuple):
            return value
        return [{"path": teacher} if isinstance(teacher, str | os.PathLike) else teacher for teacher in teachers]
    if path == ("engines",) and isinstance(value, list | tuple):
        return [expand(("engines", ""), pool) for pool in value]
    if path[0] == "engines" and len(path) == 2 and isinstance(value, Mapping) and "engine" in value:
        return {**value, "engine": expand((*path, "engine"), value["engine"])}
    if path[0] == "engines" and path[-1] == "engine" and len(path) == 3:
        return {"name": value} if isinstance(value, str) else value
    if path[0] == "environments" and path[-1] == "algorithm" and len(path) == 3:
        return {"name": value} if isinstance(value, str) else value
    if path[0] == "environments" and len(path) == 2 and isinstance(value, Mapping) and "algorithm" in value:
        return {**value, "algorithm": expand((*path, "algorithm"), value["algorithm"])}
    kind = BY_TABLE.get(path[0])
    if kind is None or len(path) > 1 + kind.many:
        return value
    if kind.many and len(path) == 1:
        items = [value] if isinstance(value, str | Mapping) else value
        return [expand((*path, ""), item) for item in items] if isinstance(items, list | tuple) else value
    return {"name": value} if isinstance(value, str) else value


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


Source: TypeAlias = "Path | str | Mapping[str, Any]"


def read_layers(sources: Sequence[Source], overrides: Sequence[str], directory: Path) -> tuple[Tree, list[str]]:
    """All layers in one tree, and a line for every change that dropped something."""
    notices: list[str] = []
    tree: Tree = {}
    for source in sources:
        tree = cast(Tree, merge(tree, read_layer(source, directory), notices))
    chosen = [parse(text) for text in overrides]
    for override in sorted(chosen, key=lambda override: not override.chooses):
        tree = apply(tree, override, Origin("command line", directory=directory), notices)
    return tree, notices


def read_layer(source: Source, directory: Path) -> Tree:
    """One layer with origins, bare strings written out."""
    if isinstance(source, Mapping):
        origin = Origin("python", directory=directory)
        return cast(Tree, sourced(written_out(source), lambda path: origin))
    text = _text(source)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(source), f"text that is not TOML: {error}", "correct it there") from error
    found = lines(text)
    home = Path(os.path.abspath(source)).parent

    def locate(path: KeyPath) -> Origin:
        known = (found[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in found)
        return Origin(str(source), next(known, 0), home)

    return cast(Tree, sourced(written_out(data), locate))


def plugin_files(
    sources: Sequence[Source], overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Files that `plugins` names, absolute: the catalogue has to know them before options can be checked."""
    tree, _ = read_layers([base or {}, *sources], overrides, Path.cwd())
    leaf = tree.get("plugins")
    if not isinstance(leaf, Leaf) or not isinstance(leaf.value, list | tuple):
        return ()
    return tuple(os.path.abspath(leaf.origin.directory / Path(str(item)).expanduser()) for item in leaf.value)


def _text(source: Path | str) -> str:
    try:
        return Path(source).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("configuration", f"{source}, which does not exist", "name a TOML file or a recipe") from None
    except OSError as error:
        raise ConfigError(str(source), error.strerror or "an error", "name a TOML file that can be read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(source), "bytes that are not UTF-8", "save it as UTF-8 text") from error


def resolve_paths(node: Node, annotation: Any) -> Node:
    """The same tree with absolute paths."""
    if isinstance(node, list):
        return [resolve_paths(item, annotation) for item in node]
    if isinstance(node, Leaf):
        return Leaf(_rooted_value(node.value, annotation, node.origin), node.origin)
    models = models_in(annotation)
    if not models:
        return {key: resolve_paths(item, annotation) for key, item in node.items()}
    fields = {name: annotation_of(field) for model in models for name, field in model.model_fields.items()}
    return {key: resolve_paths(item, fields[key]) if key in fields else item for key, item in node.items()}


def _rooted_value(value: Any, annotation: Any, origin: Origin) -> Any:
    if isinstance(value, list | tuple):
        return [_rooted_value(item, annotation, origin) for item in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return value
    if holds_secret(annotation) and value.startswith("file:"):
        return f"file:{absolute(value.removeprefix('file:'), origin)}"
    if not holds_path(annotation) or (holds_text(annotation) and ("{" in value or "\n" in value)):
        return value
    return absolute(value, origin)


def absolute(path: str, origin: Origin) -> str:
    """Links stay links: an interpreter of a virtual environment is found by its own path."""
    return os.path.abspath(origin.directory / Path(path).expanduser()) if path else path
