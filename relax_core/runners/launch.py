# SPDX-License-Identifier: Apache-2.0
"""The interface of runners, and `Launch`: the plain data from which each process of a run builds its part."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from relax_core.api.bus import Bus, BusSettings
from relax_core.api.component import Chosen
from relax_core.api.options import revealed
from relax_core.api.plan import Plan
from relax_core.api.role import Resume, RunStatus
from relax_core.api.weights import Version
from relax_core.config.tables import RunTable
from relax_core.observe.epoch import RunEpoch
from relax_core.observe.process_log import SUFFIX, ProcessLog
from relax_core.observe.redaction import Redactor, credentials
from relax_core.rpc import messages

messages.register(RunEpoch)


RECIPE = "recipe"
"""Folder of a run directory with the files that the build of a named recipe made."""
STAGES = "stages"
"""Folder of a run directory with one directory for each stage."""


@messages.register
@dataclass(frozen=True, slots=True)
class Launch:
    """One run as plain data, from which every process builds its roles."""

    run_id: str
    run_dir: str
    config: Mapping[str, Any]
    """The run's configuration, as `RunConfig.dump()` returns it."""
    plan: Plan
    plugin_files: tuple[str, ...] = ()
    resolved: tuple[Any, ...] = ()
    """The plugins that the driver has loaded; a worker with different plugins refuses to start."""
    incarnation: int = 0
    resume: Resume | None = None
    epoch: RunEpoch | None = None
    """The epoch of this start of the run; None disables the check for later starts."""
    functions: Mapping[str, bytes] = field(default_factory=dict)
    """Rewards passed as Python functions: cloudpickle bytes by name, loaded only by children of this process tree."""

    @property
    def run_env(self) -> dict[str, str]:
        """Variables of `[run] env` for all workers, with the values of their secrets."""
        return RunTable(**self.config.get("run", {})).revealed_env()

    @property
    def epoch_number(self) -> int:
        """The number of this start of the run; 0 without an epoch."""
        return self.epoch.number if self.epoch is not None else 0

    def process_log(self, process: str, role: str = "") -> ProcessLog | None:
        """Return the log of a process that may write to the run directory; None on a machine without the directory."""
        folder = Path(self.run_dir) / "logs"
        if not folder.is_dir():
            return None
        redactor = Redactor((*revealed(self.config), *credentials(os.environ)))
        about = {"run": self.run_id, "process": process, **({"role": role} if role else {})}
        return ProcessLog(folder / f"{process}{SUFFIX}", redactor, about)

    @property
    def whole_run(self) -> Path:
        """The directory of the whole run; `run_dir` is a folder in it if the run has stages."""
        directory = Path(self.run_dir).absolute()
        return directory.parents[1] if directory.parent.name == STAGES else directory


def launch_component(launch: Launch, table: str) -> Chosen:
    """Return the component that a configuration table of the launch names."""
    entry = dict(launch.config[table])
    return Chosen(table, entry.pop("name"), entry)


@dataclass(frozen=True, slots=True)
class RoleEnd:
    """The end of a role: it returned, or failed for good with `error`."""

    role: str
    error: BaseException | None = None


class Runner(Protocol):
    """A backend that runs the roles of a launch."""

    run_status: RunStatus
    bus: Bus

    @property
    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """Factory of the event loop that the runner needs; None for asyncio's default."""
        ...

    async def start(self, launch: Launch) -> None:
        """Start bus, run status and every role of the plan. Raises the error that prevents a start."""
        ...

    async def ended(self, wait_s: float) -> tuple[RoleEnd, ...]:
        """Return the roles that ended since the last call; wait for the first, for at most `wait_s` seconds."""
        ...

    async def close(self) -> None:
        """End everything that this runner started. Safe to call twice, and after a failed start."""
        ...


def bus_settings(launch: Launch) -> BusSettings:
    rollout, plan = launch.config["rollout"], launch.plan
    return BusSettings(
        group_size=plan.group_size,
        groups_per_step=rollout["groups_per_step"],
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
