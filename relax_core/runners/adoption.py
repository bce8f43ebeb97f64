# SPDX-License-Identifier: Apache-2.0
"""The worker processes of a run by their holders: a role that is begun again goes on with those of its predecessor.

They belong to whoever lives as long as the run (the local runner, the hub), so that an engine does not end because a role's
loop or its shell did, nor because the run restarts as a whole. How one is started and killed, the runner's own `Workers` know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from relax_core.api.errors import InfrastructureError, PluginError, WorkerDied
from relax_core.api.role import Handover, Worker, Workers, WorkerSpec
from relax_core.rpc.host import HAND_OVER

QUIET_S = 10.0
"""For the calls of a worker to end that its former holder made; a request in flight is aborted at once."""
ANSWER_S = 15.0
"""For a worker's answer: longer than any library holds the interpreter. One that was stopped never gives it."""


@dataclass(frozen=True, slots=True)
class HeldWorker:
    """A worker, and who holds it."""

    role: str
    incarnation: int
    """Of the role, as the bus counts its registrations."""
    spec: WorkerSpec
    worker: Worker


class AdoptableWorkers:
    """Starts the workers of all roles of a run, or hands living ones over to a role's successor.

    A worker: `started -> held -> (its role fails) -> adopted by a later incarnation -> held -> ... -> killed`; one that no
    successor claims, or that is unfit, is killed.

    Invariants:
    - A name has one worker: the one before is killed before another is started.
    - Only a later incarnation of the same role adopts, only with equal specs, and all workers of a call or none: ranks meet in
      collectives. What an incarnation itself started it never gets again.
    - An adopted worker has answered, runs nothing for its former holder, and each call of it that failed changed nothing.
    - After `end` a role has no worker left; after `keep_adoptable` only those that its first incarnation in the run's next
      start may adopt.
    """

    def __init__(self, starter: Workers) -> None:
        self._starter = starter
        self._held: dict[str, HeldWorker] = {}
        self._starting: dict[str, tuple[str, int, asyncio.Task[tuple[Worker, ...]]]] = {}
        """By the first name of a call: role, incarnation, and the task that starts them."""

    def of(self, role: str, incarnation: int) -> ClaimedWorkers:
        """Return the workers as one incarnation of a role sees them."""
        return ClaimedWorkers(self, role, incarnation)

    async def start(
        self, role: str, incarnation: int, specs: Sequence[WorkerSpec], timeout_s: float
    ) -> tuple[Worker, ...]:
        """Adopt or start workers. A later incarnation's start of the same names ends one that is under way."""
        key = specs[0].name
        _, holder, before = self._starting.get(key, ("", 0, None))
        holder = max(holder, *(self._held[spec.name].incarnation for spec in specs if spec.name in self._held), 0)
        if holder > incarnation:
            raise InfrastructureError(f"{key}: incarnation {incarnation} of {role} asks for it, and {holder} has it")
        if before is not None:
            before.cancel()
            await asyncio.wait({before})
        task = asyncio.create_task(self._start(role, incarnation, specs, timeout_s))
        self._starting[key] = role, incarnation, task
        try:
            await asyncio.wait({task})
        finally:
            if not task.done():  # whoever asked has been cancelled
                task.cancel()
                await asyncio.wait({task})
            if self._starting.get(key, (role, incarnation, None))[2] is task:
                del self._starting[key]
        if task.cancelled():
            raise WorkerDied(f"{key}: its start was ended, since {role} has ended or was begun again")
        return task.result()

    async def _start(
        self, role: str, incarnation: int, specs: Sequence[WorkerSpec], timeout_s: float
    ) -> tuple[Worker, ...]:
        found = [self._held[spec.name] for spec in specs if spec.name in self._held]
        workers: Sequence[Worker] = ()
        if [(held.role, held.spec) for held in found] == [(role, spec) for spec in specs] and all(
            held.spec.adoptable and held.incarnation < incarnation for held in found
        ):
            handed = await asyncio.gather(*(_handed_over(held.worker, incarnation) for held in found))
            if all(handed):
                workers = [held.worker for held in found]
                for worker, handover in zip(workers, handed, strict=True):
                    worker.adopted = handover
        if not workers:
            await self._kill(found)
            workers = await self._starter.start(specs, timeout_s)
        for spec, worker in zip(specs, workers, strict=True):
            self._held[spec.name] = HeldWorker(role, incarnation, spec, worker)
        return tuple(workers)

    async def lost(self, role: str) -> None:
        """Kill the workers of a role that nobody may adopt, since its shell has died."""
        await self._kill([held for held in self._held.values() if held.role == role and not held.spec.adoptable])

    async def end(self, role: str) -> None:
        """Kill all workers of a role that has ended."""
        starting = [task for owner, _, task in self._starting.values() if owner == role]
        for task in starting:
            task.cancel()
        if starting:
            await asyncio.wait(starting)
        await self._kill([held for held in self._held.values() if held.role == role])

    async def keep_adoptable(self) -> tuple[Worker, ...]:
        """Kill all workers but the adoptable ones, and return these: the run's next start, in which roles are counted anew,
        adopts them. No role runs any more."""
        await self._kill([held for held in self._held.values() if not held.spec.adoptable])
        self._held = {name: replace(held, incarnation=0) for name, held in self._held.items()}
        return tuple(held.worker for held in self._held.values())

    async def close(self) -> None:
        """Kill all workers of the run."""
        for role in {*(held.role for held in self._held.values()), *(owner for owner, _, _ in self._starting.values())}:
            await self.end(role)

    async def _kill(self, found: Sequence[HeldWorker]) -> None:
        await asyncio.gather(*(held.worker.kill() for held in found))
        for held in found:
            if self._held.get(held.spec.name) is held:
                del self._held[held.spec.name]


class ClaimedWorkers:
    """`api.role.Workers` of one incarnation of a role."""

    def __init__(self, workers: AdoptableWorkers, role: str, incarnation: int) -> None:
        self._workers, self._role, self._incarnation = workers, role, incarnation

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[Worker, ...]:
        return await self._workers.start(self._role, self._incarnation, specs, timeout_s)


async def _handed_over(worker: Worker, incarnation: int) -> Handover | None:
    """Ask a worker for its state; None where it is dead, hangs, or is in no state to go on with."""
    try:
        found: Handover = await worker.call(HAND_OVER, QUIET_S, incarnation, timeout_s=ANSWER_S)
    except (InfrastructureError, PluginError):
        return None
    return found
