# SPDX-License-Identifier: Apache-2.0
"""The layers of a configuration read and merged: component defaults, files or mappings left to right, overrides.

The result is a tree with origins; nothing is validated here.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from relax_core.api.errors import ConfigError
from relax_core.options.lines import lines
from relax_core.options.override import apply, parse
from relax_core.options.shorthand import written_out
from relax_core.options.tree import KeyPath, Leaf, Origin, Tree, merge, sourced

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
