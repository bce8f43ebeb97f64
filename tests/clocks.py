# SPDX-License-Identifier: Apache-2.0
"""Clocks whose time passes when a test says so, instead of `api.role.SystemClock`."""

from __future__ import annotations

import asyncio
import heapq


class HandClock:
    """A clock that a test sets by `at`; a sleep passes at once."""

    def __init__(self, at: float = 100.0) -> None:
        self.at = at

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds


class SleepersClock:
    """A clock that a test advances; a sleep ends when its time has come."""

    def __init__(self) -> None:
        self.time = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self.time + seconds, self._count, future))
        await future

    def advance(self, seconds: float) -> None:
        until = self.time + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            self.time, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
        self.time = until


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)
