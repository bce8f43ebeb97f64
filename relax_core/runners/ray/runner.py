# SPDX-License-Identifier: Apache-2.0
"""The Ray runner: starts a cluster, a hub and one Serve application for each role, and removes them at the end.

Applications are deployed by `serve.run_many`, since Serve's declarative API would replace the applications of
concurrent runs on the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve

from relax_core.api.bus import Bus
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, WorkerDied
from relax_core.api.role import RunStatus
from relax_core.observe.files import disk_errors
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.host import raised
from relax_core.runners.launch import Launch, RoleEnd
from relax_core.runners.ray.bus import RemoteStore, reach_bus
from relax_core.runners.ray.cluster import Cluster
from relax_core.runners.ray.connection import RpcClient, asked
from relax_core.runners.ray.hub import Hub, hub_options
from relax_core.runners.ray.shell import app_name, deployment
from relax_core.runners.ray.workers import gpu_sets, node_labels

OPEN_S = 120.0
CLOSE_S = 20.0
POLL_S = 0.25


class RayRunner:
    """A `runners.launch.Runner` on Ray Serve. Life cycle: `made -> started -> closed`."""

    run_status: RunStatus
    bus: Bus
    loop_factory = None

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue, self._cluster = catalogue, Cluster()
        self._hub: Any = None
        self._client: RpcClient | None = None
        self._store: Any = None
        self._apps: tuple[str, ...] = ()
        self._ended = 0

    def connect_early(self) -> None:
        """Begin to connect before the launch is known. Return at once; `start` waits for the connection."""
        self._cluster.begin()

    async def start(self, launch: Launch) -> None:
        await self._open_hub(launch)
        client = self._client = RpcClient(self._hub, "hub")
        self.bus = reach_bus(client, self._store)
        self.run_status = client.service(RunStatus, "run_status")
        apps = {role: app_name(launch.run_id, role) for role in launch.plan.roles}
        self._apps = tuple(apps.values())
        await asyncio.to_thread(self._deploy, launch, apps)
        await asked(self._hub.gathered.remote(), "runner", "every role's process to start", OPEN_S)

    async def _open_hub(self, launch: Launch) -> None:
        gpu_sets(launch.plan)
        await self._cluster.connect()
        mark = Path(launch.run_dir) / f".driver-{secrets.token_hex(8)}"
        with disk_errors(mark):
            mark.touch()
        try:
            self._hub = Hub.options(**hub_options(launch.run_id)).remote()  # type: ignore[attr-defined]
            self._store = await asked(self._hub.open.remote(launch, mark.name), "hub", "open", OPEN_S)
        finally:
            mark.unlink(missing_ok=True)

    def _deploy(self, launch: Launch, apps: Mapping[str, str]) -> None:
        """Deploy one shell for each role; Serve starts the shells in parallel."""
        labels = node_labels(launch.config, elastic=False)
        shells = {app: deployment(launch.run_id, role, labels) for role, app in apps.items()}
        targets = [serve.RunTarget(shell, name=app, route_prefix=None) for app, shell in shells.items()]
        try:
            serve.run_many(targets, wait_for_applications_running=False)
        except Exception as error:
            raise InfrastructureError(f"ray: Serve did not deploy the roles: {error}; try --runner local") from error

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
        """End the run's own cluster; on a joined cluster remove the run's applications, hub and storage folders."""
        hub, self._hub = self._hub, None
        apps, self._apps = self._apps, ()
        if self._client is not None:
            await self._client.close()
        if not self._cluster.ours:
            await asyncio.gather(*(asyncio.to_thread(_delete, app) for app in apps))
        if hub is not None:
            with contextlib.suppress(WorkerDied, DeadlineExceeded):
                await asked(hub.close.remote(), "hub", "close", CLOSE_S)
            ray.kill(hub)
        if isinstance(self._store, RemoteStore):  # a hub that died could not remove the folders
            await asyncio.to_thread(self._store.sweep)
        await self._cluster.close()


def _delete(name: str) -> None:
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        serve.delete(name)
