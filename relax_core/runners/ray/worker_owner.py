# SPDX-License-Identifier: Apache-2.0
"""The owner of a run's worker actors. What a Ray actor has started ends with it, so neither a shell nor the hub starts workers.

Engines and ranks outlive shells, whose successors adopt them, and the hub: a run that restarts as a whole goes on with
those that are well. Shells outlive the hub too: they ask the owner for the run's next start, and end where the owner has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Any, Self

import ray

from relax_core.api.errors import DeadlineExceeded, InfrastructureError
from relax_core.api.role import Handover, SystemClock, WorkerSpec
from relax_core.runners.adoption import AdoptableWorkers
from relax_core.runners.launch import Launch
from relax_core.runners.ray.connection import NAMESPACE, answered, asked
from relax_core.runners.ray.controller_lease import FIRST_TERM, LEASE_S, ControllerLease, end_at_expiry
from relax_core.runners.ray.workers import HAND_OVER_S, GpuPlacement, RayWorker, RayWorkers, StartedActor

CONCURRENCY = 100
OPEN_S, END_S, LOOK_S = 60.0, 20.0, 30.0


@ray.remote(num_cpus=0, max_restarts=0)
class WorkerOwner:
    """Starts the workers of a run, or hands living ones over.

        made -> opened for a start of the run -> keeps what is well -> opened for the next start -> ... -> ended

    Invariant: without a controller for the length of the lease it ends, and all workers with it.
    """

    _run_id = ""
    """Of the start that it serves."""
    _held: AdoptableWorkers
    _starter: RayWorkers

    def __init__(self, lease_s: float | None = None) -> None:
        """`lease_s`: how long it waits for another controller; None: it dies with the one that made it."""
        self._clock = SystemClock()
        self._opened, self._one_left = asyncio.Event(), asyncio.Event()
        self._left: set[str] = set()
        """Roles whose shells have done with this start."""
        self._lease = ControllerLease(float("inf") if lease_s is None else lease_s, self._clock.now())
        if lease_s is not None:
            end_at_expiry(self._lease, self._clock, lambda: os._exit(0))

    async def open(self, launch: Launch) -> None:
        """Serve a start of the run, whose hub is open, from here on."""
        if hasattr(self, "_held"):
            self._starter.launch = launch
        else:
            self._starter = RayWorkers(launch, GpuPlacement.request(launch.plan))
            self._held = AdoptableWorkers(self._starter)
        self._run_id = launch.run_id
        self._left.clear()
        self._opened.set()
        self._opened = asyncio.Event()

    async def start_after(self, run_id: str, wait_s: float) -> str:
        """Return the run id of the start that it serves, once that is another one; empty where there is none in time."""
        if self._run_id == run_id:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._opened.wait()
        return "" if self._run_id == run_id else self._run_id

    async def note_left(self, role: str) -> None:
        """Note that the shell of a role has done with this start of the run: the role has ended, and saved what it had."""
        self._left.add(role)
        self._one_left.set()
        self._one_left = asyncio.Event()

    async def have_left(self, roles: Sequence[str], wait_s: float) -> bool:
        """Tell whether the shells of these roles have done with this start of the run; wait for them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._left.issuperset(roles):
                    await self._one_left.wait()
        return self._left.issuperset(roles)

    async def lives(self, wait_s: float = 0.0) -> None:
        """Return after a while; whoever waits hears at once where it dies."""
        await asyncio.sleep(wait_s)

    async def renew(self) -> None:
        """Note that the controller lives."""
        self._lease.renew(FIRST_TERM, self._clock.now())

    async def start(self, role: str, incarnation: int, specs: Sequence[WorkerSpec], timeout_s: float) -> Any:
        """Start workers for an incarnation of a role, or hand over those of its predecessor."""
        return await answered(self._start(role, incarnation, specs, timeout_s))

    async def _start(
        self, role: str, incarnation: int, specs: Sequence[WorkerSpec], timeout_s: float
    ) -> list[tuple[StartedActor, Handover | None]]:
        workers = await self._held.start(role, incarnation, specs, timeout_s)
        return [(worker.started, worker.adopted) for worker in workers if isinstance(worker, RayWorker)]

    async def lost(self, role: str) -> None:
        """Kill the workers of a role that nobody may adopt, since its shell has died."""
        await self._held.lost(role)

    async def end(self, role: str) -> None:
        """Kill all workers of a role that has ended."""
        await self._held.end(role)

    async def close(self, keep: bool) -> bool:
        """Kill all workers; `keep`: all but those that the run's next start may adopt. Tell whether it can serve one."""
        if not hasattr(self, "_held"):
            return False
        if keep:
            await self._held.keep_adoptable()
        else:
            await self._held.close()
        return keep


class OwnedWorkers:
    """The workers of a run as its hub and its runner have them started and ended. WorkerDied where their owner is dead."""

    def __init__(self, owner: Any, name: str) -> None:
        """`name`: that of the owner among the cluster's actors."""
        self.owner, self.name = owner, name

    @classmethod
    def make(cls, run_id: str, supervised: bool = False) -> Self:
        """Make their owner. That of a `supervised` run outlives the process that makes it."""
        made = WorkerOwner.options(**owner_options(run_id, supervised))  # type: ignore[attr-defined]
        return cls(made.remote(LEASE_S if supervised else None), owner_name(run_id))

    async def open(self, launch: Launch) -> None:
        await asked(self.owner.open.remote(launch), "worker owner", "open", OPEN_S)

    async def start(self, role: str, incarnation: int, specs: Sequence[WorkerSpec], timeout_s: float) -> Any:
        starting = self.owner.start.remote(role, incarnation, specs, timeout_s)
        return await asked(starting, "worker owner", "start", timeout_s + HAND_OVER_S)

    async def lost(self, role: str) -> None:
        await asked(self.owner.lost.remote(role), "worker owner", "lost", END_S)

    async def end(self, role: str) -> None:
        await asked(self.owner.end.remote(role), "worker owner", "end", END_S)

    async def have_left(self, roles: Sequence[str], wait_s: float) -> bool:
        """Tell whether these roles have ended, whose hub is gone, and saved what they had; wait for them."""
        return bool(
            await asked(self.owner.have_left.remote(roles, wait_s), "worker owner", "have_left", wait_s + END_S)
        )

    async def died(self) -> None:
        """Raise WorkerDied when the owner has died."""
        while True:
            with contextlib.suppress(DeadlineExceeded):
                await asked(self.owner.lives.remote(LOOK_S), "worker owner", "its work", OPEN_S)

    async def renew(self) -> None:
        await asked(self.owner.renew.remote(), "worker owner", "renew", OPEN_S)

    async def close(self, keep: bool = False) -> bool:
        """End all workers and their owner; `keep`: but it and those for the run's next start. Tell whether it is kept."""
        kept = False
        with contextlib.suppress(InfrastructureError):
            kept = await asked(self.owner.close.remote(keep), "worker owner", "close", END_S)
        if not kept:
            ray.kill(self.owner)
        return kept


def owner_name(run_id: str) -> str:
    return f"relax-{run_id}-workers"


def find_owner(name: str) -> Any:
    """Find the owner of workers of this name. Raises ValueError where there is none."""
    return ray.get_actor(name, namespace=NAMESPACE)


def owner_options(run_id: str, supervised: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {"name": owner_name(run_id), "namespace": NAMESPACE, "max_concurrency": CONCURRENCY}
    return {**options, "lifetime": "detached"} if supervised else options
