# SPDX-License-Identifier: Apache-2.0
"""The Serve shell of one role: thin. The role's loop runs in a thread of its own; health is read from its heartbeat.

A replica that was killed is made again by Serve: its constructor joins the run through the hub and registers anew, which
revokes the leases of the one before. When the hub is gone, so is the run's lease, and the shell deletes its own application.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any, cast

import ray
from ray import serve

from relax_core.api.clock import SystemClock
from relax_core.api.errors import InfrastructureError
from relax_core.api.role import Role
from relax_core.api.trainer import Chosen
from relax_core.plugins.catalogue import Catalogue
from relax_core.runners.context import RoleContext
from relax_core.runners.host import describe
from relax_core.runners.launch import Launch
from relax_core.runners.local.workers import LocalWorkers
from relax_core.runners.ray.bus import BusClient
from relax_core.runners.ray.hub import find_hub
from relax_core.runners.ray.remote import BoardClient, Remote, WeightClient
from relax_core.runners.ray.storage import RemoteStore
from relax_core.runners.ray.workers import RayWorkers
from relax_core.runners.role_runner import run_role

BEAT_LIMIT_S = 60.0
"""A loop that has not turned for this long is stuck."""
LEASE_S = 10.0
PROBE_S = 2.0
STOP_S = 8.0


def app_name(run_id: str, role: str) -> str:
    return f"relax-{run_id}-{role}"


class RoleShell:
    """One role in one replica."""

    def __init__(self, run_id: str, role: str) -> None:
        self._run_id, self._role = run_id, role
        self._turned = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._live, name=f"role-{role}", daemon=True)
        self._thread.start()

    def check_health(self) -> None:
        """Raises when the role's loop stands still; a role that ended is well."""
        if self._thread.is_alive() and time.monotonic() - self._turned > BEAT_LIMIT_S:
            raise InfrastructureError(f"role {self._role}: its loop has not turned for {BEAT_LIMIT_S:.0f} s")

    async def pid(self) -> int:
        return os.getpid()

    def __del__(self) -> None:
        """Serve ends the replica: cancel the role, so that its children end with it."""
        if self._loop is not None and self._work is not None and not self._work.done():
            self._loop.call_soon_threadsafe(self._work.cancel)
            self._thread.join(STOP_S)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _live(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            hub = find_hub(self._run_id)
            launch, storages = await hub.join.remote()
        except (ValueError, ray.exceptions.RayError):
            self._delete()
            return
        self._work = asyncio.create_task(self._run(hub, launch, storages))
        probe = asyncio.create_task(self._probe(hub))
        await asyncio.wait((self._work, probe), return_when=asyncio.FIRST_COMPLETED)
        if probe.done():
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
            self._delete()
        await probe

    async def _run(self, hub: Any, launch: Launch, storages: list[Any]) -> None:
        """The role to its end, which the hub is told."""
        catalogue = Catalogue.load(launch.plugin_files)
        children = LocalWorkers(launch.plugin_files, launch.resolved, None, SystemClock())
        failure = None
        try:
            catalogue.verify(launch.resolved)
            role = cast(Role, catalogue.build(Chosen("role", self._role)))
            bus = BusClient(Remote(hub, "bus"), RemoteStore(storages))

            def context(incarnation: int) -> RoleContext:
                return RoleContext(
                    self._role, launch, catalogue, bus, WeightClient(Remote(hub, "weights")), BoardClient(Remote(hub, "board")),
                    RayWorkers(launch, incarnation), children, SystemClock(), incarnation,
                )  # fmt: skip

            await run_role(role, context)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            failure = describe(error)
        finally:
            await children.close()
        await hub.end_role.remote(self._role, failure)

    async def _probe(self, hub: Any) -> None:
        """Returns when the hub has not answered for the length of the lease; beats for the health check."""
        last = time.monotonic()
        while time.monotonic() - last < LEASE_S:
            self._turned = time.monotonic()
            try:
                async with asyncio.timeout(PROBE_S):
                    await hub.ends.remote(0)
                last = time.monotonic()
            except (TimeoutError, ray.exceptions.RayError):
                pass
            await asyncio.sleep(PROBE_S)

    def _delete(self) -> None:
        serve.delete(app_name(self._run_id, self._role), _blocking=False)


def deployment(run_id: str, role: str) -> Any:
    """The application of one role."""
    made: Any = serve.deployment(
        RoleShell,
        name=role,
        num_replicas=1,
        max_ongoing_requests=64,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=STOP_S,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return made.bind(run_id, role)
