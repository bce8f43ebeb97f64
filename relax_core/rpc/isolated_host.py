# SPDX-License-Identifier: Apache-2.0
"""The child's side of `IsolatedPool`: the base class of what an isolated process hosts, and its calls to the parent.

Code that holds the interpreter lock can't be timed in here: the parent sees silence and kills the process.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeAlias

from relax_core.api.component import Chosen
from relax_core.rpc import messages
from relax_core.rpc.host import Failure, describe, raised

messages.register(Failure)
FLUSH_S = 0.02
"""Longest time that a finished result waits for others before it is sent."""
HEARTBEAT_S = 0.5
"""Interval at which a process shows that its event loop is alive while it waits for its parent, or runs a long call."""
DONE, FAILED, LATE = "done", "failed", "late"
Result: TypeAlias = list[Any]
"""[number of the item, DONE with its value | FAILED with a Failure | LATE with None]."""
Results: TypeAlias = tuple[list[Result], bool]
"""Results, and whether the process must be replaced after them."""


class IsolatedHost:
    """Runs items of an `IsolatedPool`; a subclass says what an item is. Its public methods can be called in sessions too.

    Invariants:
    - `handle` runs in one thread, item after item; of a `concurrent` host it returns awaitables, which run side by side.
    - Each item is answered once. After one that was late or out of memory nothing is answered: the parent kills the process.
    - The deadline of an awaited item stands still while the parent answers one of its calls.
    """

    component: Chosen
    """Set before the first call, like `build`."""
    build: Callable[[Chosen], Any]
    concurrent = False

    def __init__(self) -> None:
        self.parent = ParentChannel()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="isolated")

    # -- for subclasses -------------------------------------------------------------------------------------------

    def open(self, *args: Any) -> Any:
        """Build the component; the result goes to the parent. It may be a coroutine function."""
        raise NotImplementedError

    def unpack(self, payload: Any) -> Sequence[Any]:
        """Items as the parent's `pack` put them on the wire."""
        return payload  # type: ignore[no-any-return]

    def handle(self, item: Any) -> Any:
        """Run one item; the result may be awaitable."""
        raise NotImplementedError

    def pack_result(self, item: Any, result: Any) -> Any:
        """Turn a result into data for the wire; what it raises is the item's error."""
        return result

    def pack_error(self, item: Any, error: BaseException) -> tuple[str, Any]:
        """Turn an item's error into a status and its value."""
        return FAILED, describe(error)

    # -- for the parent -------------------------------------------------------------------------------------------

    async def start(self, *args: Any) -> tuple[bool, Any]:
        """Open the component; return whether items run side by side, and what `open` returned."""
        if inspect.iscoroutinefunction(self.open):
            opened = await self.open(*args)
        else:
            opened = await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self.open(*args))
        return self.concurrent, opened

    async def run_items(self, payload: Any, timeout_s: float, alone: bool) -> AsyncIterator[Results]:
        """Run items and yield results as they come; `alone`: each is answered before the next begins."""
        work = list(enumerate(self.unpack(payload)))
        run = self._run_side_by_side if self.concurrent else self._run_in_thread
        for part in [[one] for one in work] if alone else [work]:
            async for results, replace in run(part, timeout_s):
                yield results, replace
                if replace:
                    return

    async def long_call(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """Run a coroutine method without a deadline: yield heartbeats (None) until its result stands in a list."""
        work = asyncio.ensure_future(getattr(self, method)(*args))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=HEARTBEAT_S)
                yield [work.result()] if work.done() and not work.cancelled() else None
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def requests(self) -> AsyncIterator[list[Any]]:
        async for requests in self.parent.requests():
            yield requests

    async def answered(self, number: int, failure: Failure | None, value: Any) -> None:
        self.parent.answered(number, failure, value)

    # -- items ----------------------------------------------------------------------------------------------------

    async def _run_in_thread(self, work: Sequence[tuple[int, Any]], timeout_s: float) -> AsyncIterator[Results]:
        loop = asyncio.get_running_loop()
        finished: deque[tuple[Result, bool]] = deque()
        running: tuple[int, float] | None = None

        def run_all() -> None:
            nonlocal running
            for number, item in work:
                running, replace = (number, loop.time()), False
                try:
                    result = self.handle(item)
                    if inspect.isawaitable(result):
                        result = asyncio.run_coroutine_threadsafe(_await(result), loop).result()
                    answer = [number, DONE, self.pack_result(item, result)]
                except (Exception, SystemExit) as error:
                    replace = isinstance(error, MemoryError)  # a process at its limit would fail the next item too
                    answer = [number, *self.pack_error(item, error)]
                finished.append((answer, replace))
                running = None
                if replace:
                    return

        future = loop.run_in_executor(self._thread, run_all)
        while not future.done():
            await asyncio.wait({future}, timeout=FLUSH_S)
            results, replace = [], False
            while finished:
                answer, replace = finished.popleft()
                results.append(answer)
            late = running
            if late is not None and loop.time() - late[1] > timeout_s and not future.done():
                yield [*results, [late[0], LATE, None]], True
                return
            if results:
                yield results, replace
        await future

    async def _run_side_by_side(self, work: Sequence[tuple[int, Any]], timeout_s: float) -> AsyncIterator[Results]:
        tasks = {asyncio.create_task(self._run_awaited(number, item, timeout_s)) for number, item in work}
        try:
            while tasks:
                done, tasks = await asyncio.wait(tasks, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if done or self.parent.waiting:
                    yield [task.result() for task in done], False
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_awaited(self, number: int, item: Any, timeout_s: float) -> Result:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                with _pausing(deadline):
                    result = await self.handle(item)
            return [number, DONE, self.pack_result(item, result)]
        except Exception as error:
            return [number, LATE, None] if deadline.expired() else [number, *self.pack_error(item, error)]


class ParentChannel:
    """Calls from an isolated process to its parent: requests leave in order on one stream, answers come as calls.

    Invariants:
    - The parent begins requests in the order in which they were made.
    - A call ends with its answer, the parent's error, or the process; arguments that can't travel are the caller's TypeError.
    """

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._requests: list[list[Any]] = []
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._calls = 0

    @property
    def waiting(self) -> bool:
        return bool(self._open)

    def notify(self, method: str, *args: Any) -> None:
        """Call a handler of the parent without waiting for it."""
        self._request(0, method, args)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a handler of the parent; the deadline of the item that asks stands still meanwhile."""
        self._calls += 1
        number = self._calls
        self._request(number, method, args)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        pausable = _pausable.get()
        try:
            if pausable is None:
                return await future
            with pausable.paused():
                return await future
        finally:
            self._open.pop(number, None)

    async def requests(self) -> AsyncIterator[list[Any]]:
        """Yield requests as they are made, as long as the process lives."""
        while True:
            await self._news.wait()
            self._news.clear()
            requests, self._requests = self._requests, []
            yield requests

    def answered(self, number: int, failure: Failure | None, value: Any) -> None:
        future = self._open.pop(number, None)
        if future is None or future.done():
            return
        if failure is not None:
            future.set_exception(raised(failure, "parent"))
        else:
            future.set_result(value)

    def _request(self, number: int, method: str, args: Sequence[Any]) -> None:
        self._requests.append([number, method, messages.encode(args)])
        self._news.set()


class _PausableDeadline:
    """A deadline that stands still while the parent is waited for, by however many calls at once."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self._deadline, self._pauses, self._left_s = deadline, 0, 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        loop, when = asyncio.get_running_loop(), self._deadline.when()
        self._pauses += 1
        if self._pauses == 1 and when is not None:
            self._left_s = when - loop.time()
            self._reschedule(None)
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._reschedule(loop.time() + self._left_s)

    def _reschedule(self, when: float | None) -> None:
        with suppress(RuntimeError):  # the item is over, and a task that its author left behind still calls
            self._deadline.reschedule(when)


_pausable: ContextVar[_PausableDeadline | None] = ContextVar("pausable_deadline", default=None)


@contextmanager
def _pausing(deadline: asyncio.Timeout) -> Iterator[None]:
    """Let calls to the parent, made in here or in tasks that begin in here, pause this deadline."""
    token = _pausable.set(_PausableDeadline(deadline))
    try:
        yield
    finally:
        _pausable.reset(token)


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
