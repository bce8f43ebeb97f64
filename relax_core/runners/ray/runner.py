# SPDX-License-Identifier: Apache-2.0
"""The Ray runner: brings up a cluster, a hub and one Serve application a role, and removes what it started.

Under a supervisor it can also take over what the runner of a killed process has left, and go on with it.
Applications are deployed by `serve.run_many`: the declarative route would replace those of other runs on the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.util import list_named_actors

from relax_core.api.bus import Bus
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, StaleFence, WorkerDied
from relax_core.api.role import Role, RunStatus
from relax_core.observe.documents import disk_errors
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.connection import proxy
from relax_core.rpc.host import Failure, raised
from relax_core.runners.launch import Launch, RoleEnd
from relax_core.runners.ray.bus import BusClient, RemoteStore
from relax_core.runners.ray.cluster import Cluster
from relax_core.runners.ray.connection import NAMESPACE, RpcClient, asked
from relax_core.runners.ray.controller_lease import FIRST_TERM, LEASE_S, RENEW_S
from relax_core.runners.ray.hub import Hub, find_hub, hub_name, hub_options
from relax_core.runners.ray.shell import app_name, deployment
from relax_core.runners.ray.worker_owner import OwnedWorkers, owner_name
from relax_core.runners.ray.workers import gpu_sets

OPEN_S = 120.0
CLOSE_S = 20.0
CALL_BACK_S = 30.0
"""For the shells of the former start to come: longer than a role has to stop. Others take the places of those that hang."""
POLL_S = 0.25


class RayRunner:
    """Implements `runners.launch.Runner` on Ray Serve.

    Life cycle: `made -> started | taken over, then started -> closed`.

    Invariants:
    - A supervised run's hub and the owner of its workers hear of this process while it lives, and outlive it for the length of
      the lease.
    - A process whose run another one has taken over ends at once, and changes nothing of it, on the cluster or on disk.
    """

    run_status: RunStatus
    bus: Bus
    loop_factory = None

    def __init__(self, catalogue: Catalogue, supervised: bool = False, kept: KeptActors | None = None) -> None:
        """`supervised`: if this process is killed, another one takes over what it has started; `kept`: workers of the run's
        former start."""
        self._catalogue, self._supervised = catalogue, supervised
        self._term = FIRST_TERM
        self._renewing: asyncio.Task[None] | None = None
        self._cluster = kept.cluster if kept else Cluster(held=supervised)
        self._workers = kept.workers if kept else None
        self._hub: Any = None
        self._client: RpcClient | None = None
        self._store: Any = None
        self._apps = dict(kept.apps) if kept else {}
        self._ended = 0
        self._launch: Launch | None = None

    def connect_early(self) -> None:
        """Begin to connect before there is a launch; returns at once, and `start` waits for the rest."""
        self._cluster.begin()

    def take_over(self, run_id: str) -> Launch:
        """Take over the start of a run of this name whose controller is dead. InfrastructureError where none lives."""
        self._cluster.begin().result()
        try:
            hub = find_hub(run_id)
            found = ray.get(hub.take_over.remote(), timeout=OPEN_S)
        except (ValueError, TimeoutError, ray.exceptions.RayError) as error:
            raise InfrastructureError(f"ray: no hub of {run_id} answers: {error}") from error
        if isinstance(found, Failure):
            raise raised(found, "hub")
        self._hub, self._store, self._workers, self._term = hub, found.store, found.workers, found.term
        self._apps = dict(found.apps)
        return cast(Launch, found.launch)

    async def start(self, launch: Launch) -> None:
        """Start the run, or go on with it where it was taken over."""
        takes_over = self._hub is not None
        self._launch = launch
        if not takes_over:
            await self._open_hub(launch)
        client = self._client = RpcClient(self._hub, "hub")
        self.bus = cast(Bus, BusClient(client, self._store))
        service = f"run_status@{self._term}"
        self.run_status = proxy(RunStatus, lambda method, args: self._obeyed(client.call(f"{service}.{method}", args)))
        if self._supervised:
            self._renewing = asyncio.create_task(self._renew())
        if not takes_over:
            await self._staff(launch)
        await asked(self._hub.gathered.remote(), "runner", "every role's process to start", OPEN_S)

    async def _open_hub(self, launch: Launch) -> None:
        gpu_sets(launch.plan)
        await self._cluster.connect()
        await asyncio.to_thread(end_former_starts, launch, self._workers)
        mark = Path(launch.run_dir) / f".driver-{secrets.token_hex(8)}"
        with disk_errors(mark):
            mark.touch()
        try:
            workers = self._workers = self._workers or OwnedWorkers.make(launch.run_id, self._supervised)
            options = hub_options(launch.run_id, self._supervised)
            self._hub = Hub.options(**options).remote(LEASE_S if self._supervised else None)  # type: ignore[attr-defined]
            opening = self._hub.open.remote(launch, mark.name, workers, self._apps)
            self._store = await asked(opening, "hub", "open", OPEN_S)
            await workers.open(launch)
        finally:
            mark.unlink(missing_ok=True)

    async def _staff(self, launch: Launch) -> None:
        """Have a shell for every role: those of the run's former start come by themselves, and others are deployed."""
        if self._apps:
            with contextlib.suppress(DeadlineExceeded):
                await asked(self._hub.gathered.remote(), "runner", "the shells of the former start", CALL_BACK_S)
        own = {role: app_name(launch.run_id, role) for role in launch.plan.roles}
        missing = await asked(self._hub.replace_missing.remote(own), "hub", "replace_missing", OPEN_S)
        await asyncio.gather(*(asyncio.to_thread(_delete, self._apps[role]) for role in missing if role in self._apps))
        self._apps |= {role: own[role] for role in missing}
        if missing:
            await asyncio.to_thread(self._deploy, {role: own[role] for role in missing})

    def _deploy(self, apps: Mapping[str, str]) -> None:
        """Deploy shells, by role, at once; Serve starts them side by side."""
        assert self._workers is not None
        workers = self._workers.name
        targets = [
            serve.RunTarget(deployment(workers, role, app), name=app, route_prefix=None) for role, app in apps.items()
        ]
        try:
            serve.run_many(targets, wait_for_applications_running=False)
        except Exception as error:
            raise InfrastructureError(f"ray: Serve did not take the roles: {error}; try --runner local") from error

    async def ended(self, wait_s: float) -> tuple[RoleEnd, ...]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            asking = self._hub.ends.remote(self._ended, self._term)
            ends = await self._obeyed(asked(asking, "hub", "ends", OPEN_S))
            if ends or loop.time() >= deadline:
                break
            await asyncio.sleep(POLL_S)
        self._ended += len(ends)
        return tuple(RoleEnd(role, raised(failure, role) if failure else None) for role, failure in ends)

    async def _renew(self) -> None:
        """Tell the hub and the owner of the workers for as long as this process lives that it does."""
        while True:
            with contextlib.suppress(InfrastructureError):  # it is dead or out of reach, as every other call will say
                await self._say_alive()
            await asyncio.sleep(RENEW_S)

    async def _say_alive(self) -> None:
        await self._obeyed(asked(self._hub.renew.remote(self._term), "hub", "renew", OPEN_S))
        if self._workers is not None:
            await self._workers.renew()

    async def _obeyed(self, call: Awaitable[Any]) -> Any:
        """Await a call that the hub answers its controller alone; this process ends where that is another one by now."""
        try:
            return await call
        except StaleFence as error:
            print(f"relax: {error}; it ends, and leaves the run alone", file=sys.stderr, flush=True)
            os._exit(InfrastructureError.exit_code)

    async def close(self, keep: bool = False) -> KeptActors | None:
        """End a cluster of our own with all that is on it; take the run's own things away from another, or what is not kept."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
            with contextlib.suppress(InfrastructureError):
                await self._say_alive()
        hub, self._hub = self._hub, None
        workers, self._workers = self._workers, None
        apps, self._apps = self._apps, {}
        if self._client is not None:
            await self._client.close()
        if not self._cluster.ours and not keep:
            await _delete_all(apps)
        if hub is not None:
            with contextlib.suppress(WorkerDied, DeadlineExceeded):
                await asked(hub.close.remote(self._term), "hub", "close", CLOSE_S)
            ray.kill(hub)
        kept = None
        if keep and workers is not None and self._launch is not None:
            plan, grace_s = self._launch.plan, float(self._launch.config["checkpoint"]["grace_s"])
            classes = {role: cast(type[Role], self._catalogue.target("role", role)) for role in plan.roles}
            with contextlib.suppress(InfrastructureError):  # the owner is dead, and the ranks with it
                await workers.have_left([role for role in classes if not classes[role].stateless], grace_s)
        if workers is not None and await workers.close(keep):
            kept = KeptActors(workers, self._cluster, apps)
        if isinstance(self._store, RemoteStore):  # a hub that died has not
            await asyncio.to_thread(self._store.sweep)
        if kept is None:
            await _end_cluster(self._cluster, apps)
        return kept


@dataclass(frozen=True, slots=True)
class KeptActors:
    """Implements `runners.launch.KeptWorkers` for actors on a cluster that stays, and for the shells that wait there."""

    workers: OwnedWorkers
    cluster: Cluster
    apps: Mapping[str, str]
    """The application of each role."""

    async def close(self) -> None:
        await self.workers.close()
        await _end_cluster(self.cluster, self.apps)


async def _end_cluster(cluster: Cluster, apps: Mapping[str, str]) -> None:
    """End a cluster of our own with all that is on it, or take a run's applications away from another."""
    if not cluster.ours:
        await _delete_all(apps)
    await cluster.close()


def end_former_starts(launch: Launch, kept: OwnedWorkers | None = None) -> None:
    """End what lives of earlier starts of the run, which nobody controls any more: this one needs what they hold."""
    if launch.epoch is None:
        return
    run = launch.run_id.removesuffix(str(launch.epoch.number))
    starts = [f"{run}{number}" for number in range(1, launch.epoch.number)]
    former = {*map(hub_name, starts), *map(owner_name, starts)}
    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"] in former:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it ended meanwhile
                found = ray.get_actor(actor["name"], NAMESPACE)
                if kept is None or found != kept.owner:
                    ray.kill(found)


async def _delete_all(apps: Mapping[str, str]) -> None:
    await asyncio.gather(*(asyncio.to_thread(_delete, app) for app in apps.values()))


def _delete(name: str) -> None:
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        serve.delete(name)
