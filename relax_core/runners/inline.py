# SPDX-License-Identifier: Apache-2.0
"""The inline runner: roles, engine, trainer, rewards and environments in one process, on one event loop and one thread.

It serves debuggers, profilers and notebooks: `breakpoint()` in a reward, loss, environment or role stops there and
halts the whole run, and a failing plugin prints its own traceback. Results equal those of the local runner. The inline
runner is slow, and code that hangs can't be killed. An engine may still decode in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pdb  # noqa: T100 this runner exists for debugging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from relax_core.api.errors import ConfigError
from relax_core.api.role import Worker, WorkerSpec
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc import messages
from relax_core.rpc.connection import Call
from relax_core.rpc.host import TRACEBACKS, Builder, Host, describe, free_port, raised
from relax_core.rpc.isolated_host import IsolatedHost
from relax_core.runners.launch import Launch
from relax_core.runners.local.runner import LocalRunner

LONGEST_PAUSE_S = 5.0
"""Longest time that the loop's clock counts between two iterations. A longer gap is taken for a debugger's halt."""
P = ParamSpec("P")
T = TypeVar("T")


class DebuggerLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stops while a debugger halts the process, so that no deadline passes.

    `breakpoint()` reports the begin and end of a halt. Halts by other means show as a gap between two loop iterations.
    """

    def __init__(self) -> None:
        self._turned_at, self._stopped_s = 0.0, 0.0
        self._held_at: float | None = None
        super().__init__()
        self.set_default_executor(CallingThread())

    def time(self) -> float:
        now = super().time() if self._held_at is None else self._held_at
        if self._turned_at and now - self._turned_at > LONGEST_PAUSE_S:
            self._stopped_s += now - self._turned_at - LONGEST_PAUSE_S
        self._turned_at = now
        return now - self._stopped_s

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stop the clock for the body. Safe from any thread."""
        self._held_at = self._turned_at = super().time()
        try:
            yield
        finally:
            now = super().time()
            self._stopped_s += now - self._held_at
            self._turned_at, self._held_at = now, None

    def breakpoint(self, *_: object, **__: object) -> None:
        """Open pdb at the caller. This is `sys.breakpointhook` during the run."""
        loop = self

        class Debugger(pdb.Pdb):
            def interaction(self, *args: Any) -> None:
                with loop.held():
                    super().interaction(*args)

        Debugger().set_trace(sys._getframe(1))


class CallingThread(ThreadPoolExecutor):
    """An executor that calls at once in the submitting thread, so that a debugger can step into the call."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class LoopClock:
    """The clock of one event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def now(self) -> float:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class InlineWorker:
    """A hosted component in this process. Values are encoded and decoded, so types are as in remote calls."""

    def __init__(self, spec: WorkerSpec, host: Host) -> None:
        self.name, self.pid, self.host, self.alive = spec.name, os.getpid(), "127.0.0.1", True
        self._host = host
        self._parent: InlineParent | None = None

    def serve(self, call: Call) -> None:
        if isinstance(self._host.instance, IsolatedHost):
            self._host.instance.parent.connection = self._parent = InlineParent(call)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        try:
            return _travelled(await self._host.call(method, _travelled(args)))
        except Exception as error:
            raise raised(describe(error), self.name) from error

    async def stream(self, method: str, *args: Any, timeout_s: float) -> AsyncIterator[Any]:
        try:
            async for item in self._host.stream(method, _travelled(args)):
                yield _travelled(item)
        except Exception as error:
            raise raised(describe(error), self.name) from error

    async def free_port(self, address: str) -> int:
        return free_port(address)

    async def stop(self, timeout_s: float = 5.0) -> None:
        with contextlib.suppress(ConfigError):  # not every hosted component has a method `stop`
            await self._host.call("stop", ())

    async def kill(self) -> None:
        self.alive = False
        if self._parent is not None:
            await self._parent.close()
        with contextlib.suppress(Exception):  # a component that has stopped already may raise any error
            await self.stop()


class InlineParent:
    """The calls of a hosted component to its parent in the same process; each runs in a task, so they begin in order."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._answers: set[asyncio.Task[Any]] = set()

    def notify(self, method: str, args: Sequence[Any]) -> None:
        self._begin(method, args)

    async def call(self, method: str, args: Sequence[Any]) -> Any:
        return await asyncio.shield(self._begin(method, args))

    async def close(self) -> None:
        """Cancel the calls that are in progress."""
        for answer in (answers := tuple(self._answers)):
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    def _begin(self, method: str, args: Sequence[Any]) -> asyncio.Task[Any]:
        answer = asyncio.ensure_future(self._answer(method, _travelled(tuple(args))))
        self._answers.add(answer)
        answer.add_done_callback(self._ended)
        return answer

    async def _answer(self, method: str, args: Sequence[Any]) -> Any:
        try:
            return _travelled(await self._call(method, args))
        except Exception as error:
            raise raised(describe(error), "parent") from error

    def _ended(self, answer: asyncio.Task[Any]) -> None:
        self._answers.discard(answer)
        if not answer.cancelled():
            answer.exception()  # marks the error as seen, since no caller may wait


class InlineWorkers:
    """`api.role.Workers` without processes. `run_env`: variables to set in this process."""

    def __init__(self, builder: Builder, run_env: Mapping[str, str] | None = None) -> None:
        self._builder, self._run_env = builder, run_env or {}
        self._started: list[InlineWorker] = []

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[Worker, ...]:
        os.environ.update(self._run_env)
        workers = []
        for spec in specs:
            if spec.python:
                raise ConfigError("run.runner", "'inline'", f"{spec.name} needs another interpreter: use 'local'")
            workers.append(InlineWorker(spec, Host.make(spec.component, spec.target, self._builder, CallingThread())))
        self._started = [*(worker for worker in self._started if worker.alive), *workers]
        return tuple(workers)

    async def close(self) -> None:
        for worker in self._started:
            await worker.kill()
        self._started = []


class InlineRunner(LocalRunner):
    """A `runners.launch.Runner` in one process and thread."""

    loop_factory = DebuggerLoop

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue, LoopClock())

    async def start(self, launch: Launch) -> None:
        for name, group in launch.plan.groups.items():
            if group.size > 1 and name != "rollout":
                raise ConfigError(
                    "run.runner", "'inline'", f"{name} has {group.size} ranks, but there is one process: use 'local'"
                )
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ[TRACEBACKS] = "1"
        loop = asyncio.get_running_loop()
        if isinstance(loop, DebuggerLoop) and "PYTHONBREAKPOINT" not in os.environ:
            sys.breakpointhook = loop.breakpoint
        await super().start(launch)

    async def close(self) -> None:
        sys.breakpointhook = sys.__breakpointhook__
        await super().close()

    def _make_workers(self, launch: Launch, role: str) -> InlineWorkers:
        (Path(launch.run_dir) / "logs").mkdir(exist_ok=True)
        return InlineWorkers(self._catalogue, launch.run_env)


def _travelled(value: Any) -> Any:
    return messages.decode(messages.encode(value))
