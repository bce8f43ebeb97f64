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
from relax_core.api.plan import Plan
from relax_core.api.role import Resume
from relax_core.api.secret import revealed
from relax_core.config.compose import Composed, compose, naming_stage
from relax_core.config.layers import plugin_files
from relax_core.config.run_config import RunConfig
from relax_core.config.toml_text import to_toml
from relax_core.control import recipes
from relax_core.control.memory_check import check_fits
from relax_core.control.planner import plan
from relax_core.control.runner import RunnerAhead
from relax_core.control.stages import StageDirectory, check_order, document, lay_out, places
from relax_core.observe.logging import Redactor
from relax_core.observe.provenance import provenance
from relax_core.observe.run_directory import RunDirectory
from relax_core.registry.catalogue import Catalogue
from relax_core.rewards.host import announce
from relax_core.roles.checkpoint import complete, newest
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
    stages: tuple[PreparedStage, ...] = ()
    """What is still to be run of a run with stages, the present one first; what stands above is that one's."""
    all_steps: int = 0
    """Of all stages; 0 where there are none."""

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.all_steps or self.config.steps

    @property
    def first_step(self) -> int:
        """What was done before."""
        resumed = self.launch.resume.step if self.launch.resume else 0
        return resumed + (self.stages[0].first_step if self.stages else 0)


@dataclass(frozen=True, slots=True)
class PreparedStage:
    """One stage, ready to start once the one before it is over."""

    place: StageDirectory
    first_step: int
    """Steps of the stages before it."""
    config: RunConfig
    launch: Launch


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
    planned = _plans(composed, catalogue)
    directory = _directory(composed.config, sources, run_dir)
    recipe = _recipe(sources)
    ahead = RunnerAhead(composed.config, catalogue) if recipe is not None else None
    try:
        if recipe is not None:
            built = recipe.build(directory.path / "recipe", composed.config.seed, _has_teacher(planned))
            composed = compose([built, *sources[1:]], overrides, catalogue)
        _write(directory, composed, catalogue)
        _check_fits(composed, catalogue)
        stages = _stages(lay_out(directory.path, composed.stages), catalogue, functions or {})
        one = _launch(composed.config, catalogue, str(directory.path), functions or {})
    except BaseException:
        if ahead is not None:
            ahead.close()
        directory.discard()
        raise
    launch = stages[0].launch if stages else one
    return Prepared(composed.config, catalogue, launch, directory, composed.notices, ahead, stages, _all_steps(stages))


def prepare_resume(run_dir: Path, overrides: Sequence[str]) -> Prepared:
    """Continue from the newest checkpoint. Raises ConfigError for a change that makes it another experiment."""
    _check_changes(overrides)
    if known := places(run_dir):
        return _resume_stages(run_dir, known, overrides)
    catalogue = Catalogue.load(plugin_files([run_dir / "config.toml"], overrides))
    composed = compose([run_dir / "config.toml"], overrides, catalogue)
    resume = newest(run_dir)
    if resume.step >= composed.config.steps:
        raise ConfigError("steps", f"{composed.config.steps}, which the run has reached", "resume with more: steps=N")
    _check_fits(composed, catalogue)
    directory = RunDirectory.reopen(run_dir, redactor=Redactor(revealed(composed.config.dump())))
    if overrides:
        directory.write_config(to_toml(composed.config))
    launch = _resumed(_launch(composed.config, catalogue, str(directory.path), {}), resume)
    return Prepared(composed.config, catalogue, launch, directory, composed.notices)


def _check_changes(overrides: Sequence[str]) -> None:
    for override in overrides:
        table = override.partition("=")[0].partition(".")[0]
        if table not in MAY_CHANGE:
            raise ConfigError(
                override, "a change of the experiment", f"only {', '.join(sorted(MAY_CHANGE))} may change on resume"
            )


