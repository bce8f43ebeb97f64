# SPDX-License-Identifier: Apache-2.0
"""An event loop whose hours pass at once: when every task waits, time jumps to the next timer.

Everything that goes by the loop's time is virtual: sleeps, `asyncio.timeout`, `asyncio.wait`. While a thread works for
the loop (the ledger's writer) time stands still, so that a run is the same on a slow machine. Nobody may wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

REAL_S = 120.0
T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks as usual; only waiting is free."""

    def __init__(self) -> None:
        super().__init__()
        self._now, self._working = 0.0, 0
        self._really_select = self._selector.select
        self._selector.select = self._select

    def time(self) -> float:
        return getattr(self, "_now", 0.0)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        self._working += 1
        future = super().run_in_executor(executor, function, *args)
        future.add_done_callback(self._worked)
        return future

    def _worked(self, _: Any) -> None:
        self._working -= 1

    def _select(self, timeout: float | None) -> Any:
        if self._working or timeout is None:
            events = self._really_select(0 if timeout == 0 else REAL_S)
            if timeout is None and not events:
                raise RuntimeError("every task waits and no timer is set: somebody waits for ever")
            return events
        events = self._really_select(0)
        if not events:
            self._now += timeout
        return events


class VirtualClock:
    """`api.Clock` of the running loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtual(coroutine: Coroutine[Any, Any, T], at_most_s: float = 1e6) -> T:
    """Run to the end in virtual time; TimeoutError when that takes longer than `at_most_s` virtual seconds."""

    async def bounded() -> T:
        async with asyncio.timeout(at_most_s):
            return await coroutine

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(bounded())
