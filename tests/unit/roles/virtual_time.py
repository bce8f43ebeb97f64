# SPDX-License-Identifier: Apache-2.0
"""An event loop whose hours pass at once: when every task waits, time jumps to the next timer.

Everything that goes by the loop's time is virtual: sleeps, `asyncio.timeout`, `asyncio.wait`. Work for a thread (the ledger's
writer) is done in the loop's own thread, so that a run is the same on a slow machine. Nobody may wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks as usual; only waiting is free."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self.disk_s = 0.0
        """Seconds that the work of a thread takes."""
        self._really_select = self._selector.select
        self._selector.select = self._select

    def time(self) -> float:
        return getattr(self, "_now", 0.0)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()

        def work() -> None:
            try:
                value = function(*args)
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(value)

        self.call_later(self.disk_s, work)
        return done

    def _select(self, timeout: float | None) -> Any:
        events = self._really_select(0)
        if not events and timeout is None:
            raise RuntimeError("every task waits and no timer is set: somebody waits for ever")
        if not events:
            self._now += timeout or 0.0
        return events


class VirtualClock:
    """`api.Clock` of the running loop, which threads read too."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def now(self) -> float:
        with suppress(RuntimeError):  # a thread of an observer
            self._loop = asyncio.get_running_loop()
        assert self._loop is not None
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtual(coroutine: Coroutine[Any, Any, T], at_most_s: float = 1e6) -> T:
    """Run to the end in virtual time; TimeoutError when that takes longer than `at_most_s` virtual seconds."""

    async def bounded() -> T:
        async with asyncio.timeout(at_most_s):
            return await coroutine

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(bounded())
