# SPDX-License-Identifier: Apache-2.0
"""Composition of files, mappings and overrides into one checked `RunConfig`, with the origin of each value.

`compose` merges the layers, merges each of `[[stages]]` over the rest, fills in defaults, validates all keys, and
refuses combinations and files that cannot work. A component's own class validates its options.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from relax_core.api.component import BY_TABLE, Chosen, Kind
from relax_core.api.errors import ConfigError, PluginError, RelaxError
from relax_core.api.options import Secret, TableOptions
from relax_core.config.checks import combination_errors, file_errors
from relax_core.config.layers import (
    COMMAND_LINE,
    DEFAULT,
    Leaf,
    Node,
    Origin,
    Source,
    Tree,
    expand,
    leaves,
    merge,
    origin_at,
    plain,
    plugins_of,
    read_layer,
    read_layers,
    with_origins,
)
from relax_core.config.plugin_tables import all_tables, find_table
from relax_core.config.problems import ConfigProblems, refuse, validation_errors
from relax_core.config.run_config import (
    COMPONENT_TABLES,
    DEFAULT_NAMES,
    DEFAULT_SANDBOX,
    DEFAULT_STALENESS,
    RUNNER_BUS,
    Choice,
    Core,
    FurtherEnvironmentChoice,
    RunConfig,
    keys_model,
)
from relax_core.registry.catalogue import Catalogue
from relax_core.registry.error_text import authored, plugin_frames, said

ModelT = TypeVar("ModelT", bound=BaseModel)
STAGES = "stages"
OF_THE_RUN = ("run", "recovery", "plugins", "sinks", "seed", STAGES)
"""Keys of the core that apply to the whole run, and that a stage may not set."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the runs of a configuration with `[[stages]]`; it trains the model that the stage before exported."""

    name: str
    config: RunConfig


@dataclass(frozen=True, slots=True)
class Composed:
    """A checked configuration with the origin of each value."""

    config: RunConfig
    """Configuration of the run; with stages, of the first stage."""
    catalogue: Catalogue
    """Installed components, from which the configuration chooses."""
    tree: Tree
    """The merged layers without the stages, each value with its origin."""
    notices: tuple[str, ...] = ()
    """Lines to print, one for each change of a component that dropped options."""
    stages: tuple[Stage, ...] = ()
    """Stages in order; empty for a configuration without `[[stages]]`."""

    def origin_of(self, key: str) -> Origin:
        """Return where a key was written: file and line, `command line`, `python` or `default`."""
        return origin_at(self.tree, key)


def compose(
    files: Sequence[Source],
    overrides: Sequence[str] = (),
    catalogue: Catalogue | None = None,
    base: Mapping[str, Any] | None = None,
    *,
    checked: bool = True,
    on_disk: bool = True,
    passed: Callable[[Catalogue], None] = lambda catalogue: None,
) -> Composed:
    """Merge layers into one checked configuration; later layers override earlier ones.

    The order is defaults, `base`, `files` left to right (paths, or mappings from Python), overrides `a.b.c=VALUE`.
    Without `catalogue`, load installed plugins and the files in `plugins`, then let `passed` add components.
    `checked`: refuse combinations that cannot work; `on_disk`: check model folders and task files too.
    Raises ConfigError or ConfigProblems.
    """
    tree, notices = read_layers([base or {}, *files], overrides, Path.cwd())
    if catalogue is None:
        catalogue = Catalogue.load(plugins_of(tree))
        passed(catalogue)
    rest, layers = _split_stages(tree, catalogue)
    stages = []
    for index, layer in enumerate(layers or [{}]):
        with naming_stage(index if layers else None):
            whole = cast(Tree, merge(rest, {key: item for key, item in layer.items() if key != "name"}, notices))
            config = resolve(whole, catalogue)
            problems = combination_errors(config, catalogue) if checked else []
            problems += file_errors(config, catalogue) if checked and on_disk else []
            refuse(problems, whole)
        # The name of a stage is its own, else that of its algorithm, else its number.
        algorithm = layer.get("algorithm")
        named = layer.get("name") or (algorithm.get("name") if isinstance(algorithm, dict) else None)
        stages.append(Stage(str(named.value) if isinstance(named, Leaf) else f"stage-{index}", config))
    return Composed(stages[0].config, catalogue, rest, tuple(notices), tuple(stages) if layers else ())


def parse_config(data: Mapping[str, Any], catalogue: Catalogue) -> RunConfig:
    """Return the configuration of plain data from `RunConfig.dump`; each component's model validates its options."""
    return resolve(read_layer(data, Path.cwd()), catalogue)


