# SPDX-License-Identifier: Apache-2.0
"""`relax eval`: evaluate a model folder, a checkpoint or a run on evaluation sets, and keep the result in a folder.

The policy's engines sample as in a run's own evaluation, with the same seeds and rewards. Nothing is trained, and run
directories are only read. The model of a checkpoint is exported to a temporary folder first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from relax_core.api.component import Chosen
from relax_core.api.errors import ConfigError, RelaxError
from relax_core.api.events import EvalFinished
from relax_core.api.options import revealed
from relax_core.cli.terminal import run_to_end
from relax_core.config.checks import combination_errors, file_errors
from relax_core.config.layers import Source
from relax_core.config.problems import refuse
from relax_core.config.tables import BatchTable, CriticTable, RankPlacement, ReferenceTable
from relax_core.launch import (
    DEFAULT_NAMES,
    Catalogue,
    Choice,
    Launch,
    RunConfig,
    compose,
    make_launch,
    plan,
    stage_directories,
)
from relax_core.rewards.host import announce
from relax_core.runs import Redactor, find_run, read_document, to_toml
from relax_core.sampling.rollout_worker import RolloutWorker
from relax_plugin_workbench.compare import SetComparison, compare_results
from relax_plugin_workbench.eval_result import SAMPLES, EvalResult, is_result, read_result, result_folder
from relax_plugin_workbench.export import checkpoints, configuration, export
from relax_plugin_workbench.single_role import ignore, single_role, warnings

OF_THE_EXPORT = ("trainer.", "run.")
"""Beginnings of the overrides that also apply to the export of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model to evaluate."""

    name: str
    """Name of the folder, or of the run with its step, for the result's folder."""
    config: Mapping[str, Any]
    """Configuration of the run that trained the model; empty for a model folder."""
    folder: Path | None = None
    """Hugging Face folder of the model; None: the checkpoint of `step` in `run` must be exported first."""
    run: Path | None = None
    step: int | None = None


def find_target(name: str) -> Target:
    """Find the model that `name` means: a Hugging Face folder, a checkpoint's folder, a run, or RUN@STEP.

    A run without a step means its final model if it has finished, else its newest complete checkpoint. Raises
    ConfigError if nothing has this name.
    """
    path = Path(name)
    if (path / "config.json").is_file():
        return Target(path.resolve().name, {}, path.absolute())
    if (path / "state.json").is_file():
        owner = path.resolve().parent.parent
        run = owner.parent.parent if owner.parent.name == "stages" else owner
        for step, (_, checkpoint) in checkpoints(run).items():
            if checkpoint.resolve() == path.resolve():
                return _of_run(run, step)
        raise ConfigError("TARGET", name, "the folder is not a complete checkpoint of a run")
    given, _, step_text = name.rpartition("@")
    if given and step_text.isdecimal():
        return _of_run(find_run(given), int(step_text))
    try:
        run = find_run(name)
    except ConfigError as error:
        if not path.is_dir():
            raise
        fix = "name a Hugging Face folder (with config.json), a checkpoint (step-N), or a run directory"
        raise ConfigError("TARGET", name, fix) from error
    summary = read_document(run / "summary.json") or {}
    if summary.get("status") == "finished" and (run / "export" / "config.json").is_file():
        owner = next((stage.path for stage in reversed(stage_directories(run))), run)
        return Target(run.name, configuration(owner), run / "export", run, int(summary["steps"]))
    return _of_run(run, max(checkpoints(run)))


def evaluate_against(
    target: str, sources: Sequence[Source], overrides: Sequence[str], against: str | None = None, out: Path | None = None,
    functions: Mapping[str, bytes] | None = None,
) -> tuple[EvalResult, list[SetComparison]]:  # fmt: skip
    """Evaluate a model as `evaluate` does; return the result and its comparison with `against` on each set.

    `against`: another target, whose result goes to the folder `against` below `out`, or the folder of an earlier result;
    None: nothing is compared. A model folder in `against` is evaluated with the configuration of the run that `target`
    names. Raises the errors of `evaluate`.
    """
    if against is None:
        return evaluate(target, sources, overrides, out, functions), []
    if is_result(Path(against)):
        before = read_result(Path(against))
        after = evaluate(target, sources, overrides, out, functions)
    else:
        base = () if find_target(against).config else (find_target(target).config,)
        after = evaluate(target, sources, overrides, out, functions)
        before = evaluate(against, (*base, *sources), overrides, after.directory / "against", functions)
    return after, compare_results(before, after)


def _of_run(run: Path, step: int) -> Target:
    kept = checkpoints(run)
    if step not in kept:
        steps = ", ".join(map(str, kept))
        raise ConfigError("TARGET", f"{run.name}@{step}", f"the run has checkpoints of these steps: {steps}")
    return Target(f"{run.name}-step-{step}", configuration(kept[step][0]), None, run, step)


