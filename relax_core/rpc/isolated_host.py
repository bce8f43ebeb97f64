# SPDX-License-Identifier: Apache-2.0
"""The child's side of `IsolatedPool`: `IsolatedHost`, and its calls to the parent.

A process can't time out code that holds its interpreter lock: the parent notices that the process is silent and kills it.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

from relax_core.api.component import Chosen
from relax_core.api.errors import PluginError, RelaxError
from relax_core.observe.process_log import bind, bound
from relax_core.registry.error_text import plugin_frames, said
from relax_core.rpc.host import describe

FLUSH_S = 0.02
"""Longest time that a finished result waits to be sent together with later results."""
HEARTBEAT_S = 0.5
"""Seconds between heartbeats of a process that waits for its parent or runs a long call."""
LOOP_CHECK_S = 0.1
DONE, FAILED, LATE = "done", "failed", "late"
Result: TypeAlias = list[Any]
"""[item number, status, value]: DONE with the result, FAILED with a Failure, LATE with None."""
Work: TypeAlias = tuple[int, Any, Mapping[str, Any]]
"""(item number, item, fields of its log records)."""
Results: TypeAlias = tuple[list[Result], bool]
"""Results, and True if the process must be replaced after them."""


class IsolatedHost:
    """The base class of hosts in an `IsolatedPool`'s processes. Subclasses implement items, and methods for sessions.

    Invariants:
    - `handle` runs in one thread, item after item. In a `concurrent` host it returns awaitables, which run
      concurrently.
    - Each item is answered once. If an item in the thread is late or runs out of memory, the parent kills the process,
      so no later item is answered.
    - The deadline of an awaited item is paused while the item waits for an answer of the parent.
    """

    component: Chosen
    """The component to host. The process sets `component` and `build` before the first call."""
    build: Callable[[Chosen], Any]
    concurrent = False
    ends = False
    """True if `end` must be called before the process ends."""

    def __init__(self) -> None:
        self.parent = ParentChannel()
        self.blocked = BlockedTime()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="isolated")

    # -- for subclasses -------------------------------------------------------------------------------------------

    def open(self, *args: Any) -> Any:
        """Build the component and return a value for the parent. An override may be a coroutine function."""
        raise NotImplementedError

    async def end(self) -> None:
        """Release the resources that `open` acquired. Not called if the process is killed."""

    def unpack(self, payload: Any) -> Sequence[Any]:
        """Return the items that the parent's `pack` encoded."""
        return payload  # type: ignore[no-any-return]

    def handle(self, item: Any) -> Any:
        """Run one item. The result may be awaitable."""
        raise NotImplementedError

    def pack_result(self, item: Any, result: Any) -> Any:
        """Turn a result into data for the wire. An error of this method becomes the item's error."""
        return result

    def pack_error(self, item: Any, error: BaseException) -> tuple[str, Any]:
        """Turn an item's error into the status and value of its `Result`."""
        return FAILED, describe(error)

    # -- for the parent -------------------------------------------------------------------------------------------

    async def start(self, *args: Any) -> tuple[bool, bool, Any]:
        """Open the component; return the flags `concurrent` and `ends`, and the result of `open`.

        An error of the component's own code is raised as PluginError with its frames.
        """
        try:
            if inspect.iscoroutinefunction(self.open):
                opened = await self.open(*args)
            else:
                opened = await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self.open(*args))
        except RelaxError:
            raise
        except Exception as error:
            raise PluginError(
                who(self.component), f"it failed to start: {said(error)}", plugin_frames(error)
            ) from error
        return self.concurrent, self.ends, opened

    async def finish(self) -> None:
        """Call `end` before the process ends. Write its errors only to the process's log."""
        try:
            await self.end()
        except Exception:
            traceback.print_exc()

    async def run_items(
        self, payload: Any, timeout_s: float, alone: bool, fields: Sequence[Mapping[str, Any]] = ()
    ) -> AsyncIterator[Results]:
        """Run items and yield results as they finish. `alone`: answer each item before the next begins.

        `fields`: for each item, the fields of its log records.
        """
        items = self.unpack(payload)
        work: list[Work] = [(number, item, fields[number] if fields else {}) for number, item in enumerate(items)]
        run = self._run_side_by_side if self.concurrent else self._run_in_thread
        for part in [[one] for one in work] if alone else [work]:
            async for results, replace in run(part, timeout_s):
                yield results, replace
                if replace:
                    return

    async def long_call(self, heartbeat_s: float, method: str, *args: Any) -> AsyncIterator[tuple[float, list[Any]]]:
        """Run a coroutine method without a deadline; yield (seconds that the event loop was blocked so far, result).

        The second part is empty for heartbeats, and has one element once the method has returned.
        """
        work = asyncio.ensure_future(getattr(self, method)(*args))
        try:
            with self.blocked.watched() as blocked_s:
                while not work.done():
                    await asyncio.wait({work}, timeout=heartbeat_s)
                    yield blocked_s(), [work.result()] if work.done() and not work.cancelled() else []
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    # -- items ----------------------------------------------------------------------------------------------------

    async def _run_in_thread(self, work: Sequence[Work], timeout_s: float) -> AsyncIterator[Results]:
        loop = asyncio.get_running_loop()
        finished: deque[tuple[Result, bool]] = deque()
        running: tuple[int, float] | None = None

        def run_all() -> None:
            nonlocal running
            for number, item, fields in work:
                running, replace = (number, loop.time()), False
                try:
                    with bound(**fields):
                        result = self.handle(item)
                        if inspect.isawaitable(result):
                            result = asyncio.run_coroutine_threadsafe(_await(result), loop).result()
                        answer = [number, DONE, self.pack_result(item, result)]
                except (Exception, SystemExit, asyncio.CancelledError) as error:
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

    async def _run_side_by_side(self, work: Sequence[Work], timeout_s: float) -> AsyncIterator[Results]:
        tasks = {asyncio.create_task(self._run_awaited(*one, timeout_s)) for one in work}
        try:
            while tasks:
                done, tasks = await asyncio.wait(tasks, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if done or self.parent.waiting:
                    yield [task.result() for task in done], False
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_awaited(self, number: int, item: Any, fields: Mapping[str, Any], timeout_s: float) -> Result:
        bind(**fields)
        deadline = asyncio.timeout(timeout_s)
        _pausable.set(_PausableDeadline(deadline))  # for this task and all tasks that it starts
        try:
            async with deadline:
                result = await self.handle(item)
            return [number, DONE, self.pack_result(item, result)]
        except asyncio.CancelledError as error:  # of a task that the author's code awaited
            if getattr(asyncio.current_task(), "cancelling", int)():
                raise
            return [number, *self.pack_error(item, error)]
        except Exception as error:
            return [number, LATE, None] if deadline.expired() else [number, *self.pack_error(item, error)]


class Parent(Protocol):
    """The parent as a `Connection` or an inline worker shows it."""

    def notify(self, method: str, args: Sequence[Any]) -> None: ...

    async def call(self, method: str, args: Sequence[Any]) -> Any: ...


class ParentChannel:
    """Calls from an isolated process to the handlers of its parent, over the connection on which the parent calls.

    Invariants:
    - The parent begins calls in the order in which they were made. Arguments that can't be sent raise TypeError.
    - A call ends with its answer or the parent's error, unless the process ends.
    """

    connection: Parent
    """The connection to the parent. The process sets it before the first call."""
    waiting = 0
    """Number of calls without an answer."""

    def notify(self, method: str, *args: Any) -> None:
        """Call a handler of the parent without waiting for it."""
        self.connection.notify(method, args)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a handler of the parent. The caller's own deadline is paused until the answer arrives."""
        pausable = _pausable.get()
        self.waiting += 1
        try:
            with pausable.paused() if pausable is not None else nullcontext():
                return await self.connection.call(method, args)
        finally:
            self.waiting -= 1


class BlockedTime:
    """A stopwatch for the time in which an event loop is blocked, since a late item may be late only for this reason.

    Invariants:
    - A timer runs only while a `watched` block is open.
    """

    def __init__(self) -> None:
        self._total_s, self._watchers, self._due = 0.0, 0, 0.0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[Callable[[], float]]:
        """Yield a function that returns the seconds that the loop was blocked since entry."""
        self._watchers += 1
        if self._timer is None:
            self._go_round()
        before = self._total_s
        try:
            yield lambda: self._total_s + self._late_s() - before
        finally:
            self._watchers -= 1
            if not self._watchers and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _go_round(self) -> None:
        if self._timer is not None:
            self._total_s += self._late_s()
        loop = asyncio.get_running_loop()
        self._due = loop.time() + LOOP_CHECK_S
        self._timer = loop.call_at(self._due, self._go_round)

    def _late_s(self) -> float:
        return max(asyncio.get_running_loop().time() - self._due, 0.0)


class _PausableDeadline:
    """A deadline that is paused while one or several calls wait for the parent."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self._deadline, self._pauses, self._left_s = deadline, 0, 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        loop, when = asyncio.get_running_loop(), self._deadline.when()
        self._pauses += 1
        if self._pauses == 1 and when is not None:
            self._left_s = when - loop.time()
            with suppress(RuntimeError):  # the item has ended, but a task that it left behind still makes calls
                self._deadline.reschedule(None)
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                with suppress(RuntimeError):
                    self._deadline.reschedule(loop.time() + self._left_s)


_pausable: ContextVar[_PausableDeadline | None] = ContextVar("pausable_deadline", default=None)


def who(component: Chosen) -> str:
    """Return the name of a component for error messages, such as `reward exact`."""
    return f"{component.kind} {component.name}"


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
