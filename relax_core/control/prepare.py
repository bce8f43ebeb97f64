# SPDX-License-Identifier: Apache-2.0
"""Preparation of a run: compose, plan and check its configuration, make its directory and prepare each stage.

No role is started here: `control.run` starts the result of `prepare` or `prepare_resume`. `relax train quickstart`
names a recipe: a package with `recipe.toml` and a `build` module that makes the model and data, registered under the
entry-point group `relax.recipes`. A recipe with `[[teachers]]` also has a `teacher` module, used if a run needs one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, cast

from relax_core.api.errors import ConfigError, RelaxError
from relax_core.api.events import Sink
from relax_core.api.options import revealed
from relax_core.api.plan import Plan
from relax_core.bus.ledger_file import FILE as LEDGER, has_started, newest_incarnation, prepare_ledger
from relax_core.config.compose import Composed, Stage, compose, naming_stage
from relax_core.config.layers import Source
from relax_core.config.run_config import RunConfig, to_toml
from relax_core.control.data_identity import NAME as DATA, check_unchanged, held_out_before
from relax_core.control.epochs import with_steps
from relax_core.control.planner import plan
from relax_core.control.preflight import preflight
from relax_core.control.resume_keys import MAY_CHANGE, NEW_RUN, is_core_key, may_change
from relax_core.control.stages import StageDirectory, check_order, document, lay_out, stage_directories
from relax_core.control.supervisor import DriverDeath
from relax_core.control.tool_check import check_tool_calls
from relax_core.data.tasks import store_hold_out, stored_hold_out
from relax_core.observe.console import waiting_for
from relax_core.observe.epoch import RunEpoch
from relax_core.observe.files import disk_errors, read_document
from relax_core.observe.provenance import provenance
from relax_core.observe.redaction import Redactor
from relax_core.observe.run_directory import RunDirectory, refuse_while_written
from relax_core.registry.catalogue import Catalogue
from relax_core.registry.error_text import did_you_mean
from relax_core.rewards.host import announce
from relax_core.roles.checkpoint import ResumePoint, choose, complete, discard_partial
from relax_core.runners.launch import RECIPE, STAGES, Launch, Runner
from relax_core.tensor_files.whole_folder import finish_replacement

RECIPES = "relax.recipes"
"""Entry-point group in which recipes are registered."""
UNTRAINED = "RELAX_UNTRAINED"
"""Environment variable that is not empty if a recipe's modules may leave out the training of their models."""
BUILD_S = 1800.0
"""Most seconds that a module of a recipe may run."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named configuration with a package that builds its model and data."""

    name: str
    package: str

    def toml(self) -> str:
        return resources.files(self.package).joinpath("recipe.toml").read_text()

    def build(self, folder: Path, seed: int, teacher: bool = False, *, untrained: bool = False) -> Path:
        """Build model and data, and with `teacher` also the teacher, in `folder`; return the path of the configuration.

        `untrained`: the modules may leave out the training of their models, since only the sizes matter. Each module
        runs in a child process, which ends with this process; its output goes to stderr. Raises RelaxError if a module
        fails.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.toml").write_text(self.toml())
        for module in ("build", "teacher") if teacher and "teachers" in tomllib.loads(self.toml()) else ("build",):
            command = [sys.executable, "-m", "relax_core.runners.local.parent_death", f"{self.package}.{module}"]
            with subprocess.Popen(
                [*command, str(folder), "--seed", str(seed)], stdin=subprocess.PIPE, stdout=sys.stderr,
                start_new_session=True, env={**os.environ, UNTRAINED: "1" if untrained else ""},
            ) as child:  # fmt: skip
                try:
                    with waiting_for(
                        f"building the {'model and data' if module == 'build' else 'teacher'} of {self.name}"
                    ):
                        status = child.wait(BUILD_S)
                except BaseException:
                    os.killpg(child.pid, signal.SIGKILL)
                    raise
            if status:
                shutil.rmtree(folder, ignore_errors=True)
                raise RelaxError(f"recipe {self.name}: {module} ended with status {status}; see its output above")
        return folder / "recipe.toml"


def known_recipes() -> dict[str, Recipe]:
    return {entry.name: Recipe(entry.name, entry.value) for entry in entry_points(group=RECIPES)}


def find_recipe(name: str) -> Recipe:
    """Find a recipe by its name. Raises ConfigError with the installed recipes if the name is unknown."""
    known = known_recipes()
    if name not in known:
        fix = f"name a .toml file that exists, or a recipe: {did_you_mean(name, known)}"
        raise ConfigError("configuration", repr(name), fix)
    return known[name]


def recipe_layers(sources: Sequence[Source]) -> tuple[Sequence[Source], Recipe | None]:
    """Return the sources with the layer of a recipe in the place of its name, and the recipe; None: no recipe is named.

    Only the first source may name a recipe. Without sources, the recipe is `quickstart`.
    """
    first = sources[0] if sources else "quickstart"
    if isinstance(first, Mapping) or Path(first).suffix or Path(first).exists():
        return sources, None
    recipe = find_recipe(str(first))
    return [tomllib.loads(recipe.toml()), *sources[1:]], recipe


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage of a configuration with its plan; a run without stages has one stage with an empty name."""

    name: str
    config: RunConfig
    plan: Plan


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A checked and planned configuration; nothing is written yet."""

    composed: Composed
    catalogue: Catalogue
    stages: tuple[PlannedStage, ...]
    recipe: Recipe | None
    """The named recipe if its files must still be built; else None."""

    def preflight(self, *, starts: bool = False) -> tuple[str, ...]:
        """Make the preflight checks of plugins for each stage; return notices. Without files of a recipe, make none.

        `starts`: this process starts the run after the checks.
        """
        notices: list[str] = []
        for at, stage in enumerate(self.stages if self.recipe is None else ()):
            with naming_stage(at if stage.name else None), waiting_for("making the checks of plugins"):
                notices += preflight(stage.config, self.catalogue, stage.plan, starts=starts)
        return tuple(notices)

    def built_sources(self, folder: Path, sources: Sequence[Source], *, untrained: bool = False) -> Sequence[Source]:
        """Build the files of a named recipe in `folder`; return the sources with these files instead of its name."""
        if self.recipe is None:
            return sources
        teacher = any("teacher" in stage.plan.roles for stage in self.stages)
        return [
            self.recipe.build(folder, self.composed.config.seed, teacher, untrained=untrained),
            *sources[1:],
        ]

    def build_recipe(
        self, folder: Path, sources: Sequence[Source], overrides: Sequence[str], *, untrained: bool = False
    ) -> PlannedRun:
        """Build the files of a named recipe in `folder`, and plan the run with these files.

        `untrained`: only the sizes of the models matter, so their training may be left out.
        """
        if self.recipe is None:
            return self
        built = self.built_sources(folder, sources, untrained=untrained)
        composed = with_steps(compose(built, overrides, self.catalogue))
        return PlannedRun(composed, self.catalogue, _plan_stages(composed, self.catalogue), None)


@dataclass(frozen=True, slots=True)
class PreparedStage:
    """One stage, ready to start once the previous stage has finished."""

    config: RunConfig
    launch: Launch
    directory: StageDirectory | None = None
    """Directory of the stage; None in a run without stages."""
    first_step: int = 0
    """Number of steps of the earlier stages."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is ready to start."""

    catalogue: Catalogue
    directory: RunDirectory
    stages: tuple[PreparedStage, ...]
    """Stages that remain to be run, the present stage first; never empty."""
    notices: tuple[str, ...] = ()
    runner: Future[Runner] | None = None
    """The runner of the first stage, if the runner was started early."""
    death: DriverDeath | None = None
    """Death of the former driver process, which this process replaces; None if the supervisor replaced no driver."""

    @property
    def config(self) -> RunConfig:
        return self.stages[0].config

    @property
    def launch(self) -> Launch:
        return self.stages[0].launch

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return self.stages[-1].first_step + self.stages[-1].config.steps

    @property
    def first_step(self) -> int:
        """Number of steps that were completed before this start."""
        return self.stages[0].first_step + (self.launch.resume.step if self.launch.resume else 0)