def resolve(tree: Tree, catalogue: Catalogue) -> RunConfig:
    """Fill in defaults and validate all keys; raise ConfigError, ConfigProblems for several errors, or PluginError."""
    tree = _with_defaults(tree)
    problems: list[RelaxError] = []
    tables: dict[str, TableOptions] = {}
    for name in [key for key in tree if key not in Core.model_fields and key not in BY_TABLE]:
        if plugin_table := _plugin_table(name, tree[name], catalogue, problems):
            tables[name] = plugin_table
    of_core = {key: node for key, node in tree.items() if key in Core.model_fields}
    core = _validated(Core, of_core, "", problems, catalogue)
    if core is not None:
        engines = list(core.engines)
        for index, pool in enumerate(engines):
            if pool.engine:
                chosen = cast(list[Tree], tree["engines"])[index]["engine"]
                engine = _component(BY_TABLE["engine"], f"engines.{index}.engine", chosen, catalogue, problems)
                engines[index] = pool.model_copy(update={"engine": engine.dump()}) if engine else pool
        core = core.model_copy(update={"engines": tuple(engines)}) if engines else core
    choices: dict[str, Any] = {}
    for table, kind in BY_TABLE.items():
        choices[table] = () if kind.many else None
        node = tree.get(table)
        if node is None or (isinstance(node, Leaf) and node.value in (([], {}, ()) if kind.many else ({},))):
            continue
        if kind.many != isinstance(node, list):
            shape = f"an array of tables, [[{table}]]" if kind.many else f"one table, [{table}]"
            problems.append(ConfigError(table, _shape(node), f"write {shape}"))
            continue
        entries = (
            {f"{table}.{index}": item for index, item in enumerate(node)} if isinstance(node, list) else {table: node}
        )
        built = [_component(kind, key, entry, catalogue, problems) for key, entry in entries.items()]
        choices[table] = tuple(choice for choice in built if choice) if kind.many else built[0]
    refuse((problem for problem in problems if isinstance(problem, ConfigError)), tree)
    if problems:
        raise problems[0]
    return RunConfig.model_construct(**dict(cast(Core, core)), **choices, plugin_tables=tables)


def _plugin_table(name: str, node: Node, catalogue: Catalogue, problems: list[RelaxError]) -> TableOptions | None:
    """Validate a table of a plugin; return None after adding an error to `problems`, or for a table without effect."""
    try:
        model = find_table(name, node, catalogue)
    except (ConfigError, PluginError) as error:
        problems.append(error)
        return None
    if model is None:
        return None
    if isinstance(node, Leaf) and node.value == {}:
        node = {}
    if not isinstance(node, dict):
        problems.append(ConfigError(name, _shape(node), f"write one table, [{name}]"))
        return None
    with authored(f"table {name!r}"):
        return _validated(model, node, name, problems, catalogue)


def _with_defaults(tree: Tree) -> Tree:
    """Add default components and staleness; the runner decides the bus, and the placement decides the staleness."""

    def text(table: str, key: str) -> str:
        node = tree.get(table)
        leaf = node.get(key) if isinstance(node, dict) else None
        return leaf.value if isinstance(leaf, Leaf) and isinstance(leaf.value, str) else ""

    filled = dict(tree)
    bus = RUNNER_BUS.get(text("run", "runner"), RUNNER_BUS["local"])
    for table, name in {**DEFAULT_NAMES, "bus": bus}.items():
        chosen = filled.get(table, {})
        if isinstance(chosen, Leaf) and chosen.value == {}:
            chosen = {}
        if isinstance(chosen, dict) and "name" not in chosen:
            filled[table] = {"name": Leaf(name, DEFAULT), **chosen}
    sandbox = filled.get("sandbox")  # without a table, choose no sandbox: many runs do not need it
    if isinstance(sandbox, dict) and "name" not in sandbox:
        filled["sandbox"] = {"name": Leaf(DEFAULT_SANDBOX, DEFAULT), **sandbox}
    deterministic = tree.get("deterministic")
    on_policy = isinstance(deterministic, Leaf) and deterministic.value is True
    staleness = 0 if on_policy else DEFAULT_STALENESS.get(text("placement", "mode"), 0)
    filled.setdefault("max_staleness", Leaf(staleness, DEFAULT))
    return filled


def _shape(node: Node) -> str:
    """Describe a value that should choose a component; hide the content of tables and lists, which may be secret."""
    value = plain(node)
    return "a table" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)


