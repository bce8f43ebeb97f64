# SPDX-License-Identifier: Apache-2.0
"""Hosts: objects in a worker process whose public methods others call, errors as data, and the child's side of `IsolatedPool`.

A host knows nothing of how calls arrive: `runners.local.child` serves it over a socket, `runners.ray` inside an actor. Code
that holds the interpreter lock can't be timed in here: the parent sees silence and kills the process.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import inspect
import os
import socket
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from random import SystemRandom
from typing import Any, Protocol, TypeAlias

from relax_core.api import errors
from relax_core.api.component import Chosen, Configurable
from relax_core.api.errors import (
    ConfigError,
    DeadlineExceeded,
    PluginError,
    RelaxError,
)  # fmt: skip
from relax_core.registry.error_text import plugin_frames
from relax_core.rpc import messages

TRACEBACKS = "RELAX_TRACEBACKS"
"""Where this environment variable is set, errors of hosted code print their whole traceback as well."""
FLUSH_S = 0.02
"""Longest time that a finished result waits for others before it is sent."""
HEARTBEAT_S = 0.5
"""Interval at which a process shows that its event loop is alive while it waits for its parent, or runs a long call."""
LOOP_CHECK_S = 0.1
PARENT_SILENCE_S = 90.0
"""Longest time that a call to the parent waits without a word that it is being worked on."""
SILENCE_CHECKS = 6
"""A loop that stood still misses one check at most, and then hears what the parent said meanwhile."""
DONE, FAILED, LATE = "done", "failed", "late"
PORTS = range(20_000, 32_768)
Result: TypeAlias = list[Any]
"""[number of the item, DONE with its value | FAILED with a Failure | LATE with None]."""
Results: TypeAlias = tuple[list[Result], bool]
"""Results, and whether the process must be replaced after them."""


class Builder(Protocol):
    """The part of the catalogue that a host needs."""

    def build(self, chosen: Chosen) -> Configurable: ...


@messages.register
@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way back to the caller."""

    type: str
    message: str
    frames: str = ""
    fields: tuple[str, ...] = ()


class Host:
    """One component instance, whose public methods others call.

    Synchronous methods run one at a time in one thread, so that trainers keep their thread-bound state.
    """

    def __init__(self, instance: Any, build: Callable[[Chosen], Any], thread: Executor | None = None) -> None:
        self._instance = instance
        self._instance.build = build
        self._thread = thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="work")

    @classmethod
    def make(cls, component: Chosen, target: str, builder: Builder, thread: Executor | None = None) -> Host:
        if not target:
            return cls(builder.build(component), builder.build, thread)
        module, _, name = target.partition(":")
        instance = getattr(importlib.import_module(module), name)()
        instance.component = component
        return cls(instance, builder.build, thread)

    async def call(self, method: str, args: Sequence[Any]) -> Any:
        function = self._method(method)
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args))

    async def stream(self, method: str, args: Sequence[Any]) -> AsyncIterator[Any]:
        async for item in self._method(method)(*args):
            yield item

    def _method(self, name: str) -> Callable[..., Any]:
        function = None if name.startswith("_") else getattr(self._instance, name, None)
        if not callable(function):
            raise ConfigError("worker method", repr(name), f"{type(self._instance).__name__} has no such public method")
        return function  # type: ignore[no-any-return]


def free_port(address: str) -> int:
    """Find a free port of this machine at one of its addresses; another listener may be quicker to take it.

    It is none of those from which Linux takes the ports of outgoing connections, which would be quicker now and then.
    """
    for port in SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((address, port))
            return port
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def describe(error: BaseException) -> Failure:
    """Turn an exception into data, whatever it is; frames are the plugin's own, or all where none of it ran."""
    try:
        message, frames, fields = _described(error)
    except Exception as other:  # the author's exception has a faulty __str__
        message, frames, fields = f"its text can't be told: {other!r}", "", ()
    plain = [text.encode("utf-8", "backslashreplace").decode() for text in (message, frames, *fields)]
    return Failure(type(error).__name__, plain[0], plain[1], tuple(plain[2:]))