def plan_run(
    sources: Sequence[Source],
    overrides: Sequence[str],
    functions: Mapping[str, bytes] | None = None,
    *,
    on_disk: bool = True,
) -> PlannedRun:
    """Compose, check and plan a configuration without writing anything. Raises ConfigError.

    The first source may be the name of a recipe; its files are not built yet, so only the keys are checked. `on_disk`:
    check model folders and task files too.
    """
    layers, recipe = recipe_layers(sources)
    reads = on_disk and recipe is None
    with waiting_for("checking the configuration, its model folder and its task files"):
        composed = compose(layers, overrides, on_disk=reads, passed=partial(announce, functions or {}))
        composed = with_steps(composed) if reads else composed
    return PlannedRun(composed, composed.catalogue, _plan_stages(composed, composed.catalogue), recipe)


def check_sinks(config: RunConfig, catalogue: Catalogue) -> None:
    """Raise ConfigError with the fix for a sink whose package, account or setting is missing."""
    for choice in config.sinks:
        with catalogue.authored(choice.chosen):
            catalogue.build(choice.chosen, Sink).check()


def _plan_stages(composed: Composed, catalogue: Catalogue) -> tuple[PlannedStage, ...]:
    check_order(composed.stages, catalogue)
    found = []
    for at, stage in enumerate(composed.stages or (Stage("", composed.config),)):
        with naming_stage(at if composed.stages else None):
            found.append(PlannedStage(stage.name, stage.config, plan(stage.config, catalogue)))
    return tuple(found)


