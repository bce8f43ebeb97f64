# SPDX-License-Identifier: Apache-2.0
"""The interface of runners: plain data in, a hub and role tasks out.

The settings of the bus are made from the launch's plain data, so that it can be opened in any process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from relax_core.api.bus import Bus, BusSettings
from relax_core.api.component import Chosen
from relax_core.api.plan import Plan
from relax_core.api.role import Resume, RunStatus
from relax_core.api.weights import Version
from relax_core.observe.epoch import RunEpoch
from relax_core.rpc import messages

messages.register(RunEpoch)


STAGES = "stages"
"""Folder of a run directory in which each stage has a directory."""


@messages.register
@dataclass(frozen=True, slots=True)
class Launch:
    """One run as plain data: every role of it, in whatever process, is built from this."""

    run_id: str
    run_dir: str
    config: Mapping[str, Any]
    """`RunConfig.dump()`."""
    plan: Plan
    plugin_files: tuple[str, ...] = ()
    resolved: tuple[Any, ...] = ()
    """Plugins as the driver has them; a worker refuses to start on a difference."""
    incarnation: int = 0
    resume: Resume | None = None
    epoch: RunEpoch | None = None
    """This start of the run; None: nobody else ever starts in its directory."""
    functions: Mapping[str, bytes] = field(default_factory=dict)
    """Rewards passed as Python functions, by name, as cloudpickle; they reach only children of this process tree."""

    @property
    def whole_run(self) -> Path:
        """The directory of the whole run, in which a stage has its own."""
        directory = Path(self.run_dir).absolute()
        return directory.parents[1] if directory.parent.name == STAGES else directory


def launch_component(launch: Launch, table: str) -> Chosen:
    """The component that a configuration table names, from plain data."""
    entry = dict(launch.config[table])
    return Chosen(table, entry.pop("name"), entry)


@dataclass(frozen=True, slots=True)
class RoleEnd:
    """A role returned or failed for good."""

    role: str
    error: BaseException | None = None


class Runner(Protocol):
    """A place that roles run in."""

    run_status: RunStatus
    bus: Bus

    @property
    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """Make the event loop that it needs; None: asyncio's own."""
        ...

    async def start(self, launch: Launch) -> None:
        """Bring up bus, run status and every role of the plan; raises what made it impossible."""
        ...

    async def ended(self, wait_s: float) -> tuple[RoleEnd, ...]:
        """Roles that ended since the last call; waits up to `wait_s` for one."""
        ...

    async def close(self) -> None:
        """End whatever this runner started; safe to call twice, and after a failed start."""
        ...


def bus_settings(launch: Launch) -> BusSettings:
    rollout, plan = launch.config["rollout"], launch.plan
    return BusSettings(
        group_size=plan.group_size,
        groups_per_step=rollout["prompts_per_step"],
        max_staleness=plan.max_staleness,
        late=rollout["late"],
        spare_groups=rollout["spare_groups"],
        min_valid=plan.min_valid,
        columns=plan.trained_columns,
        steps=launch.config["steps"],
        followers=tuple(f"{role}.fit" for role in plan.fit_columns),
    )


def starting_version(launch: Launch) -> Version:
    """Return the version of the actor's weights when the run, or its continuation, begins."""
    return Version("actor", launch.incarnation, launch.resume.step if launch.resume else 0)
