# SPDX-License-Identifier: Apache-2.0
"""`[[stages]]`: runs one after another. Each table is a layer over the rest of the document, for one of them.

A stage trains what the one before it exported, so only the first one's model is named. Errors name `stages[1].field`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from relax_core.api.errors import ConfigError
from relax_core.options.problems import ConfigProblems
from relax_core.options.run_config import RunConfig
from relax_core.options.shorthand import expand
from relax_core.options.tree import KeyPath, Leaf, Node, Tree, leaves, sourced

KEY = "stages"
OF_THE_RUN = ("run", "notify", "plugins", "sinks", "seed", KEY)
"""The same in every stage."""
COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Stage:
    """One of several runs on one model."""

    name: str
    config: RunConfig


def split(tree: Tree) -> tuple[Tree, list[Tree]]:
    """The document without its stages, and the layer of each, bare strings written out. Raises ConfigError."""
    rest, node = {key: item for key, item in tree.items() if key != KEY}, tree.get(KEY, [])
    if isinstance(node, Leaf) and node.value in ([], {}, ()):
        node = []
    if not isinstance(node, list) or not all(isinstance(item, dict) for item in node):
        raise ConfigError(KEY, "something that is no array of tables", "write [[stages]] before the keys of each")
    own = [{key: _written_out(key, item) for key, item in cast(Tree, stage).items()} for stage in node]
    for at, stage in enumerate(own):
        _check(stage, at)
    _check_overrides(rest, own)
    return rest, own


def name_of(stage: Tree, at: int) -> str:
    """Its own, else that of its algorithm, else its number."""
    named, algorithm = stage.get("name"), stage.get("algorithm")
    chosen = algorithm.get("name") if isinstance(algorithm, dict) else None
    leaf = named or chosen
    return str(leaf.value) if isinstance(leaf, Leaf) else f"stage-{at}"


@contextmanager
def naming(at: int | None) -> Iterator[None]:
    """Errors within name the stage."""
    try:
        yield
    except ConfigProblems as problems:
        if at is None:
            raise
        raise ConfigProblems([_of_stage(error, at) for error in problems.errors]) from problems
    except ConfigError as error:
        if at is None:
            raise
        raise _of_stage(error, at) from error


def _of_stage(error: ConfigError, at: int) -> ConfigError:
    return ConfigError(f"{KEY}[{at}].{error.field}", error.got, error.fix)


def _written_out(key: str, node: Node) -> Node:
    if not isinstance(node, Leaf):
        return node
    return sourced(expand((key,), node.value), lambda _: node.origin, (key,))


def _check(stage: Tree, at: int) -> None:
    for key in OF_THE_RUN:
        if key in stage:
            raise ConfigError(f"{KEY}[{at}].{key}", "a key of the whole run", "write it outside of [[stages]]")
    model = stage.get("model")
    if at and isinstance(model, dict) and "path" in model:
        fix = "leave it out: a stage goes on with what the one before it exported"
        raise ConfigError(f"{KEY}[{at}].model.path", "a model", fix)


def _check_overrides(rest: Tree, own: list[Tree]) -> None:
    """One that every stage sets for itself would change nothing."""
    for path, leaf in leaves(rest):
        if own and leaf.origin.source == COMMAND_LINE and all(_has(stage, path) for stage in own):
            key = ".".join(path)
            raise ConfigError(
                key, repr(leaf.value), f"every stage has its own: write {KEY}.0.{key}=... for the first one"
            )


def _has(tree: Tree, path: KeyPath) -> bool:
    node: Node | None = tree
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    return node is not None
