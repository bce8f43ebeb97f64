# SPDX-License-Identifier: Apache-2.0
"""Builds what reads the data of a run from its configuration: task sets and the media pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from relax_core.api.environment import Environment
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily
from relax_core.config.model_folder import model_context
from relax_core.config.run_config import RunContext
from relax_core.data.media_pipeline import MediaPipeline
from relax_core.data.tasks import ColumnNeed, TaskSet, applies

HOLD_OUT = "held-out"


NO_BOUND = 1 << 30


def task_set(context: RunContext, family: ModelFamily, key: str, path: str, columns: Any) -> TaskSet:
    """The task file of a key, under the settings of `[data]`, checked for what rewards and environment read."""
    run = context.config
    needs = [_need(context, choice) for choice in run.rewards]
    environments: dict[str, type[Environment]] = {
        choice.name: type(context.build(choice.chosen)) for choice in (run.environment, *run.environments)
    }
    alone = not run.environments
    needs += [_played(name, environment, run.environment.name, alone) for name, environment in environments.items()]
    source = context.build(run.source.chosen)
    try:
        source.open(path, columns)
    except ConfigError as error:
        raise ConfigError(key, error.got, error.fix) from error  # a source does not know which key names its file
    limit = run.data.max_prompt_tokens or context_of(run) - run.rollout.max_new_tokens
    tasks = TaskSet(
        source, family, system_prompt=run.data.system_prompt, max_prompt_tokens=limit, too_long=run.data.too_long,
        needs=needs, tools=environments[run.environment.name].tools,
        tools_of={name: environment.tools for name, environment in environments.items()},
        media=[type(context.build(each.chosen)).medium for each in run.media],
    )  # fmt: skip
    if run.environments:
        check_known(tasks, list(environments))
    return tasks


def check_known(tasks: TaskSet, names: Sequence[str]) -> None:
    """Raises ConfigError for the first task whose environment the run does not have. A run of one environment plays all."""
    for index in range(len(tasks)):
        if (name := tasks[index].environment) and name not in names:
            fix = f"this run has {', '.join(names)}: add it as [[environments]], or leave such tasks out of data.train"
            raise ConfigError("environments", f"{tasks.where(index)}, which names {name!r}", fix)


def _played(name: str, environment: type[Environment], default: str, alone: bool) -> ColumnNeed:
    """What an environment reads of the tasks that it plays: the run's those of all names, where there is no other."""
    return ColumnNeed(name, environment.needs_columns, lambda task: alone or (task.environment or default) == name)


def _need(context: RunContext, choice: Any) -> ColumnNeed:
    """What a reward reads of the tasks that it judges."""
    columns = type(context.build(choice.chosen)).needs_columns
    return ColumnNeed(choice.name, columns, lambda task: applies(choice.only, task))


def media_store(context: RunContext) -> str:
    """The directory of the run's processed media."""
    return str(Path(context.run_dir).absolute() / "media")


def context_of(run: Any) -> int:
    """The model's context in tokens; one that does not say has no bound of its own."""
    return model_context(run.model.path) or NO_BOUND


def make_media_pipeline(context: RunContext, family: ModelFamily, limit: int | None = None) -> MediaPipeline:
    """The processors of the run's media, and where what they make is kept, within a limit of bytes where one is given."""
    run = context.config
    return MediaPipeline(
        run.media, context.children, media_store(context), run.model.model_dump(mode="json"), family, limit
    )


@asynccontextmanager
async def opened_media_pipeline(context: RunContext, family: ModelFamily) -> AsyncIterator[MediaPipeline]:
    """A pipeline for rows that nobody samples."""
    pipeline = make_media_pipeline(context, family)
    try:
        await pipeline.start()
        yield pipeline
    finally:
        await pipeline.stop()