def _resume_stages(run_dir: Path, known: Sequence[StageDirectory], overrides: Sequence[str]) -> Prepared:
    """From the newest checkpoint of the stage that was broken off, or from its beginning; then those after it."""
    left = [place for place in known if place.account() is None]
    if not left:
        raise ConfigError("run", str(run_dir), "every stage of it is finished; begin another run with its export")
    first = left[0].path / "config.toml"
    catalogue = Catalogue.load(plugin_files([first], overrides))
    configs = [compose([first], overrides, catalogue).config]
    configs += [compose([place.path / "config.toml"], (), catalogue, on_disk=False).config for place in left[1:]]
    check_fits(configs[0], catalogue, plan(configs[0], catalogue))
    directory = RunDirectory.reopen(run_dir, redactor=Redactor(revealed(configs[0].dump())))
    if overrides:
        left[0].write(configs[0])
    done = sum(int(account["steps"]) for place in known if (account := place.account()))
    stages = _stages(list(zip(left, configs, strict=True)), catalogue, {}, done)
    if complete(left[0].path / "checkpoints"):
        stages = (replace(stages[0], launch=_resumed(stages[0].launch, newest(left[0].path))), *stages[1:])
    else:
        left[0].begin_anew()
    return Prepared(configs[0], catalogue, stages[0].launch, directory, (), None, stages, _all_steps(stages))


def _resumed(launch: Launch, resume: Resume) -> Launch:
    return replace(launch, resume=resume, incarnation=int(resume.state["incarnation"]) + 1)


def configured(sources: Sequence[Source], overrides: Sequence[str]) -> tuple[RunConfig, Catalogue, bool]:
    """A configuration as a run would check it, and whether its files must be there already: a recipe makes its own."""
    catalogue = Catalogue.load(plugin_files(_layers(sources), overrides))
    composed = _composed(sources, overrides, catalogue)
    _plans(composed, catalogue)
    return composed.config, catalogue, _recipe(sources) is None


def plans_of(sources: Sequence[Source], overrides: Sequence[str]) -> list[tuple[str, Plan]]:
    """The plan of a configuration, or those of its stages by their names, with nothing written; a recipe need not be
    built for it."""
    catalogue = Catalogue.load(plugin_files(_layers(sources), overrides))
    return _plans(_composed(sources, overrides, catalogue), catalogue)


def _plans(composed: Composed, catalogue: Catalogue) -> list[tuple[str, Plan]]:
    if not composed.stages:
        return [("", plan(composed.config, catalogue))]
    check_order(composed.stages, catalogue)
    found = []
    for at, stage in enumerate(composed.stages):
        with naming_stage(at):
            found.append((stage.name, plan(stage.config, catalogue)))
    return found


def _check_fits(composed: Composed, catalogue: Catalogue) -> None:
    """Of every stage, though later ones train what the first has exported: the model's shape is the same."""
    stages = [stage.config for stage in composed.stages] or [composed.config]
    for at, (config, (_, one)) in enumerate(zip(stages, _plans(composed, catalogue), strict=True)):
        with naming_stage(at if composed.stages else None):
            check_fits(config, catalogue, one)


def _has_teacher(planned: Sequence[tuple[str, Plan]]) -> bool:
    return any("teacher" in one.roles for _, one in planned)


def _stages(
    laid: Sequence[tuple[StageDirectory, RunConfig]],
    catalogue: Catalogue,
    functions: Mapping[str, bytes],
    done: int = 0,
) -> tuple[PreparedStage, ...]:
    stages = []
    for place, config in laid:
        stages.append(PreparedStage(place, done, config, _launch(config, catalogue, str(place.path), functions)))
        done += config.steps
    return tuple(stages)


def _all_steps(stages: Sequence[PreparedStage]) -> int:
    return stages[-1].first_step + stages[-1].config.steps if stages else 0


def launch_of(
    sources: Sequence[Source], overrides: Sequence[str], directory: str, stage: int = 0
) -> tuple[Launch, Catalogue]:
    """What a trial needs: a launch without a run directory, of one stage. A recipe is built in `directory`."""
    catalogue = Catalogue.load(plugin_files(_layers(sources), overrides))
    composed, recipe = _composed(sources, overrides, catalogue), _recipe(sources)
    if recipe is not None:
        teacher = _has_teacher(_plans(composed, catalogue))
        built = recipe.build(Path(directory) / "recipe", composed.config.seed, teacher)
        composed = compose([built, *sources[1:]], overrides, catalogue)
    config = composed.stages[stage].config if composed.stages else composed.config
    return _launch(config, catalogue, directory, {}), catalogue


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


def _write(directory: RunDirectory, composed: Composed, catalogue: Catalogue) -> None:
    directory.write_config(document(composed.stages) if composed.stages else to_toml(composed.config))
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
