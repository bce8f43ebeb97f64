# SPDX-License-Identifier: Apache-2.0
"""Where those wait whose turns would be too many for a pool: first come, first served, each until its deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class _Waiter(NamedTuple):
    turns: int
    deadline: float
    let_in: asyncio.Future[bool]


class Door:
    """`room(count)`: whether so many more may come in now."""

    def __init__(self, room: Callable[[int], bool]) -> None:
        self._room = room
        self._waiting: deque[_Waiter] = deque()
        self._let_in = 0
        """Turns that were let in and are on their way."""

    @property
    def shut(self) -> bool:
        """Whether who comes now has to wait."""
        return not self.passes(1)

    def passes(self, count: int) -> bool:
        """Whether so many may go in without waiting."""
        return not self._waiting and self._room(count + self._let_in)

    async def enter(self, count: int, deadline: float) -> bool:
        """Wait for room. False where the deadline came first. Who was let in uses the room at once."""
        let_in: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiter(count, deadline, let_in))
        try:
            return await let_in
        finally:
            if let_in.done() and not let_in.cancelled() and let_in.exception() is None and let_in.result():
                self._let_in -= count

    def open(self, time: float) -> None:
        """Room was made, or time has passed."""
        while self._waiting:
            count, deadline, let_in = self._waiting[0]
            if not let_in.done():
                room = self._room(count + self._let_in)
                if not room and deadline > time:
                    return
                let_in.set_result(room)
                self._let_in += count if room else 0
            self._waiting.popleft()

    def fail(self, error: Exception) -> None:
        """Nobody will be let in any more."""
        for waiter in self._waiting:
            if not waiter.let_in.done():
                waiter.let_in.set_exception(error)
        self._waiting.clear()
