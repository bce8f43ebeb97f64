# SPDX-License-Identifier: Apache-2.0
"""One role of a run alone on this machine, without a controller and a run directory.

The commands sample with the rollout, and compute log-probs or write a model with the actor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from relax_core.api.batch import AttemptId
from relax_core.api.bus import BusSettings, Issue
from relax_core.api.events import Logged
from relax_core.api.options import revealed
from relax_core.api.role import SystemClock
from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.bus.store import InProcessBus
from relax_core.config.layers import Source
from relax_core.launch import Catalogue, Launch, RunConfig, make_launch, plan_run
from relax_core.rewards.host import announce
from relax_core.runners.context import RoleContext
from relax_core.runners.inline import InlineWorkers
from relax_core.runners.local.workers import LocalWorkers
from relax_core.runners.run_status import RunStatusService
from relax_core.runs import Redactor
from relax_core.weights.registry import WeightRegistry


def try_launch(
    sources: Sequence[Source], overrides: Sequence[str], directory: Path
) -> tuple[RunConfig, Launch, Catalogue]:
    """Return the configuration and launch of the first stage, without a run directory; build a recipe in `directory`."""
    planned = plan_run(sources, overrides).build_recipe(directory / "recipe", sources, overrides)
    stage = planned.stages[0]
    return stage.config, make_launch(stage.config, stage.plan, planned.catalogue, directory), planned.catalogue


def announce_functions(rewards: Iterable[Mapping[str, Any]], catalogue: Catalogue) -> None:
    """Add the names of rewards that `relax.train` got as functions, for commands that call no reward."""
    names = {str(reward.get("name")) for reward in rewards}.difference(catalogue.names("reward"))
    announce((name for name in names if ":" not in name), catalogue)


@asynccontextmanager
async def single_role(role: str, launch: Launch, catalogue: Catalogue) -> AsyncIterator[RoleContext]:
    """Yield a context for one role alone, with its workers on this machine; with the runner `inline`, in this process.

    The workers end with the context, so two roles are never loaded together.
    """
    workers: InlineWorkers | LocalWorkers
    if launch.config["run"]["runner"] == "inline":
        workers = InlineWorkers(catalogue, launch.run_env)
    else:
        redactor = Redactor(revealed(launch.config))
        workers = LocalWorkers(launch.plugin_files, launch.resolved, redactor=redactor, run_env=launch.run_env)
    clock = SystemClock()
    size = int(launch.config["rollout"]["group_size"])
    bus = await open_bus(InProcessBus(), BusSettings(size, 1, 0), launch.run_dir, Version("actor", 0, 0))
    context = RoleContext(
        role, launch, catalogue, bus, WeightRegistry(clock), RunStatusService(clock), workers, workers, clock, 0
    )
    try:
        yield context
    finally:
        await context.close()
        await bus.close()


def first_attempts(group: int, size: int) -> Issue:
    """Return the group of this number with the first attempts at its `size` samples."""
    return Issue(group, tuple(AttemptId(group, sample, 0) for sample in range(size)))


async def warnings(context: RoleContext) -> tuple[str, ...]:
    """Return the warnings that the role has logged so far."""
    events = [event for _, event in await context.run_status.events(0, 0.0)]
    return tuple(event.message for event in events if isinstance(event, Logged) and event.level == "warning")


async def ignore(*_: Any) -> None:
    """Ignore an event: a single role has no recorder, and a failed engine shows in the samples' outcomes."""