def prepare(
    sources: Sequence[Source],
    overrides: Sequence[str],
    *,
    run_dir: Path | None = None,
    functions: Mapping[str, bytes] | None = None,
) -> Prepared:
    """Compose, check and plan a configuration; make the run directory; build the named recipe. Raises ConfigError."""
    planned = plan_run(sources, overrides, functions)
    composed, catalogue = planned.composed, planned.catalogue
    check_sinks(composed.config, catalogue)
    first = sources[0] if sources else "run"
    name = composed.config.run.name or (Path(first).stem if isinstance(first, str | Path) else "run")
    redactor = Redactor(revealed(composed.config.dump()))
    directory = RunDirectory.create(run_dir, name, datetime.now(), Random(SystemRandom().random()), redactor=redactor)
    runner: Future[Runner] | None = None
    if planned.recipe is not None:  # import and start the runner during the build, to save seconds
        executor = ThreadPoolExecutor(1, "runner")
        runner = executor.submit(make_runner, composed.config, catalogue, begin=True)
        executor.shutdown(wait=False)
    try:
        planned = planned.build_recipe(directory.path / RECIPE, sources, overrides)
        composed = planned.composed
        directory.write_config(document(composed.stages) if composed.stages else to_toml(composed.config.dump()))
        directory.write("plugins", {"plugins": [plugin._asdict() for plugin in catalogue.resolved]})
        directory.write("provenance", provenance(Path.cwd(), sys.argv))
        for at, stage in enumerate(planned.stages):  # later stages train an export of the first stage's shape
            checking = waiting_for("checking the template's tool calls")
            with naming_stage(at if composed.stages else None), checking:
                check_tool_calls(stage.config, catalogue, stage.plan)
        notices = (*composed.notices, *planned.preflight(starts=True))
        directory.write(DATA, {"files": _data_of([stage.config for stage in planned.stages], directory.path)})
        epoch = RunEpoch.begin(directory.path)
        stages: list[PreparedStage] = []
        laid: Sequence[tuple[StageDirectory | None, RunConfig]] = [(None, composed.config)]
        if composed.stages:
            laid = lay_out(directory.path, composed.stages)
        for (own, config), stage in zip(laid, planned.stages, strict=True):
            launch = make_launch(config, stage.plan, catalogue, own.path if own else directory.path, functions, epoch)
            done = stages[-1].first_step + stages[-1].config.steps if stages else 0
            stages.append(PreparedStage(config, launch, own, done))
    except BaseException:
        if runner is not None and runner.exception() is None:
            asyncio.run(runner.result().close())
        directory.discard()
        raise
    return Prepared(catalogue, directory, tuple(stages), notices, runner)


def _data_of(configs: Sequence[RunConfig], run_dir: Path) -> dict[str, object]:
    """Return the content of all task files for `data.json`. Raises ConfigError if one has changed since the run began."""
    document = read_document(run_dir / f"{DATA}.json") or {}
    found = dict(document.get("files") or {})
    for config in configs:
        with waiting_for("reading the task files"):
            found |= check_unchanged(config, found, run_dir)
    return found


