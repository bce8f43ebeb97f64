# SPDX-License-Identifier: Apache-2.0
"""The hub of a run: one named actor with the bus, the run status and the weight service.

Roles find it by the run's name. Ray ends it with the driver, and every role that can't reach it ends itself. It watches
the replicas that run the roles, and reports which died.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_core.api.bus import BusComponent, BusSettings, PayloadStore
from relax_core.api.errors import InfrastructureError, WorkerDied
from relax_core.api.events import RoleFailed
from relax_core.api.role import SystemClock
from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.devices.scheduler import DeviceService
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.host import Failure, describe
from relax_core.runners.launch import Launch, bus_settings, launch_component, starting_version
from relax_core.runners.ray.connection import NAMESPACE, RpcActor, answered
from relax_core.runners.ray.workers import GpuPlacement
from relax_core.runners.replicas import TAKEOVER_S, ReplicaTracker
from relax_core.runners.run_status import RunStatusService
from relax_core.tensor_files.mapped_files import claim, memory_directory
from relax_core.weights.registry import WeightRegistry

CONCURRENCY = 1000
"""Calls under way at once: long waits hold a place each."""
PROBE_S = 1.0
"""Between two looks at a replica: Ray tells of a death only who asks."""


@dataclass(frozen=True, slots=True)
class HubService:
    """The services and data that a replica needs to run its role."""

    launch: Launch
    store: PayloadStore | None
    """That of the bus, where the replica reaches it by itself."""
    gpus: GpuPlacement | None
    """The GPUs of the run."""
    without_s: float | None
    """How long the role was without a replica; None for its first one."""


def hub_name(run_id: str) -> str:
    return f"relax-{run_id}-hub"


def find_hub(run_id: str) -> Any:
    """Find the hub of a run. Raises ValueError when it has none."""
    return ray.get_actor(hub_name(run_id), namespace=NAMESPACE)


def hub_options(run_id: str) -> dict[str, Any]:
    """Return the options of a run's hub: it stays on the driver's node, whose disk has the ledger."""
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": hub_name(run_id), "namespace": NAMESPACE, "max_concurrency": CONCURRENCY}
    return {**options, "scheduling_strategy": node}


@ray.remote(num_cpus=0, max_restarts=0)
class Hub(RpcActor):
    """Services of one run."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = SystemClock()

    async def open(self, launch: Launch, mark: str) -> Any:
        """Open a run whose driver has written a file of this name in the run directory."""
        return await answered(self._open(launch, mark))

    async def open_bus(self, component: BusComponent, settings: BusSettings, directory: str, version: Version) -> Any:
        """Open the bus alone; what `open` does of it."""
        return await answered(self._open_bus(component, settings, directory, version))

    async def _open(self, launch: Launch, mark: str) -> PayloadStore | None:
        if not await asyncio.to_thread((Path(launch.run_dir) / mark).is_file):
            raise InfrastructureError(
                f"run directory {launch.run_dir}: the hub, on {platform.node()}, sees another directory than the driver there, "
                "and would begin a second ledger; name one on a file system that both share, with --run-dir"
            )
        catalogue = Catalogue.load(launch.plugin_files)
        component = cast(BusComponent, catalogue.build(launch_component(launch, "bus")))
        # What roles have in memory stays while their processes are replaced.
        if (memory := memory_directory(launch.run_id)) is not None:
            claim(memory)
        self._gpus = GpuPlacement.request(launch.plan)
        self._store = await self._open_bus(component, bus_settings(launch), launch.run_dir, starting_version(launch))
        self._run_status, self._devices = RunStatusService(self._clock, controlled=True), DeviceService(self._clock)
        self._services |= {
            "run_status": self._run_status,
            "weights": WeightRegistry(self._clock),
            "devices": self._devices,
        }
        self._ends: list[tuple[str, Failure | None]] = []
        self._replicas = ReplicaTracker(launch.plan.roles)
        self._entered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._launch = launch
        return self._store

    async def _open_bus(
        self, component: BusComponent, settings: BusSettings, directory: str, version: Version
    ) -> PayloadStore | None:
        self._bus = await open_bus(component, settings, directory, version)
        self._services: dict[str, Any] = {"bus": self._bus}
        await self._server.open()
        return self._bus.store if self._bus.store.shared else None

    async def _serve(self, method: str, args: Sequence[Any]) -> Any:
        service, _, name = method.partition(".")
        return await getattr(self._services[service], name)(*args)

    async def close(self) -> Any:
        return await answered(self._close())

    async def _close(self) -> None:
        for task in getattr(self, "_tasks", ()):  # without, only the bus was opened
            task.cancel()
        try:
            await self._bus.close()
        finally:
            self._server.close()

    # -- roles --------------------------------------------------------------------------------------------------

    async def join(self, role: str, replica: Any, pid: int) -> HubService | None:
        """Let a replica run its role; None where the role has ended."""
        await self._lost(
            role, self._replicas.pid(role)
        )  # a probe may not have found the replica before this one dead yet
        if self._replicas.has_ended(role):
            return None
        now = self._clock.now()
        since = self._replicas.enter(role, pid, now)
        self._entered.set()
        self._own(role, self._watch(role, replica, pid))
        return HubService(self._launch, self._store, self._gpus, None if since is None else now - since)

    async def gathered(self) -> None:
        """Return when every role has had a replica."""
        while self._replicas.missing():
            await self._entered.wait()
            self._entered.clear()

    async def alive(self) -> None:
        """Answer a shell that checks whether the run goes on."""

    async def end_role(self, role: str, failure: Failure | None) -> None:
        if self._replicas.end(role):
            self._ends.append((role, failure))

    async def ends(self, after: int) -> list[tuple[str, Failure | None]]:
        """Return the roles that ended, without the first `after` of them."""
        return self._ends[after:]

    async def _watch(self, role: str, replica: Any, pid: int) -> None:
        while self._replicas.is_current(role, pid):
            try:
                async with asyncio.timeout(PROBE_S):
                    await replica.__ray_ready__.remote()
            except ray.exceptions.ActorDiedError:
                await self._lost(role, pid)
            except (TimeoutError, ray.exceptions.RayError):
                pass  # busy or out of reach; whether it is stuck, Serve's health check decides
            await asyncio.sleep(PROBE_S)

    async def _lost(self, role: str, pid: int) -> None:
        now = self._clock.now()
        loss = self._replicas.lost(role, pid, now)
        if loss is None:
            return
        await self._devices.gone(role)
        await self._run_status.emit(RoleFailed(role, loss.reason, WorkerDied.exit_code, loss.fatal))
        if loss.fatal:
            await self.end_role(role, Failure(WorkerDied.__name__, loss.reason))
        else:
            self._own(role, self._await_successor(role, now))

    async def _await_successor(self, role: str, lost_at: float) -> None:
        """End the run where nobody takes the role over in time."""
        await self._clock.sleep(TAKEOVER_S)
        if self._replicas.absent(role, lost_at):
            reason = f"role {role}: its process died and Serve started no other within {TAKEOVER_S:.0f} s"
            await self.end_role(role, Failure(WorkerDied.__name__, reason))

    def _own(self, role: str, work: Coroutine[Any, Any, None]) -> None:
        """Look after a role beside the calls; where that fails the role ends with the error, since nobody else looks."""

        async def attend() -> None:
            try:
                await work
            except Exception as error:
                await self.end_role(role, describe(error))

        task = asyncio.create_task(attend())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