def evaluate(
    target: str, sources: Sequence[Source] = (), overrides: Sequence[str] = (), out: Path | None = None,
    functions: Mapping[str, bytes] | None = None,
) -> EvalResult:  # fmt: skip
    """Evaluate a model on each set of `[eval]`, and write the result to the folder `out`.

    The configuration of a run is the first layer; `sources` and `overrides` change it. `out`: a folder that is new or
    empty; None: a new folder under ./evals with the target's name. `functions`: rewards passed from Python, by name.
    Raises ConfigError, the errors of `export`, and RelaxError if no sample of a set could be judged; the folder is then
    written nevertheless.
    """
    chosen = find_target(target)
    directory = result_folder(out, chosen.name)
    with tempfile.TemporaryDirectory(prefix="relax-eval-") as scratch:
        folder, notices = chosen.folder, list[str]()
        config, catalogue = _configured(
            chosen, folder or Path(scratch), sources, overrides, functions, on_disk=folder is not None
        )
        if folder is None:
            model = Path(scratch) / "model"
            changes = [override for override in overrides if override.startswith(OF_THE_EXPORT)]
            notices += export(str(chosen.run), model, chosen.step, changes).notices
            config, catalogue = _configured(chosen, model, sources, overrides, functions, on_disk=True)
        launch = make_launch(config, plan(config, catalogue), catalogue, Path(scratch), functions)
        finished, logged = run_to_end(_sample(launch, catalogue))
    sets = tuple(
        {"set": ended.set_name, "step": chosen.step or 0, "temperature": ended.temperature, "mean": ended.mean,
         "count": ended.count, "metrics": dict(ended.metrics),
         "tasks": {task: [*rewards] for task, rewards in ended.tasks.items()}}
        for ended in finished
    )  # fmt: skip
    result = EvalResult(chosen.name, chosen.step, config.seed, sets, directory, (*notices, *logged))
    samples = ({"set": ended.set_name, **sample} for ended in finished for sample in ended.samples)
    result.write(to_toml(config.dump()), samples, Redactor(revealed(config.dump())))
    for ended in finished:
        if not ended.count:
            outcomes = ", ".join(sorted({str(sample["outcome"]) for sample in ended.samples}))
            raise RelaxError(f"set {ended.set_name}: no sample was judged ({outcomes}); see {directory / SAMPLES}")
    return result


def _configured(
    target: Target,
    model: Path,
    sources: Sequence[Source],
    overrides: Sequence[str],
    functions: Mapping[str, bytes] | None,
    *,
    on_disk: bool,
) -> tuple[RunConfig, Catalogue]:
    """Compose the configuration of an evaluation: everything that only training needs gets its default."""
    unnamed = model / "data"  # stands for the training file, which is read only if there are no evaluation sets
    layers = [{"data": {"train": str(unnamed)}}, target.config, *sources, {"model": {"path": str(model)}}]
    composed = compose(layers, overrides, checked=False, on_disk=False, passed=partial(announce, functions or {}))
    config, catalogue = composed.config, composed.catalogue
    if composed.stages:
        raise ConfigError("stages", "several runs", "leave [[stages]] out: an evaluation has one configuration")
    if not config.eval.sets and config.data.train == unnamed:
        fix = "name the tasks: [[eval.sets]] with name and path, in a TOML file after the target"
        raise ConfigError("eval.sets", "nothing", fix)
    data = config.data.model_copy(update={"train": config.eval.sets[0].path}) if config.eval.sets else config.data
    placement = {name: RankPlacement() for name in ("actor_fwd", "critic", "reference", "teacher")}
    config = config.model_copy(update={
        "algorithm": Choice(chosen=Chosen("algorithm", DEFAULT_NAMES["algorithm"])),
        "sampler": Choice(chosen=Chosen("sampler", DEFAULT_NAMES["sampler"])),
        "filters": (), "sinks": (), "teachers": (), "autoscale": None, "epochs": None,
        "critic": CriticTable(), "reference": ReferenceTable(), "batch": BatchTable(), "data": data,
        "environments": tuple(one.model_copy(update={"algorithm": {}}) for one in config.environments),
        "eval": config.eval.model_copy(update={"every": config.eval.every or 1}),
        "model": config.model.model_copy(update={"lora": None, "freeze": (), "routing_replay": "off"}),
        "rollout": config.rollout.model_copy(update={
            "kv_across_versions": False, "group_size": max(2, config.rollout.group_size),
        }),
        "placement": config.placement.model_copy(update={**placement, "roles": {}}),
    })  # fmt: skip
    refuse(
        [*combination_errors(config, catalogue), *(file_errors(config, catalogue) if on_disk else ())], composed.tree
    )
    return config, catalogue


async def _sample(launch: Launch, catalogue: Catalogue) -> tuple[list[EvalFinished], tuple[str, ...]]:
    """Sample and score all sets; return their results, and the warnings of the data checks."""
    async with single_role("rollout", launch, catalogue) as context:
        worker = await RolloutWorker.open(context, ignore, trains=False)
        try:
            finished = await worker.evaluation.run(worker.engines.newest(), requested=True)
        finally:
            await worker.close()
        return finished, await warnings(context)
