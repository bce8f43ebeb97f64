# SPDX-License-Identifier: Apache-2.0
"""`compose`: files, mappings and overrides become one checked `RunConfig` that remembers where each value is from.

From a merged tree to a `RunConfig`: defaults filled in, paths made absolute, everything validated at once.

Each component's options are validated by its own class, found through the catalogue. No combinations are checked here.

`[[stages]]`: runs one after another. Each table is a layer over the rest of the document, for one of them.

A stage trains what the one before it exported, so only the first one's model is named. Errors name `stages[1].field`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from relax_core.api.component import BY_TABLE, Kind
from relax_core.api.errors import ConfigError, PluginError, RelaxError
from relax_core.api.options import Options
from relax_core.api.secret import Secret
from relax_core.api.trainer import Chosen
from relax_core.config.auxiliary_models import EngineTable, pool_file_errors, teacher_errors
from relax_core.config.checks import combination_errors, samples
from relax_core.config.choice import DEFAULT_NAMES, RUNNER_BUS, Choice, choice_model, core_keys, keys_model
from relax_core.config.layers import Source, expand, plugin_files, read_layers, resolve_paths
from relax_core.config.model_folder import file_errors
from relax_core.config.problems import ConfigProblems, located, origin_at, refuse, unknown_key, validation_errors
from relax_core.config.run_config import DEFAULT_STALENESS, Core, RunConfig, table_keys, top_level_keys
from relax_core.config.tree import DEFAULT, KeyPath, Leaf, Node, Origin, Tree, leaves, merge, plain, sourced
from relax_core.registry.catalogue import Catalogue
from relax_core.registry.frames import plugin_frames, said

ModelT = TypeVar("ModelT", bound=BaseModel)


def resolve(tree: Tree, catalogue: Catalogue) -> RunConfig:
    """Raises ConfigError, or ConfigProblems with all of them."""
    tree = with_defaults(tree)
    problems: list[RelaxError] = []
    core = _with_engines(_core(tree, problems), tree, catalogue, problems)
    components = {table: tuple(_choices(kind, tree, catalogue, problems)) for table, kind in BY_TABLE.items()}
    refuse(located(problem, tree) for problem in problems if isinstance(problem, ConfigError))
    if problems:
        raise problems[0]
    return RunConfig.model_construct(**dict(cast(Core, core)), components=components)


def with_defaults(tree: Tree) -> Tree:
    """The tree with the names of components that were not chosen and the staleness that the placement implies."""
    filled = dict(tree)
    for table, name in {**DEFAULT_NAMES, "bus": _default_bus(tree)}.items():
        chosen = filled.get(table, {})
        if isinstance(chosen, Leaf) and chosen.value == {}:
            chosen = {}
        if isinstance(chosen, dict) and "name" not in chosen:
            filled[table] = {"name": Leaf(name, DEFAULT), **chosen}
    filled.setdefault("max_staleness", Leaf(_default_staleness(tree), DEFAULT))
    return filled


def _default_bus(tree: Tree) -> str:
    return RUNNER_BUS.get(_text_at(tree, "run", "runner"), RUNNER_BUS["local"])


def _default_staleness(tree: Tree) -> int:
    deterministic = tree.get("deterministic")
    if isinstance(deterministic, Leaf) and deterministic.value is True:
        return 0
    return DEFAULT_STALENESS.get(_text_at(tree, "placement", "mode"), 0)


def _text_at(tree: Tree, table: str, key: str) -> str:
    node = tree.get(table)
    leaf = node.get(key) if isinstance(node, dict) else None
    return leaf.value if isinstance(leaf, Leaf) and isinstance(leaf.value, str) else ""


def _core(tree: Tree, problems: list[RelaxError]) -> Core | None:
    known = {key: node for key, node in tree.items() if key in Core.model_fields}
    strange = [key for key in tree if key not in known and key not in BY_TABLE]
    problems += [unknown_key(key, [*top_level_keys(), *table_keys()], table_keys()) for key in strange]
    return _validated(Core, known, "", problems)


def _with_engines(core: Core | None, tree: Tree, catalogue: Catalogue, problems: list[RelaxError]) -> Core | None:
    """The engines of pools, validated by their classes like that of the run."""
    if core is None or not core.engines:
        return core
    nodes = cast(list[Tree], tree["engines"])
    pools = [
        _with_engine(pool, f"engines.{at}.engine", node, catalogue, problems)
        for at, (pool, node) in enumerate(zip(core.engines, nodes, strict=True))
    ]
    return core.model_copy(update={"engines": tuple(pools)})


def _with_engine(
    pool: EngineTable, key: str, node: Tree, catalogue: Catalogue, problems: list[RelaxError]
) -> EngineTable:
    if not pool.engine:
        return pool
    own = _choice(BY_TABLE["engine"], key, node["engine"], catalogue, problems)
    return pool.model_copy(update={"engine": own.dump()}) if own else pool


def _choices(kind: Kind, tree: Tree, catalogue: Catalogue, problems: list[RelaxError]) -> Iterator[Choice]:
    node = tree.get(kind.table)
    if node is None or (isinstance(node, Leaf) and node.value in ([], {}, ())):
        return
    if kind.many != isinstance(node, list):
        shape = f"an array of tables, [[{kind.table}]]" if kind.many else f"one table, [{kind.table}]"
        problems.append(ConfigError(kind.table, repr(plain(node)), f"write {shape}"))
        return
    for index, entry in enumerate(node if isinstance(node, list) else [node]):
        key = f"{kind.table}.{index}" if kind.many else kind.table
        if choice := _choice(kind, key, entry, catalogue, problems):
            yield choice


def _choice(kind: Kind, key: str, node: Node, catalogue: Catalogue, problems: list[RelaxError]) -> Choice | None:
    if isinstance(node, list) or (isinstance(node, Leaf) and node.value != {}):
        problems.append(ConfigError(key, repr(plain(node)), "write a name, or a table with a name"))
        return None
    entry = {} if isinstance(node, Leaf) else node
    name = plain(entry["name"]) if "name" in entry else None
    if not isinstance(name, str):
        fix = f"name one of {', '.join(catalogue.names(kind.name)) or 'the installed components: there are none'}"
        problems.append(ConfigError(f"{key}.name", "nothing" if name is None else repr(name), fix))
        return None
    try:
        model = catalogue.target(kind.name, name).options_model()
    except ConfigError as error:
        problems.append(ConfigError(f"{key}.name", error.got, error.fix))
        return None
    except PluginError as error:
        problems.append(error)
        return None
    if (choice := _validated_choice(kind, key, entry, name, model, problems)) and getattr(choice, "algorithm", None):
        # An environment's own one: its options are validated by its class, like those of the run's.
        own = _choice(BY_TABLE["algorithm"], f"{key}.algorithm", entry["algorithm"], catalogue, problems)
        return own and choice.model_copy(update={"algorithm": own.dump()})
    return choice


def _validated_choice(
    kind: Kind, key: str, entry: Tree, name: str, model: type[Options], problems: list[RelaxError]
) -> Choice | None:
    if taken := sorted(model.model_fields.keys() & {"name", *core_keys(kind.table)}):
        problems.append(
            PluginError(f"{kind.name} {name!r}", f"its options {', '.join(taken)} are keys of the core; rename them")
        )
        return None
    own = {k: node for k, node in entry.items() if k in core_keys(kind.table)}
    options = {k: node for k, node in entry.items() if k != "name" and k not in own}
    before = len(problems)
    keys = _validated(keys_model(kind.table), own, key, problems)
    try:
        valid = _validated(model, options, key, problems, ("name", *core_keys(kind.table)))
    except RelaxError:
        raise
    except Exception as error:
        raise PluginError(
            f"{kind.name} {name!r}", f"its options model failed: {said(error)}", plugin_frames(error)
        ) from error
    if valid is None or keys is None or len(problems) > before:
        return None
    dumped = valid.model_dump(mode="json", exclude_none=True)
    return choice_model(kind.table)(chosen=Chosen(kind.name, name, dumped), **dict(keys))


def _validated(
    model: type[ModelT], node: Tree, prefix: str, problems: list[RelaxError], also: tuple[str, ...] = ()
) -> ModelT | None:
    data = plain(resolve_paths(node, model))
    try:
        return model.model_validate_json(json.dumps(data, default=_written), strict=True)
    except ValidationError as error:
        problems += validation_errors(error, model, prefix, also)
        return None


def _written(value: object) -> object:
    """A value of Python or TOML that JSON does not know, as a person would write it."""
    if isinstance(value, os.PathLike | Secret):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    raise ConfigError(
        "configuration", f"{value!r} of type {type(value).__name__}", "give text, numbers, lists or tables"
    )


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


@dataclass(frozen=True, slots=True)
class Origins:
    """Where each value was written."""

    tree: Tree

    def of(self, key: str) -> Origin:
        """File and line, `command line`, `python` or `default`."""
        return origin_at(self.tree, key)


@dataclass(frozen=True, slots=True)
class Composed:
    """A configuration with its history."""

    config: RunConfig
    """Of the first stage, where there are several."""
    origins: Origins
    notices: tuple[str, ...] = ()
    """Lines to print: what a change of component dropped."""
    stages: tuple[Stage, ...] = ()
    """Runs one after another; empty: only the one."""


def compose(
    files: Sequence[Source],
    overrides: Sequence[str],
    catalogue: Catalogue,
    base: Mapping[str, Any] | None = None,
    *,
    checked: bool = True,
    on_disk: bool = True,
) -> Composed:
    """Defaults < base < files left to right (paths, or mappings from Python) < overrides `a.b.c=VALUE`.

    Raises ConfigError or ConfigProblems. `checked`: refuse combinations that can't work; `on_disk`: look at the
    model folder and the task files too.
    """
    tree, notices = read_layers([base or {}, *files], overrides, Path.cwd())
    rest, layers = split(tree)
    if not layers:
        return Composed(_resolved(rest, catalogue, checked, on_disk), Origins(rest), tuple(notices))
    stages = []
    for at, layer in enumerate(layers):
        own = {key: item for key, item in layer.items() if key != "name"}
        with naming(at):
            config = _resolved(cast(Tree, merge(rest, own, notices)), catalogue, checked, on_disk)
        stages.append(Stage(name_of(layer, at), config))
    return Composed(stages[0].config, Origins(rest), tuple(notices), tuple(stages))


def _resolved(tree: Tree, catalogue: Catalogue, checked: bool, on_disk: bool) -> RunConfig:
    config = resolve(tree, catalogue)
    problems = combination_errors(config, catalogue) if checked else []
    if checked and on_disk:
        problems += file_errors(config, samples(config, catalogue))
        problems += [*pool_file_errors(config), *teacher_errors(config, catalogue)]
    refuse(located(problem, tree) for problem in problems)
    return config


def load(
    files: Sequence[Source],
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    *,
    checked: bool = True,
    on_disk: bool = True,
) -> tuple[Composed, Catalogue]:
    """`compose` with the catalogue of what is installed and of the files that `plugins` names."""
    catalogue = Catalogue.load(plugin_files(files, overrides, base))
    return compose(files, overrides, catalogue, base, checked=checked, on_disk=on_disk), catalogue
