# SPDX-License-Identifier: Apache-2.0
"""Which parts of a pool's engines sleep, and who needs their weights awake. It calls no engine.

Loading weights and starting an engine need the devices: both wait while weights sleep, and weights do not fall asleep
under them. Where weights never sleep nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from relax_core.api.turn import Part


class Rest:
    """The state of a pool's engines, as its devices' arbiter wants it."""

    def __init__(self, able: Iterable[Part] = ()) -> None:
        self._able: frozenset[Part] = frozenset(able)
        self.asleep: frozenset[Part] = frozenset()
        """What every engine is to be brought to."""
        self.num_waiting = 0
        """Users that wait for weights to be awake."""
        self._closed = False
        self._users: Counter[asyncio.Task[Any] | None] = Counter()
        self._changed = asyncio.Condition()

    def of(self, parts: Iterable[Part]) -> frozenset[Part]:
        """Those that may sleep at all."""
        return self._able.intersection(parts)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Weights are awake, and stay so meanwhile; a user may be one again."""
        user = asyncio.current_task()
        self.num_waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._users[user] > 0 or not self._closed)
                self._users[user] += 1
        finally:
            self.num_waiting -= 1
        try:
            yield
        finally:
            self._users[user] -= 1
            self._users += Counter()  # drops those at zero
            async with self._changed:
                self._changed.notify_all()

    async def lie_down(self, parts: frozenset[Part]) -> None:
        """These are to sleep from now on; returns when nobody uses them any more."""
        self._closed = self._closed or "weights" in parts
        async with self._changed:
            await self._changed.wait_for(lambda: not (self._closed and self._users.total()))
        self.asleep |= parts

    def rise(self, parts: frozenset[Part]) -> None:
        """These are to wake."""
        self.asleep -= parts

    async def risen(self) -> None:
        """All engines are as they are to be."""
        self._closed = "weights" in self.asleep
        async with self._changed:
            self._changed.notify_all()
