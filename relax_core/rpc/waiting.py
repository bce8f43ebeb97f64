# SPDX-License-Identifier: Apache-2.0
"""Waiting for a change until a deadline, running several coroutines together, and counting failures in a row.

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
"""Shortest sleep in seconds. Timers may fire early by the clock's resolution, so a shorter sleep could spin."""


class TimedCondition:
    """A condition variable with deadlines, for tasks of one event loop.

    Invariants:
    - `attempt` is called at once, after every `notify`, when time alone may change its result, and at the deadline.
    - After `close`, every wait ends after one attempt.
    """

    def __init__(self, clock: Clock, next_at: Callable[[], float | None] = lambda: None) -> None:
        """`next_at` returns the next time at which time alone may change a result, such as a lease expiry, or None."""
        self._clock, self._next_at, self._closed = clock, next_at, False
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Let all waiting tasks attempt again."""
        for waiter in self._waiters:
            _wake(waiter)

    def close(self) -> None:
        self._closed = True
        self.notify()

    async def wait_for(self, attempt: Callable[[float], T | None], wait_s: float) -> T | None:
        """Return the first result of `attempt(now)` that is not None, or None after `wait_s` seconds."""
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
    """Await all coroutines; return their results in order. After a failure or cancellation, cancel and await the rest.

    `asyncio.gather` alone would let the rest continue to start processes that no caller ends.
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
    """Run attendants concurrently with the body; cancel and await them at its end.

    An attendant that raises ends the body at once, and its error is raised.
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
    """A budget of failures in a row: restarts of a worker, returns to a checkpoint, skipped updates.

    `limit` failures are allowed, one more is not. Progress and time restore the budget. The owner decides which events
    are failures or progress, and acts when the budget is spent.

    Invariants:
    - `refill` deletes all failures; the owner calls it after progress.
    - A failure longer ago than `window_s` no longer counts. Without a window only `refill` restores the budget.
    """

    def __init__(self, limit: int, window_s: float = math.inf) -> None:
        self.limit, self._window_s = limit, window_s
        self._failures: deque[float] = deque()

    @property
    def spent(self) -> int:
        """Number of failures that count at present, including the latest failure."""
        return len(self._failures)

    def spend(self, now: float = 0.0) -> bool:
        """Count a failure; return False if it exceeds the budget. Without a window `now` is not used."""
        while self._failures and now - self._failures[0] > self._window_s:
            self._failures.popleft()
        self._failures.append(now)
        return len(self._failures) <= self.limit

    def refill(self) -> None:
        """Delete all failures so far."""
        self._failures.clear()
