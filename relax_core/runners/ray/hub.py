# SPDX-License-Identifier: Apache-2.0
"""The hub of a run: one named actor with the bus, the run status and the weight service.

Roles find it by the run's name. It holds the run's lease: when the driver is gone, so is the hub, and every role that
can't reach it ends itself. The hub of a supervised run waits for the driver's successor before it ends
(`controller_lease.py`). It watches the replicas that run the roles, and says which died.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_core.api.bus import BusComponent, BusSettings, PayloadStore
from relax_core.api.errors import InfrastructureError, WorkerDied
from relax_core.api.events import RoleFailed
from relax_core.api.role import Role, SystemClock, WorkerSpec
from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.devices.scheduler import DeviceService
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.host import Failure, describe
from relax_core.runners.launch import Launch, bus_settings, launch_component, starting_version
from relax_core.runners.ray.connection import NAMESPACE, RpcActor, answered
from relax_core.runners.ray.controller_lease import FIRST_TERM, ControllerLease, end_at_expiry
from relax_core.runners.ray.worker_owner import OwnedWorkers
from relax_core.runners.replicas import TAKEOVER_S, ReplicaTracker
from relax_core.runners.run_status import RunStatusService
from relax_core.tensor_files.mapped_files import claim, memory_directory
from relax_core.weights.registry import WeightRegistry

CONCURRENCY = 1000
"""Calls under way at once: long waits hold a place each."""
PROBE_S = 1.0
"""Between two looks at a replica: Ray tells of a death only who asks."""
EXPIRED_S = 20.0
"""For a hub without a controller to end its workers and close its ledger."""


@dataclass(frozen=True, slots=True)
class HubService:
    """The services and data that a replica needs to run its role."""

    launch: Launch
    store: PayloadStore | None
    """That of the bus, where the replica reaches it by itself."""
    without_s: float | None
    """How long the role was without a replica; None for its first one."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """One start of a run as the successor of its controller needs it."""

    launch: Launch
    store: PayloadStore | None
    workers: OwnedWorkers
    apps: Mapping[str, str]
    """The application of each role."""
    term: int


def hub_name(run_id: str) -> str:
    return f"relax-{run_id}-hub"


def find_hub(run_id: str) -> Any:
    """Find the hub of a run. Raises ValueError when it has none."""
    return ray.get_actor(hub_name(run_id), namespace=NAMESPACE)


def hub_options(run_id: str, supervised: bool = False) -> dict[str, Any]:
    """Return the options of a run's hub: it stays on the driver's node, whose disk has the ledger. That of a `supervised`
    run outlives the driver, and all that it started itself lives on with it."""
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": hub_name(run_id), "namespace": NAMESPACE, "max_concurrency": CONCURRENCY}
    return {**options, "scheduling_strategy": node, **({"lifetime": "detached"} if supervised else {})}


@ray.remote(num_cpus=0, max_restarts=0)
class Hub(RpcActor):
    """Services of one run.

    Invariants:
    - A controller that was replaced changes nothing any more: what it asks for is refused by its term.
    - Without a controller for the length of the lease the hub ends, and the run with it, also where it was never opened.
    """

    _workers: OwnedWorkers
    _launch: Launch

    def __init__(self, lease_s: float | None = None) -> None:
        """`lease_s`: how long it waits for another controller; None: it dies with the one that made it."""
        super().__init__()
        self._clock = SystemClock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lease = ControllerLease(float("inf") if lease_s is None else lease_s, self._clock.now())
        if lease_s is not None:
            end_at_expiry(self._lease, self._clock, self._end)

    async def open(self, launch: Launch, mark: str, workers: OwnedWorkers, apps: Mapping[str, str]) -> Any:
        """Open a run whose driver has written a file of this name in the run directory; `apps`, by role: the applications
        that may run it."""
        return await answered(self._open(launch, mark, workers, apps))

    async def open_bus(self, component: BusComponent, settings: BusSettings, directory: str, version: Version) -> Any:
        """Open the bus alone; what `open` does of it."""
        return await answered(self._open_bus(component, settings, directory, version))

    async def _open(
        self, launch: Launch, mark: str, workers: OwnedWorkers, apps: Mapping[str, str]
    ) -> PayloadStore | None:
        if not await asyncio.to_thread((Path(launch.run_dir) / mark).is_file):
            raise InfrastructureError(
                f"run directory {launch.run_dir}: the hub, on {platform.node()}, sees another directory than the driver there, "
                "and would begin a second ledger; name one on a file system that both share, with --run-dir"
            )
        catalogue = Catalogue.load(launch.plugin_files)
        component = cast(BusComponent, catalogue.build(launch_component(launch, "bus")))
        self._loop = asyncio.get_running_loop()
        # What roles have in memory stays while their processes are replaced.
        if (memory := memory_directory(launch.run_id)) is not None:
            claim(memory)
        self._workers, self._apps = workers, dict(apps)
        self._store = await self._open_bus(component, bus_settings(launch), launch.run_dir, starting_version(launch))
        self._run_status, self._devices = RunStatusService(self._clock, controlled=True), DeviceService(self._clock)
        self._services |= {
            "run_status": self._run_status,
            "weights": WeightRegistry(self._clock),
            "devices": self._devices,
        }
        self._ends: list[tuple[str, Failure | None]] = []
        classes = {role: cast(type[Role], catalogue.target("role", role)) for role in launch.plan.roles}
        self._replicas = ReplicaTracker(
            {role: target.stateless or target.takes_over for role, target in classes.items()}
        )
        self._entered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = {asyncio.create_task(self._watch_owner())}
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
        service, _, term = service.partition("@")
        if term:  # the controller's calls
            self._lease.check(int(term))
        return await getattr(self._services[service], name)(*args)

    async def close(self, term: int = FIRST_TERM) -> Any:
        return await answered(self._close(term))

    async def _close(self, term: int) -> None:
        self._lease.check(term)
        for task in getattr(self, "_tasks", ()):  # without, only the bus was opened
            task.cancel()
        try:
            await self._bus.close()
        finally:
            self._server.close()

    # -- the controller -----------------------------------------------------------------------------------------

    async def take_over(self) -> Any:
        """Let another process control the run, whose controller is dead."""
        return await answered(self._take_over())

    async def _take_over(self) -> TakenOver:
        if not hasattr(self, "_launch"):
            raise InfrastructureError(f"hub of process {os.getpid()}: the run had not been opened")
        term = self._lease.take_over(self._clock.now())
        return TakenOver(self._launch, self._store, self._workers, self._apps, term)

    async def renew(self, term: int) -> Any:
        """Note that the controller of this term lives."""
        return await answered(self._renew(term))

    async def _renew(self, term: int) -> None:
        self._lease.renew(term, self._clock.now())

    def _end(self) -> None:
        """End with the ledger closed, as far as that is done in time; the shells find the hub gone."""
        if self._loop is not None:
            closing = asyncio.run_coroutine_threadsafe(self._close(self._lease.term), self._loop)
            with contextlib.suppress(Exception):
                closing.result(EXPIRED_S)
        os._exit(0)

    # -- roles --------------------------------------------------------------------------------------------------

    async def join(self, role: str, replica: Any, pid: int, app: str) -> HubService | None:
        """Let a replica run its role; None where the role has ended, or another application runs it."""
        if self._apps.get(role) != app:
            return None
        await self._lost(role, self._replicas.pid(role))  # of a former one nobody need have told
        if self._replicas.has_ended(role):
            return None
        now = self._clock.now()
        since = self._replicas.enter(role, pid, now)
        self._entered.set()
        self._own(role, self._watch(role, replica, pid))
        return HubService(self._launch, self._store, None if since is None else now - since)

    async def start_workers(self, role: str, incarnation: int, specs: Sequence[WorkerSpec], timeout_s: float) -> Any:
        """Start workers for a role, or hand over those of its predecessor."""
        return await answered(self._workers.start(role, incarnation, specs, timeout_s))

    async def replace_missing(self, apps: Mapping[str, str]) -> tuple[str, ...]:
        """Return the roles that had no replica yet; from here on these applications alone may run them."""
        missing = self._replicas.missing()
        self._apps |= {role: apps[role] for role in missing}
        return missing

    async def gathered(self) -> None:
        """Return when every role has had a replica."""
        while self._replicas.missing():
            await self._entered.wait()
            self._entered.clear()

    async def alive(self) -> None:
        """Answer whoever wants to know whether the run goes on."""

    async def end_role(self, role: str, failure: Failure | None) -> None:
        if self._replicas.end(role):
            await self._workers.end(role)
            self._ends.append((role, failure))

    async def ends(self, after: int, term: int) -> Any:
        return await answered(self._tell_ends(after, term))

    async def _tell_ends(self, after: int, term: int) -> list[tuple[str, Failure | None]]:
        self._lease.check(term)
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

    async def _watch_owner(self) -> None:
        """End this start of the run where the owner of its workers dies, and all of them with it."""
        try:
            await self._workers.died()
        except InfrastructureError as error:
            self._ends.append(("workers", describe(error)))

    async def _lost(self, role: str, pid: int) -> None:
        now = self._clock.now()
        loss = self._replicas.lost(role, pid, now)
        if loss is None:
            return
        await self._devices.gone(role)
        await self._workers.lost(role)
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
