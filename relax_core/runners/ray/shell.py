# SPDX-License-Identifier: Apache-2.0
"""The Serve shell of one role: thin. The role's loop runs in a thread of its own; health is read from its heartbeat.

A replica that was killed is made again by Serve: it joins the run through the hub and registers anew, which revokes the leases
of the one before. Where the hub is gone, the shell waits for the run's next start, of which the owner of the workers tells it;
where that is gone too, so is the run, and the shell deletes its own application.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

import ray
from ray import serve

from relax_core.api.bus import Bus
from relax_core.api.component import Chosen
from relax_core.api.errors import InfrastructureError
from relax_core.api.role import Clock, Role, RunStatus, SystemClock, WeightService
from relax_core.devices.scheduler import DeviceService
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.host import describe
from relax_core.runners.context import RoleContext, run_role
from relax_core.runners.local.workers import LocalWorkers
from relax_core.runners.ray.bus import BusClient, RemoteStore
from relax_core.runners.ray.connection import RpcClient
from relax_core.runners.ray.hub import HubService, find_hub
from relax_core.runners.ray.worker_owner import find_owner
from relax_core.runners.ray.workers import HubWorkers
from relax_core.tensor_files.mapped_files import sweep

LIMIT_S = 60.0
"""A loop that has not turned for this long is stuck: work that takes longer belongs into a worker or a thread."""


class LoopHeartbeat:
    """The heartbeat of a role's loop: the loop beats, others ask from another thread whether it still runs."""

    def __init__(self, role: str, clock: Clock) -> None:
        self._role, self._clock = role, clock
        self._last = clock.now()

    def beat(self) -> None:
        """Note, from within the loop, that it runs."""
        self._last = self._clock.now()

    def check(self) -> None:
        """Raise InfrastructureError where the loop stands still."""
        still = self._clock.now() - self._last
        if still > LIMIT_S:
            raise InfrastructureError(f"role {self._role}: its loop has not turned for {still:.0f} s")


LEASE_S = 60.0
"""Of silence: a busy machine is no lost hub. That the hub died, Ray says at once."""
PROBE_S = 2.0
ANSWER_S = 20.0
STOP_S = 8.0
HEALTH_S = 60.0
"""For an answer: the import of torch may hold the interpreter for many seconds on a busy machine."""


def app_name(run_id: str, role: str) -> str:
    return f"relax-{run_id}-{role}"


