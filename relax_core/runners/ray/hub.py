# SPDX-License-Identifier: Apache-2.0
"""The hub of a run: one named actor with the bus, run status, weight registry and device service.

Roles find the hub by the run's id. Ray ends the hub with the driver, and every role that can't reach the hub ends
itself. The hub watches the replicas that run the roles, and reports their deaths.
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
from relax_core.api.events import Logged, RoleFailed
from relax_core.api.role import SystemClock
from relax_core.api.run_commands import ScaleRequest
from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.devices.scheduler import DeviceService
from relax_core.observe.process_log import record_process
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.host import Failure, describe
from relax_core.runners.launch import Launch, bus_settings, launch_component, starting_version
from relax_core.runners.ray.cluster import draining_hosts
from relax_core.runners.ray.connection import NAMESPACE, RpcActor, answered
from relax_core.runners.ray.workers import GpuPlacement, node_labels
from relax_core.runners.replicas import TAKEOVER_S, ReplicaTracker
from relax_core.runners.run_status import RunStatusService
from relax_core.tensor_files.mapped_files import claim, memory_directory
from relax_core.weights.registry import WeightRegistry

CONCURRENCY = 1000
"""Largest number of concurrent calls of the hub; a waiting call counts, too."""
PROBE_S = 1.0
"""Seconds between two probes of a replica: Ray reports a death only in answer to a call."""
NODES_S = 5.0
"""Seconds between two looks for nodes that Ray drains; clouds announce the end of a node 30 to 120 s before."""


@dataclass(frozen=True, slots=True)
class HubService:
    """The data that a replica needs to run its role."""

    launch: Launch
    store: PayloadStore | None
    """The bus's store if replicas can reach it directly, else None."""
    gpus: GpuPlacement | None
    """The GPUs of the run; None without GPUs."""
    without_s: float | None
    """Seconds that the role was without a replica; None for its first replica."""


def hub_name(run_id: str) -> str:
    return f"relax-{run_id}-hub"


def find_hub(run_id: str) -> Any:
    """Return the hub of a run. Raises ValueError if the run has no hub."""
    return ray.get_actor(hub_name(run_id), namespace=NAMESPACE)


def hub_options(run_id: str) -> dict[str, object]:
    """Return the actor options of a run's hub, which stays on the driver's node because the ledger is on its disk."""
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": hub_name(run_id), "namespace": NAMESPACE, "max_concurrency": CONCURRENCY}
    return {**options, "scheduling_strategy": node}


@ray.remote(num_cpus=0, max_restarts=0)
class Hub(RpcActor):
    """The actor that serves the services of one run to its roles."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = SystemClock()

    async def open(self, launch: Launch, mark: str) -> Any:
        """Open a run. `mark`: name of the driver's file in the run directory, which the hub must see, too."""
        return await answered(self._open(launch, mark))

    async def open_bus(self, component: BusComponent, settings: BusSettings, directory: str, version: Version) -> Any:
        """Open only the bus."""
        return await answered(self._open_bus(component, settings, directory, version))

    async def _open(self, launch: Launch, mark: str) -> PayloadStore | None:
        if not await asyncio.to_thread((Path(launch.run_dir) / mark).is_file):
            raise InfrastructureError(
                f"run directory {launch.run_dir}: the hub on {platform.node()} sees another directory than the driver "
                "and would begin a second ledger; set --run-dir to a directory on a file system that both share"
            )
        record_process(launch.process_log("hub"))
        catalogue = Catalogue.load(launch.plugin_files)
        component = cast(BusComponent, catalogue.build(launch_component(launch, "bus")))
        # Claim the memory-backed directory of weights, so that it outlives replaced processes of roles.
        if (memory := memory_directory(launch.run_id)) is not None:
            claim(memory)
        self._gpus = GpuPlacement.request(launch.plan, node_labels(launch.config, elastic=False))
        settings, version = bus_settings(launch), starting_version(launch)
        self._store = await self._open_bus(component, settings, launch.run_dir, version, launch.epoch_number)
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
        self._own(launch.plan.roles[0], self._watch_nodes())
        return self._store

    async def _open_bus(
        self, component: BusComponent, settings: BusSettings, directory: str, version: Version, epoch: int = 0
    ) -> PayloadStore | None:
        self._bus = await open_bus(component, settings, directory, version, epoch=epoch)
        self._services: dict[str, Any] = {"bus": self._bus}
        await self._server.open()
        return self._bus.store if self._bus.store.shared else None

    async def _serve(self, method: str, args: Sequence[Any]) -> Any:
        service, _, name = method.partition(".")
        return await getattr(self._services[service], name)(*args)

    async def close(self) -> Any:
        return await answered(self._close())

    async def _close(self) -> None:
        for task in getattr(self, "_tasks", ()):  # absent if only the bus was opened
            task.cancel()
        try:
            await self._bus.close()
        finally:
            self._server.close()

    # -- roles --------------------------------------------------------------------------------------------------

    async def join(self, role: str, replica: Any, pid: int) -> Any:
        """Let a replica run its role: return the run's `HubService`, or None if the role has ended."""
        return await answered(self._join(role, replica, pid))

    async def _join(self, role: str, replica: Any, pid: int) -> HubService | None:
        # The probes may not have noticed yet that the last replica died.
        await self._lost(role, self._replicas.pid(role))
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
        """Answer a shell that checks whether the hub is alive."""

    async def end_role(self, role: str, failure: Failure | None) -> None:
        if self._replicas.end(role):
            self._ends.append((role, failure))

    async def ends(self, after: int) -> list[tuple[str, Failure | None]]:
        """Return (role, failure) of the ended roles in the order of their ends, without the first `after` roles."""
        return self._ends[after:]

    async def _watch(self, role: str, replica: Any, pid: int) -> None:
        while self._replicas.is_current(role, pid):
            try:
                async with asyncio.timeout(PROBE_S):
                    await replica.__ray_ready__.remote()
            except ray.exceptions.ActorDiedError:
                await self._lost(role, pid)
            except (TimeoutError, ray.exceptions.RayError):
                pass  # busy or unreachable; Serve's health check detects a stuck replica
            await asyncio.sleep(PROBE_S)

    async def _watch_nodes(self) -> None:
        """Tell the roles with engine pools about each node that Ray begins to drain, so that its engines leave in time."""
        told: frozenset[str] = frozenset()
        failed = False
        while True:
            draining = told
            try:
                draining = await asyncio.to_thread(draining_hosts)
            except Exception as error:  # any error of Ray: the run goes on without notices
                if not failed:
                    said = f"Ray does not say which nodes it drains, so their engines do not leave early: {error}"
                    await self._run_status.emit(Logged("warning", "hub", said))
                failed = True
            for host in sorted(draining - told):
                for role in {"rollout", "teacher"}.intersection(self._launch.plan.roles):
                    await self._run_status.command(role, ScaleRequest(f"node-{host}", ending=host))
            told = draining
            await self._clock.sleep(NODES_S)

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
        """End the role with a failure if no new replica takes it over in time."""
        await self._clock.sleep(TAKEOVER_S)
        if self._replicas.absent(role, lost_at):
            reason = f"role {role}: its process died and Serve did not replace it within {TAKEOVER_S:.0f} s"
            await self.end_role(role, Failure(WorkerDied.__name__, reason))

    def _own(self, role: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that watches a role. If it fails, end the role with its error: nothing else watches the role."""

        async def attend() -> None:
            try:
                await work
            except Exception as error:
                await self.end_role(role, describe(error))

        task = asyncio.create_task(attend())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
