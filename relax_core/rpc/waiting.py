# SPDX-License-Identifier: Apache-2.0
"""Waiting for a change until a deadline, running several things together, and counting failures in a row.

Every service of a run (bus, weights, run status, device leases) waits through `TimedCondition`, so that each wait has a
deadline on the clock that its service was given.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
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

    def __init__(self, clock: Clock, next_at: Callable[[], float | None] = lambda: None) -> None:
        """`next_at` tells when the passing of time alone may change what is waited for: a lease that expires."""
        self._clock, self._next_at, self._closed = clock, next_at, False
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Let all who wait try again."""
        for waiter in self._waiters:
            _wake(waiter)

    def close(self) -> None:
        self._closed = True
        self.notify()

    async def wait_for(self, attempt: Callable[[float], T | None], wait_s: float) -> T | None:
        """Return the first result of `attempt(now)` that is not None; None after `wait_s`."""
        deadline = self._clock.now() + wait_s
        while True:
            now = self._clock.now()
            if (found := attempt(now)) is not None:
                return found
            if now + EARLY_S >= deadline or self._closed:
                return None
            at = self._next_at()
            wake_at = min(deadline, at) if at is not None and at > now else deadline
            notified: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(notified)
            sleeper = asyncio.ensure_future(self._clock.sleep(max(wake_at - now, EARLY_S)))
            sleeper.add_done_callback(partial(_wake, notified))
            try:
                await notified
            finally:
                self._waiters.discard(notified)
                sleeper.cancel()


def _wake(waiter: asyncio.Future[None], _: object = None) -> None:
    if not waiter.done():
        waiter.set_result(None)


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


@asynccontextmanager
async def attended(*attendants: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run attendants beside the body; they are cancelled and awaited at its end.

    An attendant that raises ends the body at once, and its error is the one that is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(attendant) for attendant in attendants]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__


class RestartBudget:
    """A budget of failures in a row: restarts of a worker, returns to a checkpoint, updates that were skipped.

    `limit` failures are forgiven, one more is not; progress and time give them back. The owner decides what is a failure,
    what is progress, and what ends when the budget is spent.

    Invariants:
    - `refill` forgives all that was spent: the owner got further than before.
    - A failure longer ago than `window_s` no longer counts; without a window only progress refills.
    """

    def __init__(self, limit: int, window_s: float = math.inf) -> None:
        self.limit, self._window_s = limit, window_s
        self._failures: deque[float] = deque()

    @property
    def spent(self) -> int:
        """Number of failures that count at present, the last one included."""
        return len(self._failures)

    def spend(self, now: float = 0.0) -> bool:
        """Count a failure; False when it is one more than the budget forgives. Without a window `now` says nothing."""
        while self._failures and now - self._failures[0] > self._window_s:
            self._failures.popleft()
        self._failures.append(now)
        return len(self._failures) <= self.limit

    def refill(self) -> None:
        """Forgive every failure so far."""
        self._failures.clear()
