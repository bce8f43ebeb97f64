# SPDX-License-Identifier: Apache-2.0
"""The hub of a run: one named actor with the bus, the run status and the weight service. It dies with the driver.

Roles find it by the run's name. It holds the run's lease: when the driver is gone, so is the hub, and every role that
can't reach it ends itself. It looks after the replicas that play the roles, and says which died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray

from relax_core.api.bus import BusComponent, BusSettings, PayloadStore
from relax_core.api.errors import WorkerDied
from relax_core.api.events import RoleFailed
from relax_core.api.role import Role, SystemClock
from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.devices.scheduler import LocalDeviceService
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.connection import RpcServer
from relax_core.rpc.host import Failure
from relax_core.runners.launch import Launch, bus_settings, launch_component, starting_version
from relax_core.runners.ray.cluster import NAMESPACE
from relax_core.runners.ray.connection import Packed, answered, answered_by_ray
from relax_core.runners.ray.replicas import ReplicaTracker
from relax_core.runners.ray.workers import GpuPlacement
from relax_core.runners.run_status import RunStatusService
from relax_core.weights.service import LocalWeightService

CONCURRENCY = 1000
"""Calls under way at once: long waits hold a place each."""
TAKEOVER_S = 120.0
LOOK_S = 1.0
"""Between two looks at a replica: Ray tells of a death only who asks."""


@dataclass(frozen=True, slots=True)
class HubService:
    """The services and data that a replica needs to play its role."""

    launch: Launch
    store: PayloadStore | None
    """That of the bus, where the replica reaches it by itself."""
    gpus: GpuPlacement | None
    """The run's GPUs."""
    without_s: float | None
    """How long the role was without a replica; None for its first one."""


def hub_name(run_id: str) -> str:
    return f"relax-{run_id}-hub"


def find_hub(run_id: str) -> Any:
    """Raises ValueError when the run has none."""
    return ray.get_actor(hub_name(run_id), namespace=NAMESPACE)


@ray.remote(num_cpus=0, max_restarts=0)
class Hub:
    """Services of one run."""

    def __init__(self) -> None:
        self._server = RpcServer(self._serve)

    async def open(self, launch: Launch) -> Any:
        return await answered(self._open(launch))

    async def open_bus(self, component: BusComponent, settings: BusSettings, directory: str, version: Version) -> Any:
        """The bus alone; what `open` does of it."""
        return await answered(self._open_bus(component, settings, directory, version))

    async def _open(self, launch: Launch) -> PayloadStore | None:
        catalogue = Catalogue.load(launch.plugin_files)
        component = cast(BusComponent, catalogue.build(launch_component(launch, "bus")))
        self._launch, self._gpus = launch, GpuPlacement.request(launch.plan)
        self._store = await self._open_bus(component, bus_settings(launch), launch.run_dir, starting_version(launch))
        self._clock = SystemClock()
        self._run_status, self._devices = RunStatusService(self._clock), LocalDeviceService(self._clock)
        self._services |= {
            "run_status": self._run_status,
            "weights": LocalWeightService(self._clock),
            "devices": self._devices,
        }
        self._ends: list[tuple[str, Failure | None]] = []
        self._presence = ReplicaTracker({role: _stateless(catalogue, role) for role in launch.plan.roles})
        self._entered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        return self._store

    async def _open_bus(
        self, component: BusComponent, settings: BusSettings, directory: str, version: Version
    ) -> PayloadStore | None:
        self._bus = await open_bus(component, settings, directory, version)
        self._services: dict[str, Any] = {"bus": self._bus}
        await self._server.open()
        return self._bus.store if self._bus.store.shared else None

    async def address(self) -> str:
        """Address of its socket; empty where it has none."""
        return self._server.address

    async def call(self, packed: Packed) -> Packed:
        """Answer a process on another machine."""
        return await answered_by_ray(self._serve, packed)

    async def _serve(self, method: str, args: Sequence[Any]) -> Any:
        service, _, name = method.partition(".")
        return await getattr(self._services[service], name)(*args)

    async def close(self) -> Any:
        closed = await answered(self._bus.close())
        self._server.close()
        return closed

    # -- roles --------------------------------------------------------------------------------------------------

    async def join(self, role: str, replica: Any, pid: int) -> HubService | None:
        """A replica takes its role; None where the role is played no more."""
        await self._lost(role, self._presence.pid(role))  # of a former one nobody need have told
        if self._presence.over(role):
            return None
        now = self._clock.now()
        since = self._presence.enter(role, pid, now)
        self._entered.set()
        self._own(self._watch(role, replica, pid))
        return HubService(self._launch, self._store, self._gpus, None if since is None else now - since)

    async def gathered(self) -> None:
        """Returns when every role is played."""
        while self._presence.missing():
            await self._entered.wait()
            self._entered.clear()

    async def alive(self) -> None:
        """Answers whoever wants to know whether the run goes on."""

    async def end_role(self, role: str, failure: Failure | None) -> None:
        if self._presence.end(role):
            self._ends.append((role, failure))

    async def ends(self, after: int) -> list[tuple[str, Failure | None]]:
        return self._ends[after:]

    async def _watch(self, role: str, replica: Any, pid: int) -> None:
        while self._presence.playing(role, pid):
            try:
                async with asyncio.timeout(LOOK_S):
                    await replica.__ray_ready__.remote()
            except ray.exceptions.ActorDiedError:
                await self._lost(role, pid)
            except (TimeoutError, ray.exceptions.RayError):
                pass  # busy or out of reach; whether it is stuck, Serve's health check decides
            await asyncio.sleep(LOOK_S)

    async def _lost(self, role: str, pid: int) -> None:
        now = self._clock.now()
        loss = self._presence.lost(role, pid, now)
        if loss is None:
            return
        await self._devices.gone(role)
        await self._run_status.emit(RoleFailed(role, loss.reason, WorkerDied.exit_code, loss.fatal))
        if loss.fatal:
            await self.end_role(role, Failure(WorkerDied.__name__, loss.reason))
        else:
            self._own(self._succeeded(role, now))

    async def _succeeded(self, role: str, lost_at: float) -> None:
        """A role that nobody takes over in time ends the run."""
        await self._clock.sleep(TAKEOVER_S)
        if self._presence.absent(role, lost_at):
            reason = f"role {role}: its process died and Serve started no other within {TAKEOVER_S:.0f} s"
            await self.end_role(role, Failure(WorkerDied.__name__, reason))

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _stateless(catalogue: Catalogue, role: str) -> bool:
    return cast(type[Role], catalogue.target("role", role)).stateless