def _unfinished_stages(run_dir: Path) -> tuple[list[StageDirectory | None], int]:
    """Return the unfinished stages, None for a run without stages, and the number of steps of the finished stages."""
    known = stage_directories(run_dir)
    left: list[StageDirectory | None] = [own for own in known if own.account() is None] if known else [None]
    return left, sum(int(account["steps"]) for own in known if (account := own.account()))


def _later_stages(left: Sequence[StageDirectory | None], catalogue: Catalogue, done: int) -> list[PreparedStage]:
    """Prepare the stages after the present one, from the configurations in their directories."""
    stages = []
    for own in (own for own in left if own is not None):
        config = compose([own.path / "config.toml"], (), catalogue, on_disk=False).config
        launch = make_launch(config, plan(config, catalogue), catalogue, own.path)
        stages.append(PreparedStage(config, launch, own, done))
        done += config.steps
    return stages


def prepare_resume(
    run_dir: Path, overrides: Sequence[str], step: int | None = None, *, unfinished: bool = False
) -> Prepared:
    """Prepare to continue a run from its newest whole checkpoint, or that of `step`; later checkpoints are set aside.

    A stage without a checkpoint starts at step 0. `unfinished`: the driver died just now, so a run without a checkpoint
    starts at step 0 too. A run that saved its last step but did not finish still has to write its export. Raises
    ConfigError for a change that makes the run another experiment, and if nothing is left to do.
    """
    keys = {override: override.partition("=")[0].strip() for override in overrides}
    for override, key in keys.items():
        if is_core_key(key) and not may_change(key):
            fix = f"only {', '.join(MAY_CHANGE)} may change on resume; {NEW_RUN.replace('RUN', str(run_dir))}"
            raise ConfigError(override, "a change of the experiment", fix)
    refuse_while_written(run_dir)
    left, done = _unfinished_stages(run_dir)
    if not left:
        raise ConfigError("run", str(run_dir), "every stage of the run is finished; start a new run from its export")
    paths = [own.path if own else run_dir for own in left]
    planned = plan_run([paths[0] / "config.toml"], overrides)
    config, catalogue, present = planned.composed.config, planned.catalogue, left[0]
    for override, key in keys.items():
        if not (is_core_key(key) or may_change(key, catalogue)):
            own = ", ".join(catalogue.table(key.partition(".")[0]).may_change) or "none"
            fix = f"of the keys of this table, {own} may change on resume; {NEW_RUN.replace('RUN', str(run_dir))}"
            raise ConfigError(override, "a change of the experiment", fix)
    former = compose([paths[0] / "config.toml"], (), catalogue, on_disk=False).config if overrides else config
    num_held_out = held_out_before(paths[0], former.eval, config.eval)
    check_sinks(config, catalogue)
    from_checkpoint = (present is None and not unfinished) or step is not None or complete(paths[0] / "checkpoints")
    point = choose(paths[0], step, done) if from_checkpoint else None
    resume = point.resume if point is not None else None
    finished = (read_document(run_dir / "summary.json") or {}).get("status") == "finished"
    if point is not None and (point.undone or (finished and point.resume.step < former.steps)):
        point = point.with_undone(export) if (export := paths[0] / "export").is_dir() else point
    reached = present is None and not unfinished and resume is not None and resume.step >= config.steps
    # A run that did not finish may still have to write its export; but a reached steps=N leaves nothing to do.
    if reached and (overrides or finished):
        raise ConfigError("steps", f"{config.steps}, which the run has reached", "resume with more: steps=N")
    notices = (*planned.composed.notices, *planned.preflight(starts=True))
    later = _later_stages(left[1:], catalogue, done + config.steps)
    data = _data_of([config, *(stage.config for stage in later)], run_dir)
    directory = RunDirectory.reopen(run_dir, redactor=Redactor(revealed(config.dump())))
    if overrides and num_held_out is not None and stored_hold_out(paths[0]) is None:
        # before the former configuration is replaced
        store_hold_out(paths[0], num_held_out)
    if overrides and present is None:
        directory.write_config(to_toml(config.dump()))
    elif overrides and present is not None:
        present.write(config)
    launch = make_launch(config, planned.stages[0].plan, catalogue, paths[0])
    first = PreparedStage(config, launch, present, done)
    stages = (first, *later)
    try:
        directory.write(DATA, {"files": data})
        return _begin_start(Prepared(catalogue, directory, stages, notices), point)
    except BaseException:
        directory.close()
        raise