def _described(error: BaseException) -> tuple[str, str, tuple[str, ...]]:
    if os.environ.get(TRACEBACKS) and not isinstance(error, RelaxError):
        traceback.print_exception(error)
    frames = plugin_frames(error) or "".join(traceback.format_exception(error)[1:])
    fields: tuple[str, ...] = ()
    if isinstance(error, ConfigError):
        fields = (error.field, str(error.got), error.fix)
    if isinstance(error, PluginError):
        frames = error.frames or frames
    return str(error), frames, fields


def raised(failure: Failure, worker: str) -> Exception:
    """Return the exception that a caller should see: ours and built-in ones by their type, others as PluginError."""
    if failure.type == "ConfigError" and len(failure.fields) == 3:
        return ConfigError(*failure.fields)
    if failure.type == "PluginError":
        component, _, message = failure.message.partition(": ")
        return PluginError(component, message, failure.frames)
    ours: Mapping[str, Any] = vars(errors)
    known = ours.get(failure.type) or getattr(builtins, failure.type, None)
    if isinstance(known, type) and issubclass(known, (RelaxError, ValueError, NotImplementedError, KeyError)):
        error: Exception = known.__new__(known)
        error.args = (failure.message,)
        return error
    return PluginError(worker, f"{failure.type}: {failure.message}", failure.frames)


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
    ends = False
    """There is something to do in `end`."""

    def __init__(self) -> None:
        self.parent = ParentChannel()
        self.blocked = BlockedTime()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="isolated")

    # -- for subclasses -------------------------------------------------------------------------------------------

    def open(self, *args: Any) -> Any:
        """Build the component; the result goes to the parent. It may be a coroutine function."""
        raise NotImplementedError

    async def end(self) -> None:
        """Release what `open` took, where the process ends in order."""

    def unpack(self, payload: Any) -> Sequence[Any]:
        """Return the items that the parent's `pack` put on the wire."""
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

    async def start(self, *args: Any) -> tuple[bool, bool, Any]:
        """Open the component; return whether items run side by side, whether it `ends`, and what `open` returned."""
        if inspect.iscoroutinefunction(self.open):
            opened = await self.open(*args)
        else:
            opened = await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self.open(*args))
        return self.concurrent, self.ends, opened

    async def finish(self) -> None:
        """Do what is to do before the process ends; what goes wrong with that is only told in its log."""
        try:
            await self.end()
        except Exception:
            traceback.print_exc()

    async def run_items(self, payload: Any, timeout_s: float, alone: bool) -> AsyncIterator[Results]:
        """Run items and yield results as they come; `alone`: each is answered before the next begins."""
        work = list(enumerate(self.unpack(payload)))
        run = self._run_side_by_side if self.concurrent else self._run_in_thread
        for part in [[one] for one in work] if alone else [work]:
            async for results, replace in run(part, timeout_s):
                yield results, replace
                if replace:
                    return

    async def long_call(self, heartbeat_s: float, method: str, *args: Any) -> AsyncIterator[tuple[float, list[Any]]]:
        """Run a coroutine method without a deadline: yield heartbeats until its result stands in the list; each with the
        seconds in which the event loop stood still so far."""
        work = asyncio.ensure_future(getattr(self, method)(*args))
        try:
            with self.blocked.watched() as blocked_s:
                while not work.done():
                    await asyncio.wait({work}, timeout=heartbeat_s)
                    yield blocked_s(), [work.result()] if work.done() and not work.cancelled() else []
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def requests(self) -> AsyncIterator[list[Any]]:
        async for requests in self.parent.requests():
            yield requests

    async def still_working(self, number: int) -> None:
        self.parent.still_working(number)

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
        _pausable.set(_PausableDeadline(deadline))  # of this task, and of those that begin in it
        try:
            async with deadline:
                result = await self.handle(item)
            return [number, DONE, self.pack_result(item, result)]
        except Exception as error:
            return [number, LATE, None] if deadline.expired() else [number, *self.pack_error(item, error)]


