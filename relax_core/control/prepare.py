# SPDX-License-Identifier: Apache-2.0
"""Everything that happens before a run starts: configuration composed and refused early, directory made, plan drawn.

Nothing here starts a role; what it returns is all that `conduct` needs.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from relax_core.api.errors import ConfigError
from relax_core.api.secret import revealed
from relax_core.control import recipes
from relax_core.control.planner import plan
from relax_core.control.runner import RunnerAhead
from relax_core.observe.provenance import provenance
from relax_core.observe.redaction import Redactor
from relax_core.observe.run_directory import RunDirectory
from relax_core.options.composition import Composed, compose
from relax_core.options.layers import plugin_files
from relax_core.options.run_config import RunConfig
from relax_core.options.toml_text import to_toml
from relax_core.plugins.catalogue import Catalogue
from relax_core.roles.checkpoint import newest
from relax_core.roles.plan import Plan
from relax_core.rollout.passed_function import announce
from relax_core.runners.launch import Launch

Source = str | Path | Mapping[str, Any]
MAY_CHANGE = frozenset({"steps", "eval", "sinks", "placement", "run", "notify", "checkpoint"})
"""What a resumed run may set anew; anything else would make it another experiment."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is ready to start."""

    config: RunConfig
    catalogue: Catalogue
    launch: Launch
    directory: RunDirectory
    notices: tuple[str, ...] = ()
    ahead: RunnerAhead | None = None
    """The run's runner, where there was time to let it begin."""


def prepare(
    sources: Sequence[Source],
    overrides: Sequence[str],
    *,
    run_dir: Path | None = None,
    functions: Mapping[str, bytes] | None = None,
) -> Prepared:
    """Compose, check, build a recipe if one is named, make the run directory. Raises ConfigError."""
    catalogue = Catalogue.load(plugin_files(_layers(sources), overrides))
    announce(functions or {}, catalogue)
    composed = _composed(sources, overrides, catalogue)
    planned = plan(composed.config, catalogue)
    directory = _directory(composed.config, sources, run_dir)
    recipe = _recipe(sources)
    ahead = RunnerAhead(composed.config, catalogue) if recipe is not None else None
    try:
        if recipe is not None:
            built = recipe.build(directory.path / "recipe", composed.config.seed, "teacher" in planned.roles)
            composed = compose([built, *sources[1:]], overrides, catalogue)
        _write(directory, composed.config, catalogue)
        launch = _launch(composed.config, catalogue, str(directory.path), functions or {})
    except BaseException:
        if ahead is not None:
            ahead.close()
        directory.discard()
        raise
    return Prepared(composed.config, catalogue, launch, directory, composed.notices, ahead)


def prepare_resume(run_dir: Path, overrides: Sequence[str]) -> Prepared:
    """Continue from the newest checkpoint. Raises ConfigError for a change that makes it another experiment."""
    catalogue = Catalogue.load(plugin_files([run_dir / "config.toml"], overrides))
    composed = compose([run_dir / "config.toml"], overrides, catalogue)
    for override in overrides:
        table = override.partition("=")[0].partition(".")[0]
        if table not in MAY_CHANGE:
            raise ConfigError(
                override, "a change of the experiment", f"only {', '.join(sorted(MAY_CHANGE))} may change on resume"
            )
    resume = newest(run_dir)
    if resume.step >= composed.config.steps:
        raise ConfigError("steps", f"{composed.config.steps}, which the run has reached", "resume with more: steps=N")
    directory = RunDirectory.reopen(run_dir, redactor=Redactor(revealed(composed.config.dump())))
    if overrides:
        directory.write_config(to_toml(composed.config))
    launch = _launch(composed.config, catalogue, str(directory.path), {})
    launch = replace(launch, resume=resume, incarnation=int(resume.state["incarnation"]) + 1)
    return Prepared(composed.config, catalogue, launch, directory, composed.notices)


def configured(sources: Sequence[Source], overrides: Sequence[str]) -> tuple[RunConfig, Catalogue, bool]:
    """A configuration as a run would check it, and whether its files must be there already: a recipe makes its own."""
    catalogue = Catalogue.load(plugin_files(_layers(sources), overrides))
    composed = _composed(sources, overrides, catalogue)
    plan(composed.config, catalogue)
    return composed.config, catalogue, _recipe(sources) is None


def plan_of(sources: Sequence[Source], overrides: Sequence[str]) -> Plan:
    """The plan of a configuration, with nothing written; a recipe need not be built for it."""
    catalogue = Catalogue.load(plugin_files(_layers(sources), overrides))
    return plan(_composed(sources, overrides, catalogue).config, catalogue)


def launch_of(sources: Sequence[Source], overrides: Sequence[str], directory: str) -> tuple[Launch, Catalogue]:
    """What a trial needs: a launch without a run directory. A recipe is built in `directory`."""
    catalogue = Catalogue.load(plugin_files(_layers(sources), overrides))
    composed, recipe = _composed(sources, overrides, catalogue), _recipe(sources)
    if recipe is not None:
        teacher = "teacher" in plan(composed.config, catalogue).roles
        built = recipe.build(Path(directory) / "recipe", composed.config.seed, teacher)
        composed = compose([built, *sources[1:]], overrides, catalogue)
    return _launch(composed.config, catalogue, directory, {}), catalogue


def _composed(sources: Sequence[Source], overrides: Sequence[str], catalogue: Catalogue) -> Composed:
    """Of a recipe only the keys are checked: its files are not there yet."""
    return compose(_layers(sources), overrides, catalogue, on_disk=_recipe(sources) is None)


def _layers(sources: Sequence[Source]) -> Sequence[Source]:
    """The sources, a recipe's name replaced by what it says."""
    recipe = _recipe(sources)
    return sources if recipe is None else [tomllib.loads(recipe.toml()), *sources[1:]]


def _recipe(sources: Sequence[Any]) -> recipes.Recipe | None:
    first = sources[0] if sources else "quickstart"
    if isinstance(first, Mapping) or Path(first).suffix or Path(first).exists():
        return None
    return recipes.find(str(first))


def _directory(config: RunConfig, sources: Sequence[Any], run_dir: Path | None) -> RunDirectory:
    first = sources[0] if sources else "run"
    name = config.run.name or (Path(first).stem if isinstance(first, (str, Path)) else "run")
    redactor = Redactor(revealed(config.dump()))
    return RunDirectory.create(run_dir, name, datetime.now(), Random(SystemRandom().random()), redactor=redactor)


def _write(directory: RunDirectory, config: RunConfig, catalogue: Catalogue) -> None:
    directory.write_config(to_toml(config))
    directory.write("plugins", {"plugins": [plugin._asdict() for plugin in catalogue.resolved()]})
    directory.write("provenance", provenance(Path.cwd(), sys.argv))


def _launch(config: RunConfig, catalogue: Catalogue, directory: str, functions: Mapping[str, bytes]) -> Launch:
    return Launch(
        run_id=_run_id(Path(directory)),
        run_dir=directory,
        config=config.dump(),
        plan=plan(config, catalogue),
        plugin_files=tuple(str(path) for path in config.plugins),
        resolved=tuple(tuple(plugin) for plugin in catalogue.resolved()),
        functions=functions,
    )


def _run_id(directory: Path) -> str:
    """Names what the run owns outside its directory: the same when it is resumed, another for each directory."""
    place = f"{platform.node()}:{directory.resolve()}"
    return f"{directory.name}-{hashlib.sha256(place.encode()).hexdigest()[:6]}"
