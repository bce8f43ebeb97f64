# SPDX-License-Identifier: Apache-2.0
"""The hub of a run: one named actor with the bus, the board and the weight service. It dies with the driver.

Roles find it by the run's name. It holds the run's lease: when the driver is gone, so is the hub, and every role that
can't reach it ends itself.
"""

from __future__ import annotations

from typing import Any, cast

import ray

from relax_core.api.bus import BusComponent
from relax_core.api.clock import SystemClock
from relax_core.plugins.catalogue import Catalogue
from relax_core.runners.board import BoardService
from relax_core.runners.bus_settings import bus_settings, starting_version
from relax_core.runners.host import Failure
from relax_core.runners.launch import Launch, launch_component
from relax_core.runners.ray.answer import answered
from relax_core.runners.ray.cluster import NAMESPACE
from relax_core.weights.service import WeightBoard

CONCURRENCY = 1000
"""Calls under way at once: long waits hold a place each."""


def hub_name(run_id: str) -> str:
    return f"relax-{run_id}-hub"


def find_hub(run_id: str) -> Any:
    """Raises ValueError when the run has none."""
    return ray.get_actor(hub_name(run_id), namespace=NAMESPACE)


@ray.remote(num_cpus=0, max_restarts=0)
class Hub:
    """Services of one run."""

    async def open(self, launch: Launch) -> Any:
        return await answered(self._open(launch))

    async def _open(self, launch: Launch) -> list[Any]:
        clock = SystemClock()
        component = cast(BusComponent, Catalogue.load(launch.plugin_files).build(launch_component(launch, "bus")))
        bus = await component.open(bus_settings(launch), launch.run_dir, starting_version(launch))
        self._ends: list[tuple[str, Failure | None]] = []
        self._services: dict[str, Any] = {
            "bus": bus, "board": BoardService(clock), "weights": WeightBoard(clock), "run": self,
        }  # fmt: skip
        self._launch, self._storages = launch, getattr(component, "storages", [])
        return self._storages

    async def join(self) -> tuple[Launch, list[Any]]:
        """What a role's shell needs to build its context."""
        return self._launch, self._storages

    async def call(self, service: str, method: str, args: tuple[Any, ...]) -> Any:
        return await answered(getattr(self._services[service], method)(*args))

    async def end_role(self, role: str, failure: Failure | None) -> None:
        self._ends.append((role, failure))

    async def ends(self, after: int) -> list[tuple[str, Failure | None]]:
        return self._ends[after:]

    async def close(self) -> Any:
        return await answered(self._services["bus"].close())
