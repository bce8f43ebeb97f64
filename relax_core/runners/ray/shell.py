# SPDX-License-Identifier: Apache-2.0
"""The Serve deployment of one role. The role's event loop runs in a thread; a health check detects a blocked loop.

Serve replaces a replica that was killed. The new replica joins the run through the hub and registers the role again,
which revokes the leases of the last replica. If the hub is gone, the run has ended, and the shell deletes the role's
application.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray import serve

from relax_core.api.component import Chosen
from relax_core.api.errors import InfrastructureError
from relax_core.api.role import Clock, Role, RunStatus, SystemClock, WeightService
from relax_core.devices.scheduler import DeviceService
from relax_core.observe.process_log import record_process
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.host import describe
from relax_core.runners.context import RoleContext, run_role
from relax_core.runners.local.workers import LocalWorkers
from relax_core.runners.ray.bus import RemoteStore, reach_bus
from relax_core.runners.ray.connection import CALL_S, RpcClient, asked
from relax_core.runners.ray.hub import HubService, find_hub
from relax_core.runners.ray.workers import RayWorkers
from relax_core.tensor_files.mapped_files import sweep

LIMIT_S = 60.0
"""Seconds without an iteration after which an event loop counts as blocked. Put longer work into a worker or thread."""


class LoopHeartbeat:
    """A sign of life of a role's event loop: the loop calls `beat`, and a different thread calls `check`."""

    def __init__(self, role: str, clock: Clock) -> None:
        self._role, self._clock = role, clock
        self._last = clock.now()

    def beat(self) -> None:
        self._last = self._clock.now()

    def check(self) -> None:
        """Raise InfrastructureError if the last beat was longer ago than LIMIT_S."""
        still = self._clock.now() - self._last
        if still > LIMIT_S:
            raise InfrastructureError(f"role {self._role}: its event loop has been blocked for {still:.0f} s")


HUB_SILENCE_S = 60.0
"""Seconds without an answer before the hub counts as lost. Ray reports the death of the hub at once."""
PROBE_S = 2.0
ANSWER_S = 20.0
STOP_S = 8.0
HEALTH_S = 60.0
"""Time limit of a health check: on a busy machine the import of torch may hold the interpreter for many seconds."""


def app_name(run_id: str, role: str) -> str:
    return f"relax-{run_id}-{role}"


class RoleShell:
    """One role in one replica: `joins the run -> runs the role to its end -> waits for the end of the hub`.

    Invariant: if the role does not end within STOP_S of the hub's end, its process exits.
    """

    def __init__(self, run_id: str, role: str) -> None:
        self._run_id, self._role, self._clock = run_id, role, SystemClock()
        self._loop_heartbeat = LoopHeartbeat(role, self._clock)
        self._replica = ray.get_runtime_context().current_actor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run_thread, name=f"role-{role}", daemon=True)
        self._thread.start()

    def check_health(self) -> None:
        """Raise InfrastructureError if the role's event loop is blocked. A role that has ended is healthy."""
        if self._thread.is_alive():
            self._loop_heartbeat.check()

    def __del__(self) -> None:
        """Cancel the role when Serve ends the replica, so that the role's child processes end."""
        if self._loop is not None and self._work is not None and not self._work.done():
            self._loop.call_soon_threadsafe(self._work.cancel)
            self._thread.join(STOP_S)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        asyncio.run(self._main())

    async def _main(self) -> None:
        """Run the role until the hub is gone, then delete the application."""
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # the hub is dead
            hub = find_hub(self._run_id)
            self._work = asyncio.create_task(self._join_and_run(hub))
            await self._watch(hub)
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work}, timeout=STOP_S)
        sweep(self._run_id)
        serve.delete(app_name(self._run_id, self._role), _blocking=False)
        if self._work is not None and not self._work.done():
            os._exit(InfrastructureError.exit_code)

    async def _watch(self, hub: Any) -> None:
        """Return when the hub is dead or has not answered for HUB_SILENCE_S. Meanwhile beat for the health check."""
        last = self._clock.now()
        while self._clock.now() - last < HUB_SILENCE_S:
            self._loop_heartbeat.beat()
            with contextlib.suppress(TimeoutError):
                try:
                    async with asyncio.timeout(ANSWER_S):
                        await hub.alive.remote()
                    last = self._clock.now()
                except ray.exceptions.ActorDiedError:
                    return
                except ray.exceptions.RayError:
                    pass
            await asyncio.sleep(PROBE_S)

    async def _join_and_run(self, hub: Any) -> None:
        """Join the run, run the role to its end, and report the end to the hub, which ignores all but the first."""
        failure = None
        try:
            joined = await asked(hub.join.remote(self._role, self._replica, os.getpid()), "hub", "join", CALL_S)
            if joined is not None:
                await self._run(hub, joined)
        except Exception as error:
            failure = describe(error)
        with contextlib.suppress(ray.exceptions.RayError):  # the hub is dead
            await hub.end_role.remote(self._role, failure)

    async def _run(self, hub: Any, joined: HubService) -> None:
        launch = joined.launch
        record_process(launch.process_log(self._role, self._role))
        catalogue = Catalogue.load(launch.plugin_files)
        catalogue.verify(launch.resolved)
        role = cast(Role, catalogue.build(Chosen("role", self._role)))
        client = RpcClient(hub, "hub")
        bus = reach_bus(client, joined.store)
        weights = client.service(WeightService, "weights")
        run_status = client.service(RunStatus, "run_status")
        devices = client.service(DeviceService, "devices")
        children = LocalWorkers.of_run(launch, self._clock, self._role)

        def context(registration: int) -> RoleContext:
            return RoleContext(
                self._role,
                launch,
                catalogue,
                bus,
                weights,
                run_status,
                RayWorkers(launch, self._role, registration, joined.gpus),
                children,
                self._clock,
                registration,
                devices,
            )

        try:
            await run_role(role, context, joined.without_s)
        finally:
            await children.close()
            await client.close()
            if isinstance(joined.store, RemoteStore):
                await joined.store.disconnect()


def deployment(run_id: str, role: str, labels: Mapping[str, str]) -> Any:
    """Make the Serve application of one role, whose replica runs on a node that `labels` selects."""
    made: Any = serve.deployment(
        RoleShell,
        name=role,
        num_replicas=1,
        max_ongoing_requests=64,
        ray_actor_options={"num_cpus": 0, **({"label_selector": dict(labels)} if labels else {})},
        health_check_period_s=1.0,
        health_check_timeout_s=HEALTH_S,
        graceful_shutdown_timeout_s=STOP_S,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return made.bind(run_id, role)
