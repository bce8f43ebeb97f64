# SPDX-License-Identifier: Apache-2.0
"""One process of a reward and who uses it: batches side by side where the reward awaits others, else one after another.

A batch that broke the process goes through it again alone, so that the culprit shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from relax_core.api.errors import WorkerDied
from relax_core.api.worker import Worker

SIDE_BY_SIDE = 64
"""Batches at once in the process of an awaitable reward: a slow answer keeps only its own batch waiting."""

Opening = Callable[[str], Awaitable[tuple[Worker, bool]]]
"""From a process's name to the process with the reward built in it, and whether it awaits others."""


class RewardLane:
    """`worker` is replaced by whoever finds it broken first."""

    def __init__(self, name: str, opening: Opening) -> None:
        self.name = name
        self.replaced = 0
        self._opening = opening
        self._worker: Worker | None = None
        self._width = 1
        self._places = asyncio.Semaphore(1)
        self._alone = asyncio.Lock()
        self._replacing = asyncio.Lock()

    async def start(self) -> None:
        self._worker, awaits = await self._opening(self.name)
        self._width = SIDE_BY_SIDE if awaits else 1
        self._places = asyncio.Semaphore(self._width)

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise WorkerDied(f"{self.name} has no process")
        return self._worker

    async def enter(self) -> bool:
        """Take one place; whether that is the only one. Give it back with `leave`."""
        await self._places.acquire()
        return self._width == 1

    def leave(self) -> None:
        self._places.release()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Every place: who is in there leaves first, nobody enters."""
        taken = 0
        async with self._alone:
            try:
                for _ in range(self._width):
                    await self._places.acquire()
                    taken += 1
                yield
            finally:
                for _ in range(taken):
                    self._places.release()

    async def replace(self, seen: int) -> None:
        """A new process, unless somebody has replaced the one of `replaced == seen` already."""
        async with self._replacing:
            if self.replaced != seen:
                return
            await self.kill()
            self.replaced += 1
            self._worker, _ = await self._opening(f"{self.name}.{self.replaced}")

    async def kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()
