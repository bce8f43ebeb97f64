# SPDX-License-Identifier: Apache-2.0
"""What each worker group of a plan says it will need, asked of its trainer or engine before anything starts.

Who can't tell is named; nothing is guessed in their place. What the figures mean together is `sizing`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, cast

from relax_core.api.engine import Engine
from relax_core.api.estimate import Estimate, Workload
from relax_core.api.role import Context
from relax_core.api.trainer import Trainer
from relax_core.api.version import Version
from relax_core.options.engines import EngineTable
from relax_core.options.run_config import RunConfig
from relax_core.plugins.catalogue import Catalogue
from relax_core.roles.plan import Plan, WorkerGroup
from relax_core.roles.trainer_group import trainer_spec
from relax_core.rollout.opening_engines import engine_spec
from relax_core.rollout.side_pools import GROUP, pool_spec

ENGINES = "rollout"


@dataclass(frozen=True, slots=True)
class Need:
    """Of one worker group."""

    group: WorkerGroup
    first: Estimate | None
    """Of its first process, which writes and publishes too."""
    others: Estimate | None
    """Of each of the others."""
    unknown: str = ""
    """Why there is no estimate."""

    @property
    def processes(self) -> tuple[Estimate, ...]:
        """An estimate for each."""
        if self.first is None or self.others is None:
            return ()
        return (self.first, *[self.others] * (self.group.size - 1))


@dataclass(frozen=True, slots=True)
class _Planned:
    """As much of a role's context as a specification takes."""

    run: RunConfig
    plan: Plan
    build: Callable[..., Any]
    run_dir: str = ""


def needs(config: RunConfig, catalogue: Catalogue, plan: Plan, prompt_tokens: int) -> tuple[Need, ...]:
    """`prompt_tokens`: of the longest prompt."""
    planned = _Planned(config, plan, catalogue.build)
    rollout = config.rollout
    step = Workload(rollout.prompts_per_step, plan.group_size, prompt_tokens, rollout.max_new_tokens)
    return tuple(_need(group, planned, step) for group in plan.groups.values())


def _need(group: WorkerGroup, planned: _Planned, step: Workload) -> Need:
    pool = planned.run.pool(group.name.removeprefix(GROUP)) if group.name.startswith(GROUP) else None
    own = planned.run.engine if group.name == ENGINES else planned.run.trainer
    choice = own if pool is None else planned.run.backend_of(pool)
    if choice.python:
        return Need(group, None, None, f"{choice.name} runs under another interpreter, {choice.python}")
    backend = planned.build(choice.chosen)
    backend.build = planned.build
    try:
        if pool is not None:
            told = _of_pool(cast(Engine, backend), planned.run, pool, step, group.size)
            return Need(group, told, told)
        if group.name == ENGINES:
            told = _of_engine(cast(Engine, backend), planned, step, group.size)
            return Need(group, told, told)
        first, last = (_of_rank(cast(Trainer, backend), planned, group, rank, step) for rank in (0, group.size - 1))
        return Need(group, first, last)
    except NotImplementedError as error:
        return Need(group, None, None, f"not estimated by {choice.name}{f': {error}' if str(error) else ''}")


def _of_engine(engine: Engine, planned: _Planned, step: Workload, size: int) -> Estimate:
    """Its share of all groups that may be under way at once; the work is that of one step."""
    run = planned.run
    ahead = 1 + (planned.plan.max_staleness or 0)
    evaluated = ceil(run.eval.size * run.eval.samples / step.group_size) if run.eval.every else 0
    most = max(step.prompts * ahead, evaluated)
    spec = engine_spec(run, Version("actor", 0, 0))
    bytes_of = engine.estimate(spec, replace(step, prompts=ceil(most / size)))
    flops = engine.estimate(spec, replace(step, prompts=ceil(step.prompts / size))).flops
    return replace(bytes_of, flops=flops)


def _of_pool(engine: Engine, run: RunConfig, pool: EngineTable, step: Workload, size: int) -> Estimate:
    """Its share of one request for each sample of a step, as long as a sample: what is asked is not known before."""
    return engine.estimate(pool_spec(run, pool), replace(step, prompts=ceil(step.prompts / size)))


def _of_rank(trainer: Trainer, planned: _Planned, group: WorkerGroup, rank: int, step: Workload) -> Estimate:
    role, _, number = group.name.partition("-") if group.name.startswith("teacher") else (group.name, "", "")
    model: Mapping[str, Any] | None = None
    if role == "teacher":
        teacher = planned.run.teachers[int(number or 0)]
        model = {"path": str(teacher.path), "dtype": teacher.dtype or planned.run.model.dtype}
    spec = trainer_spec(cast(Context, planned), role, rank, group.size, "", model)
    return trainer.estimate(spec, step)
