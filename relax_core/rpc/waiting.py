# SPDX-License-Identifier: Apache-2.0
"""Waiting: for a change until a deadline, and for several things that start together.

Every service of a run (bus, weights, run status, device leases) waits through `TimedCondition`, so that each wait has a
deadline on the clock that its service was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from relax_core.api.role import Clock

T = TypeVar("T")

EARLY_S = 1e-6
"""Timers of an event loop fire up to its clock's resolution early; a wait for less than this would spin on the spot."""


class TimedCondition:
    """A condition variable with deadlines, for tasks of one event loop.

    Invariants:
    - An attempt is made at once, after every `notify`, when time alone may change its result, and at the deadline.
    - After `close` nobody waits: a wait ends with its first attempt.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._closed = clock, False
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Let all who wait try again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        self._closed = True
        self.notify()

    async def wait_for(
        self, attempt: Callable[[float], T | None], wait_s: float, next_at: Callable[[], float | None] | None = None
    ) -> T | None:
        """Return the first result of `attempt(now)` that is not None; None after `wait_s`.

        `next_at` tells when the passing of time alone may change the result: a lease that expires.
        """
        deadline = self._clock.now() + wait_s
        while True:
            now = self._clock.now()
            if (found := attempt(now)) is not None:
                return found
            if now + EARLY_S >= deadline or self._closed:
                return None
            at = next_at() if next_at is not None else None
            wake_at = min(deadline, at) if at is not None and at > now else deadline
            await self._notified(max(wake_at - now, EARLY_S))

    async def _notified(self, seconds: float) -> None:
        """Return after the next notification, or when the time has passed."""
        notified: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(notified)
        sleeper = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait((notified, sleeper), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiters.discard(notified)
            sleeper.cancel()


async def start_all(*starts: Coroutine[Any, Any, T]) -> list[T]:
    """Await all, and return their results in order. When one fails, or this is cancelled, cancel and await the others first.

    `asyncio.gather` alone would let the others go on starting after one has failed, where nobody would end them.
    """
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
