# SPDX-License-Identifier: Apache-2.0
"""The local runner: roles are asyncio tasks of this process; ranks, engines, rewards and environments are child processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import cast

from relax_core.api.bus import Bus, BusComponent
from relax_core.api.component import Chosen
from relax_core.api.role import Clock, Role, RunStatus, SystemClock, Workers
from relax_core.bus.service import open_bus
from relax_core.devices.scheduler import DeviceService
from relax_core.registry.catalogue import Catalogue
from relax_core.runners.context import RoleContext, run_role
from relax_core.runners.launch import Launch, RoleEnd, bus_settings, launch_component, starting_version
from relax_core.runners.local.workers import LocalWorkers
from relax_core.runners.run_status import RunStatusService
from relax_core.weights.registry import WeightRegistry


class LocalRunner:
    """A `runners.launch.Runner` in one process tree."""

    bus: Bus
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None

    def __init__(self, catalogue: Catalogue, clock: Clock | None = None) -> None:
        self._catalogue, self._clock = catalogue, clock or SystemClock()
        self.run_status: RunStatus = RunStatusService(self._clock, controlled=True)
        self._weights = WeightRegistry(self._clock)
        self._devices = DeviceService(self._clock)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Queue[RoleEnd] = asyncio.Queue()
        self._workers: list[Workers] = []
        """Workers of each start of a role."""
        self._open = False

    async def start(self, launch: Launch) -> None:
        config = self._catalogue.build(launch_component(launch, "bus"))
        if not isinstance(config, BusComponent):
            raise TypeError(f"[bus] names {type(config).__name__}, which is not a bus component")
        self.bus = await open_bus(
            config, bus_settings(launch), launch.run_dir, starting_version(launch), self._clock, launch.epoch_number
        )
        self._open = True
        for name in launch.plan.roles:
            role = cast(Role, self._catalogue.build(Chosen("role", name)))
            task = asyncio.create_task(self._run(role, launch), name=name)
            self._tasks[name] = task

    def _make_workers(self, launch: Launch, role: str) -> Workers:
        return LocalWorkers.of_run(launch, self._clock, role)

    async def _run(self, role: Role, launch: Launch) -> None:
        def context(registration: int) -> RoleContext:
            self._workers.append(workers := self._make_workers(launch, role.name))
            return RoleContext(
                role.name,
                launch,
                self._catalogue,
                self.bus,
                self._weights,
                self.run_status,
                workers,
                workers,
                self._clock,
                registration,
                self._devices,
            )

        try:
            await run_role(role, context)
            self._ended.put_nowait(RoleEnd(role.name))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._ended.put_nowait(RoleEnd(role.name, error))

    async def ended(self, wait_s: float) -> tuple[RoleEnd, ...]:
        first: tuple[RoleEnd, ...] = ()
        if self._ended.empty() and wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    first = (await self._ended.get(),)
        return (*first, *(self._ended.get_nowait() for _ in range(self._ended.qsize())))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(workers.close() for workers in self._workers))
        if self._open:
            self._open = False
            await self.bus.close()