def _begin_start(prepared: Prepared, point: ResumePoint | None) -> Prepared:
    """Begin the next start of a run: set a new epoch, and the first stage's checkpoint, or step 0 without one."""
    epoch, notices = RunEpoch.begin(prepared.directory.path), prepared.notices
    stages = [
        replace(stage, launch=replace(stage.launch, epoch=epoch, run_id=_run_id(Path(stage.launch.run_dir), epoch),
                                      resume=None, incarnation=0))
        for stage in prepared.stages
    ]  # fmt: skip
    for stage in stages:
        discard_partial(Path(stage.launch.run_dir))
        with disk_errors(export := Path(stage.launch.run_dir) / "export"):
            finish_replacement(export)
    first = stages[0]
    directory, resume, incarnation = Path(first.launch.run_dir), None, 0
    if point is not None:
        resume, notices = point.resume, (*notices, *point.notices)
        place = Path(resume.directory)
        ledger = prepare_ledger(directory, place, resume.step, int(resume.state["incarnation"]))
        point.set_aside()  # only now: an error above leaves every checkpoint as it was
        incarnation, notices = ledger.newest_incarnation + 1, (*notices, *((ledger.notice,) if ledger.notice else ()))
    else:
        if has_started(directory):  # on opening, the ledger undoes its steps, as in a rollback
            incarnation = newest_incarnation(directory / LEDGER) + 1
        if first.directory is not None:
            first.directory.discard_work()
    stages[0] = replace(first, launch=replace(first.launch, resume=resume, incarnation=incarnation))
    return replace(prepared, stages=tuple(stages), notices=notices)


def make_launch(
    config: RunConfig, plan: Plan, catalogue: Catalogue, directory: Path, functions: Mapping[str, bytes] | None = None,
    epoch: RunEpoch | None = None, began: datetime | None = None,
) -> Launch:  # fmt: skip
    """Return the launch data of a run: plain data that every process receives.

    `began`: the time that chat templates show; None: the start of the run in `directory`, or now if no run is there.
    """
    data = config.dump()
    cast(dict[str, Any], data["model"]).setdefault(
        "chat_template_date", (began or _began(directory)).isoformat(timespec="seconds")
    )
    return Launch(
        run_id=_run_id(directory, epoch),
        run_dir=str(directory),
        config=data,
        plan=plan,
        plugin_files=tuple(str(path) for path in config.plugins),
        resolved=tuple(tuple(plugin) for plugin in catalogue.resolved),
        functions=functions or {},
        epoch=epoch,
    )


def _began(directory: Path) -> datetime:
    """Return the local time at which the run of this directory, or of this stage's directory, began; now without a run."""
    file = (directory.parents[1] if directory.parent.name == STAGES else directory) / "provenance.json"
    try:
        recorded = (read_document(file) or {}).get("began")
        return datetime.fromisoformat(recorded) if recorded else datetime.fromtimestamp(file.stat().st_mtime)
    except FileNotFoundError:
        return datetime.now()


def _run_id(directory: Path, epoch: RunEpoch | None) -> str:
    """Return the name under which a run owns resources outside its directory; each start has a different name."""
    place = f"{platform.node()}:{directory.resolve()}"
    return f"{directory.name}-{hashlib.sha256(place.encode()).hexdigest()[:6]}-{epoch.number if epoch else 0}"


def make_runner(config: RunConfig, catalogue: Catalogue, *, begin: bool = False) -> Runner:
    """Make the runner that `[run] runner` names; import ray only if named. `begin`: start to connect to Ray now."""
    if config.run.runner == "ray":
        from relax_core.runners.ray.runner import RayRunner

        ray_runner = RayRunner(catalogue)
        if begin:
            ray_runner.connect_early()
        return ray_runner
    if config.run.runner == "inline":
        from relax_core.runners.inline import InlineRunner

        return InlineRunner(catalogue)
    from relax_core.runners.local.runner import LocalRunner

    return LocalRunner(catalogue)