class RoleShell:
    """One role in one replica: `waits for a start of the run -> runs the role in it, to its end or the hub's -> waits -> ...`.

    Invariant: a role that does not end with the hub ends with its process, before another start of the run begins here.
    """

    def __init__(self, workers: str, role: str, app: str) -> None:
        """`workers`: the name of their owner; `app`: that of its own application."""
        self._workers, self._role, self._app, self._clock = workers, role, app, SystemClock()
        self._loop_heartbeat = LoopHeartbeat(role, self._clock)
        self._replica = ray.get_runtime_context().current_actor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None
        self._context: RoleContext | None = None
        self._grace_s = STOP_S
        """For the role to end where the hub is gone; one with state may save it."""
        self._thread = threading.Thread(target=self._run_thread, name=f"role-{role}", daemon=True)
        self._thread.start()

    def check_health(self) -> None:
        """Raise when the role's loop stands still; a role that ended is well."""
        if self._thread.is_alive():
            self._loop_heartbeat.check()

    def __del__(self) -> None:
        """Serve ends the replica: cancel the role, so that its children end with it."""
        if self._loop is not None and self._work is not None and not self._work.done():
            self._loop.call_soon_threadsafe(self._work.cancel)
            self._thread.join(STOP_S)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        asyncio.run(self._main())

    async def _main(self) -> None:
        """Run the role in one start of the run after another; whoever loses the owner of the workers ends itself."""
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError):  # the owner is dead
            owner, run_id = find_owner(self._workers), ""
            while run_id := await self._start_after(run_id, owner):
                await self._take_part(run_id)
                with contextlib.suppress(ray.exceptions.RayError):  # the next question finds it dead
                    await owner.note_left.remote(self._role)
        serve.delete(self._app, _blocking=False)

    async def _start_after(self, run_id: str, owner: Any) -> str:
        """Wait for a start of the run other than this; return its run id, or nothing where the owner of the workers is gone."""
        found = ""

        async def is_waiting() -> bool:
            nonlocal found
            found = await owner.start_after.remote(run_id, PROBE_S)
            return not found

        await self._repeat(is_waiting)
        return found

    async def _take_part(self, run_id: str) -> None:
        """Run the role in a start of the run, until its hub is gone."""
        try:
            hub = find_hub(run_id)
            joined: HubService | None = await hub.join.remote(self._role, self._replica, os.getpid(), self._app)
        except (ValueError, ray.exceptions.RayError):
            return
        if joined is not None:
            self._work = asyncio.create_task(self._run_and_tell(hub, joined))

        async def is_alive() -> bool:
            await hub.alive.remote()
            await asyncio.sleep(PROBE_S)
            return True

        await self._repeat(is_alive)
        work, self._work = self._work, None
        if work is not None:
            if self._context is not None:
                self._context.run_restarts = True
            work.cancel()
            until = self._clock.now() + self._grace_s
            while not work.done() and self._clock.now() < until:
                self._loop_heartbeat.beat()
                await asyncio.wait({work}, timeout=PROBE_S)
            if not work.done():
                os._exit(InfrastructureError.exit_code)
        self._context = None
        sweep(run_id)

    async def _repeat(self, ask: Callable[[], Awaitable[bool]]) -> None:
        """Ask an actor until it says no, is dead, or was silent for the length of the lease; beat for the health check."""
        last = self._clock.now()
        while self._clock.now() - last < LEASE_S:
            self._loop_heartbeat.beat()
            try:
                async with asyncio.timeout(ANSWER_S):
                    if not await ask():
                        return
                last = self._clock.now()
            except ray.exceptions.ActorDiedError:
                return
            except (TimeoutError, ray.exceptions.RayError):
                await asyncio.sleep(PROBE_S)

    async def _run_and_tell(self, hub: Any, joined: HubService) -> None:
        """Run the role to its end, and tell the hub."""
        failure = None
        try:
            await self._run(hub, joined)
        except Exception as error:
            failure = describe(error)
        with contextlib.suppress(ray.exceptions.RayError):  # without a hub there is nobody to tell
            await hub.end_role.remote(self._role, failure)

    async def _run(self, hub: Any, joined: HubService) -> None:
        launch = joined.launch
        catalogue = Catalogue.load(launch.plugin_files)
        catalogue.verify(launch.resolved)
        role = cast(Role, catalogue.build(Chosen("role", self._role)))
        self._grace_s = STOP_S if role.stateless else STOP_S + float(launch.config["checkpoint"]["grace_s"])
        client = RpcClient(hub, "hub")
        bus = cast(Bus, BusClient(client, joined.store))
        weights = client.service(WeightService, "weights")
        run_status = client.service(RunStatus, "run_status")
        devices = client.service(DeviceService, "devices")
        children = LocalWorkers.of_run(launch, self._clock)

        def context(incarnation: int) -> RoleContext:
            workers = HubWorkers(hub, self._role, incarnation)
            made = self._context = RoleContext(
                self._role,
                launch,
                catalogue,
                bus,
                weights,
                run_status,
                workers,
                children,
                self._clock,
                incarnation,
                devices,
            )
            return made

        try:
            await run_role(role, context, joined.without_s)
        finally:
            await children.close()
            await client.close()
            if isinstance(joined.store, RemoteStore):
                await joined.store.let_go()


def deployment(workers: str, role: str, app: str) -> Any:
    """Make the application of one role, for all starts of a run that the owner of its `workers` serves."""
    made: Any = serve.deployment(
        RoleShell,
        name=role,
        num_replicas=1,
        max_ongoing_requests=64,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=1.0,
        health_check_timeout_s=HEALTH_S,
        graceful_shutdown_timeout_s=STOP_S,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return made.bind(workers, role, app)