def _component(kind: Kind, key: str, node: Node, catalogue: Catalogue, problems: list[RelaxError]) -> Choice | None:
    """Validate a component's table with the model of its class; return None after adding an error to `problems`."""
    if isinstance(node, list) or (isinstance(node, Leaf) and node.value != {}):
        problems.append(ConfigError(key, _shape(node), "write a name, or a table with a name"))
        return None
    entry = {} if isinstance(node, Leaf) else node
    name = plain(entry["name"]) if "name" in entry else None
    if not isinstance(name, str):
        fix = f"name one of {', '.join(catalogue.names(kind.name)) or 'the installed components (there are none)'}"
        problems.append(ConfigError(f"{key}.name", "nothing" if name is None else repr(name), fix))
        return None
    of_core = tuple(keys_model(kind.table).model_fields)
    try:
        model = catalogue.target(kind.name, name).options_model()
        if taken := sorted(model.model_fields.keys() & {"name", *of_core}):
            reason = f"its options {', '.join(taken)} have names of core keys; rename them"
            raise PluginError(f"{kind.name} {name!r}", reason)
    except ConfigError as error:
        problems.append(ConfigError(f"{key}.name", error.got, error.fix))
        return None
    except PluginError as error:
        problems.append(error)
        return None
    keys = _validated(keys_model(kind.table), {k: entry[k] for k in entry if k in of_core}, key, problems, catalogue)
    options = {k: item for k, item in entry.items() if k not in ("name", *of_core)}
    try:
        valid = _validated(model, options, key, problems, catalogue, ("name", *of_core))
    except RelaxError:
        raise
    except Exception as error:
        message = f"its options model failed: {said(error)}"
        raise PluginError(f"{kind.name} {name!r}", message, plugin_frames(error)) from error
    if valid is None or keys is None:
        return None
    chosen = Chosen(kind.name, name, valid.model_dump(mode="json", exclude_none=True))
    _, form = COMPONENT_TABLES.get(kind.table, (None, Choice))
    choice = form(chosen=chosen, **dict(keys))
    if isinstance(choice, FurtherEnvironmentChoice) and choice.algorithm:
        learner = _component(BY_TABLE["algorithm"], f"{key}.algorithm", entry["algorithm"], catalogue, problems)
        return learner and choice.model_copy(update={"algorithm": learner.dump()})
    return choice


def _validated(
    model: type[ModelT], node: Tree, prefix: str, problems: list[RelaxError], catalogue: Catalogue,
    also: tuple[str, ...] = (),
) -> ModelT | None:  # fmt: skip
    try:
        return model.model_validate_json(json.dumps(plain(node, model), default=_json_value), strict=True)
    except ValidationError as error:
        problems += validation_errors(error, model, all_tables(catalogue), prefix, also)
        return None


def _json_value(value: object) -> object:
    """Return the JSON form of a value from Python or TOML that JSON has no type for."""
    if isinstance(value, os.PathLike | Secret):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    raise ConfigError(
        "configuration", f"{value!r} of type {type(value).__name__}", "give text, numbers, lists or tables"
    )


def _split_stages(tree: Tree, catalogue: Catalogue) -> tuple[Tree, list[Tree]]:
    """Return the tree without stages, and the layer of each stage with short forms expanded.

    Only the first stage may name a model, as a stage trains the export of the stage before. Raises ConfigError.
    """

    def has(node: Node | None, path: Sequence[str]) -> bool:
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        return node is not None

    rest, node = {key: item for key, item in tree.items() if key != STAGES}, tree.get(STAGES, [])
    if isinstance(node, Leaf) and node.value in ([], {}, ()):
        node = []
    if not isinstance(node, list) or not all(isinstance(item, dict) for item in node):
        raise ConfigError(STAGES, "a value that is not an array of tables", "write [[stages]] above each stage's keys")
    layers: list[Tree] = []
    for index, stage in enumerate(cast(list[Tree], node)):
        layer = dict(stage)
        for key, item in stage.items():
            if isinstance(item, Leaf):  # a short form
                layer[key] = with_origins(expand((key,), item.value), item.origin, (key,))
        plugin_keys = [key for key in layer if key in catalogue.names("table") and catalogue.table(key).of_the_run]
        for key in (*OF_THE_RUN, *plugin_keys):
            if key in layer:
                raise ConfigError(
                    f"{STAGES}[{index}].{key}", "a key of the whole run", "move the key out of [[stages]]"
                )
        model = layer.get("model")
        if index and isinstance(model, dict) and "path" in model:
            fix = "remove this key: a stage trains the model that the stage before exported"
            raise ConfigError(f"{STAGES}[{index}].model.path", "a model", fix)
        layers.append(layer)
    for path, leaf in leaves(rest) if layers else ():
        if leaf.origin.source == COMMAND_LINE and all(has(layer, path) for layer in layers):
            key = ".".join(path)  # every stage sets the key itself, so the override would have no effect
            fix = f"every stage sets this key itself: write {STAGES}.0.{key}=... for the first stage"
            raise ConfigError(key, repr(leaf.value), fix)
    return rest, layers


@contextmanager
def naming_stage(at: int | None) -> Iterator[None]:
    """Add stage index `at` to the field of configuration errors raised in the block; None: a run without stages."""

    def named(error: ConfigError) -> ConfigError:
        return ConfigError(f"{STAGES}[{at}].{error.field}", error.got, error.fix)

    try:
        yield
    except ConfigError as error:
        if at is None:
            raise
        if isinstance(error, ConfigProblems):
            raise ConfigProblems([named(each) for each in error.errors]) from error
        raise named(error) from error