class ParentChannel:
    """Calls from an isolated process to its parent: requests leave in order on one stream, answers come as calls.

    Invariants:
    - The parent begins requests in the order in which they were made.
    - A call ends with its answer, the parent's error, or the process; arguments that can't travel are the caller's TypeError.
    - It waits as long as the parent says that it works on the call, and ends with DeadlineExceeded `silence_s` after the last
      word.
    """

    def __init__(self, silence_s: float = PARENT_SILENCE_S) -> None:
        self._silence_s = silence_s
        self._news = asyncio.Event()
        self._requests: list[list[Any]] = []
        self._open: dict[int, _PendingCall] = {}
        self._calls = 0

    @property
    def waiting(self) -> bool:
        return bool(self._open)

    def notify(self, method: str, *args: Any) -> None:
        """Call a handler of the parent without waiting for it."""
        self._requests.append([0, method, messages.encode(args)])
        self._news.set()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a handler of the parent; the deadline of the item that asks stands still meanwhile."""
        self._calls += 1
        number = self._calls
        self._requests.append([number, method, messages.encode(args)])
        self._news.set()
        pending = self._open[number] = _PendingCall(asyncio.get_running_loop().create_future())
        pausable = _pausable.get()
        try:
            with pausable.paused() if pausable is not None else nullcontext():
                while not pending.answer.done() and pending.unheard < SILENCE_CHECKS:
                    pending.unheard += 1
                    await asyncio.wait({pending.answer}, timeout=self._silence_s / SILENCE_CHECKS)
                if not pending.answer.done():
                    raise DeadlineExceeded("a call to the parent", f"an answer of {method}", self._silence_s)
                return pending.answer.result()
        finally:
            self._open.pop(number, None)

    async def requests(self) -> AsyncIterator[list[Any]]:
        """Yield requests as they are made, as long as the process lives."""
        while True:
            await self._news.wait()
            self._news.clear()
            requests, self._requests = self._requests, []
            yield requests

    def still_working(self, number: int) -> None:
        """Let a call wait on: the parent works on it."""
        if number in self._open:
            self._open[number].unheard = 0

    def answered(self, number: int, failure: Failure | None, value: Any) -> None:
        pending = self._open.pop(number, None)
        if pending is None or pending.answer.done():
            return
        if failure is not None:
            pending.answer.set_exception(raised(failure, "parent"))
        else:
            pending.answer.set_result(value)


@dataclass(slots=True, eq=False)
class _PendingCall:
    answer: asyncio.Future[Any]
    unheard: int = 0
    """Checks since the parent was last heard about it."""


class BlockedTime:
    """Seconds in which an event loop stood still: a deadline that passed meanwhile tells nothing about who was late.

    Invariants:
    - A timer goes round while somebody watches, and at no other time.
    """

    def __init__(self) -> None:
        self._total_s, self._watchers, self._due = 0.0, 0, 0.0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[Callable[[], float]]:
        """Give a function that tells for how long the loop stood still since then."""
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
    """A deadline that stands still while the parent is waited for, by however many calls at once."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self._deadline, self._pauses, self._left_s = deadline, 0, 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        loop, when = asyncio.get_running_loop(), self._deadline.when()
        self._pauses += 1
        if self._pauses == 1 and when is not None:
            self._left_s = when - loop.time()
            with suppress(RuntimeError):  # the item is over, and a task that its author left behind still calls
                self._deadline.reschedule(None)
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                with suppress(RuntimeError):
                    self._deadline.reschedule(loop.time() + self._left_s)


_pausable: ContextVar[_PausableDeadline | None] = ContextVar("pausable_deadline", default=None)


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
