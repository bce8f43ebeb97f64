# SPDX-License-Identifier: Apache-2.0
"""The Ray runner: brings up a hub and one Serve application a role, watches for their ends, removes what it started.

Applications are deployed by `serve.run_many`: the declarative route would replace those of other runs on the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray
from ray import serve

from relax_core.api.bus import Bus
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, WorkerDied
from relax_core.api.role import RunStatus
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.host import raised
from relax_core.runners.launch import Launch, RoleEnd
from relax_core.runners.ray.bus import bus_client
from relax_core.runners.ray.cluster import NAMESPACE, Cluster
from relax_core.runners.ray.connection import RpcClient, asked
from relax_core.runners.ray.hub import CONCURRENCY, Hub, hub_name
from relax_core.runners.ray.shell import app_name, deployment
from relax_core.runners.ray.storage import RemoteStore
from relax_core.runners.ray.workers import gpu_sets

OPEN_S = 120.0
CLOSE_S = 20.0
POLL_S = 0.25


class RayRunner:
    """Implements `runners.launch.Runner` on Ray Serve."""

    run_status: RunStatus
    bus: Bus
    loop_factory = None

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._cluster = Cluster()
        self._hub: Any = None
        self._client: RpcClient | None = None
        self._store: Any = None
        self._apps: list[str] = []
        self._ended = 0

    def connect_early(self) -> None:
        """Begin to connect before there is a launch; returns at once, and `start` waits for the rest."""
        self._cluster.begin()

    async def start(self, launch: Launch) -> None:
        gpu_sets(launch.plan)
        await self._cluster.connect()
        self._hub = Hub.options(  # type: ignore[attr-defined]
            name=hub_name(launch.run_id), namespace=NAMESPACE, max_concurrency=CONCURRENCY
        ).remote()
        self._store = await asked(self._hub.open.remote(launch), "hub", "open", OPEN_S)
        self._client = RpcClient(self._hub, "hub")
        self.bus = bus_client(self._client, self._store)
        self.run_status = self._client.service(RunStatus, "run_status")  # type: ignore[type-abstract]
        await asyncio.to_thread(self._deploy, launch)
        await asked(self._hub.gathered.remote(), "runner", "every role's process to start", OPEN_S)

    def _deploy(self, launch: Launch) -> None:
        """All roles at once; Serve starts them side by side."""
        targets = []
        for role in launch.plan.roles:
            name = app_name(launch.run_id, role)
            self._apps.append(name)
            targets.append(serve.RunTarget(deployment(launch.run_id, role), name=name, route_prefix=None))
        try:
            serve.run_many(targets, wait_for_applications_running=False)
        except Exception as error:
            raise InfrastructureError(f"ray: Serve did not take the roles: {error}; try --runner local") from error

    async def ended(self, wait_s: float) -> tuple[RoleEnd, ...]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            ends = await asked(self._hub.ends.remote(self._ended), "hub", "ends", OPEN_S)
            if ends or loop.time() >= deadline:
                break
            await asyncio.sleep(POLL_S)
        self._ended += len(ends)
        return tuple(RoleEnd(role, raised(failure, role) if failure else None) for role, failure in ends)

    async def close(self) -> None:
        """A cluster of our own ends with all that is on it; from another the run's own things are taken away."""
        hub, self._hub = self._hub, None
        if self._client is not None:
            await self._client.close()
        if hub is not None:
            if not self._cluster.ours:
                await asyncio.gather(*(asyncio.to_thread(_delete, name) for name in self._apps))
            with contextlib.suppress(WorkerDied, DeadlineExceeded):
                await asked(hub.close.remote(), "hub", "close", CLOSE_S)
            ray.kill(hub)
        if isinstance(self._store, RemoteStore):  # a hub that died has not
            await asyncio.to_thread(self._store.sweep)
        await self._cluster.close()


def _delete(name: str) -> None:
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        serve.delete(name)
