# SPDX-License-Identifier: Apache-2.0
"""The boxes of a run: the parent's side, which starts the sandbox and lends boxes, and the client's side.

The parent is the role's process; clients are the processes that run rewards and environments of authors.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from relax_core.api.component import Chosen
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, WorkerDied
from relax_core.api.role import Worker, WorkerSpec
from relax_core.api.sandbox import Box, ProgramResult, SandboxLimits
from relax_core.registry.shapes import checked
from relax_core.rpc.isolated_host import ParentChannel
from relax_core.rpc.isolated_pool import INHERITED_ENV, Handler, IsolatedProcess, ProcessStarter

if TYPE_CHECKING:  # importing the configuration would slow down the start of each reward and environment process
    from relax_core.config.run_config import SandboxChoice

CALL, HOLD, CLOSE = "sandbox", "sandbox_hold", "sandbox_close"
"""Names of the handlers in the parent that clients call."""
METHODS = ("run", "write", "read")
GRACE_S = 20.0
"""Seconds that a call to the sandbox's process may take, in addition to the time of the program itself."""
Waiting: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""Factory of a context that is entered while a sample waits for a slot, so that this time does not count."""


class SandboxPool:
    """The sandbox of one role.

    Life cycle: `idle -> (a reward or environment declares a need) -> started -> closed`.

    Invariants:
    - The sandbox's process starts only if it is needed, and starts again after it died. The boxes of a dead process are
      lost, and calls to them raise InfrastructureError.
    - At most `programs` programs run at once and at most `boxes` boxes are open. Waiting for a slot does not count as a
      program's time, and ends, because each program that has a slot has a deadline. A program with a socket needs no
      slot, because it mostly waits for answers.
    - A box ends with the sample that opened it, even if the sample's process was killed.
    """

    def __init__(self, choice: SandboxChoice | None, starter: ProcessStarter) -> None:
        if choice is None:
            from relax_core.config.run_config import DEFAULT_SANDBOX, SandboxChoice

            choice = SandboxChoice(chosen=Chosen("sandbox", DEFAULT_SANDBOX))
        target = "relax_core.sandboxes.host:SandboxHost"
        spec = WorkerSpec("sandbox", choice.chosen, target=target, inherit_env=INHERITED_ENV)
        self._process = IsolatedProcess(spec, starter)
        self._programs = asyncio.Semaphore(choice.programs or os.cpu_count() or 1)
        self._boxes = asyncio.Semaphore(choice.boxes)
        self._needed = False
        self._numbers = count(1)

    async def start(self) -> None:
        """Start and probe the sandbox if a need was declared. Raises the component's error if the machine is unfit."""
        if self._needed:
            await self._process.ready()

    async def close(self) -> None:
        await self._process.end(GRACE_S)

    def handlers(
        self, limits: SandboxLimits | None, waiting: Callable[[int], AbstractContextManager[Any]] = nullcontext
    ) -> dict[str, Handler]:
        """Make the handlers for one process of an author. `limits`: default limits of its boxes; None: no sandbox.

        `waiting` takes the number of a sample, or 0 without a sample; its context is entered while the sample waits for
        a slot.
        """
        if limits is None:
            return {}
        self._needed = True
        return _LentBoxes(self, limits, waiting).handlers()

    @asynccontextmanager
    async def box(self, limits: SandboxLimits, waiting: Waiting = nullcontext) -> AsyncIterator[_RemoteBox]:
        async with _place(self._boxes, waiting):
            worker, number = await self._process.ready(), next(self._numbers)
            box = _RemoteBox(self._process, worker, number, limits, self._programs, waiting)
            try:
                box.python = await box.call("open_box", limits, timeout_s=GRACE_S)
                yield box
            finally:
                with suppress(InfrastructureError):
                    await asyncio.shield(box.call("close_box", timeout_s=GRACE_S))


@asynccontextmanager
async def _place(places: asyncio.Semaphore, waiting: Waiting) -> AsyncIterator[None]:
    with waiting():
        await places.acquire()
    try:
        yield
    finally:
        places.release()


class _RemoteBox:
    """A box in the sandbox's process."""

    python = ""
    """Path of a Python interpreter in the box."""

    def __init__(
        self, process: IsolatedProcess, worker: Worker, number: int, limits: SandboxLimits,
        programs: asyncio.Semaphore, waiting: Waiting,
    ) -> None:  # fmt: skip
        self._process, self._worker, self._number, self._limits = process, worker, number, limits
        self._programs, self._waiting = programs, waiting

    async def do(self, method: str, *args: Any) -> Any:
        """Call one of `METHODS` of the box; a program waits for a slot."""
        if method != "run":
            return await self.call(method, *args, timeout_s=GRACE_S)
        *_, wall_s, socket = args
        async with nullcontext() if socket else _place(self._programs, self._waiting):
            return await self.call("run", *args, timeout_s=(wall_s or self._limits.wall_s) + GRACE_S)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call the sandbox's process; if the process died or does not answer, kill it and give up all its boxes."""
        if self._process.worker is not self._worker:
            raise InfrastructureError("sandbox: the process of this box has ended and the box is lost; open a new box")
        try:
            return await self._worker.call(method, self._number, *args, timeout_s=timeout_s)
        except (DeadlineExceeded, WorkerDied) as error:
            await self._process.discard(self._worker, str(error))
            raise InfrastructureError(f"sandbox: {error}") from error


class _LentBoxes:
    """The boxes that one process of an author has open.

    Invariant: a box is open as long as its HOLD request lasts; the end of the process cancels its HOLD requests.
    """

    def __init__(
        self, pool: SandboxPool, limits: SandboxLimits, waiting: Callable[[int], AbstractContextManager[Any]]
    ) -> None:
        self._pool, self._limits, self._waiting = pool, limits, waiting
        self._open: dict[int, asyncio.Future[_RemoteBox]] = {}
        self._over: dict[int, asyncio.Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {HOLD: self._hold, CALL: self._do, CLOSE: self._close}

    async def _hold(self, number: int, limits: SandboxLimits | None, sample: int) -> None:
        opened = self._open[number] = asyncio.get_running_loop().create_future()
        over = self._over[number] = asyncio.Event()
        try:
            checked(limits, SandboxLimits | None, "sandbox: limits")
            async with self._pool.box(limits or self._limits, lambda: self._waiting(sample)) as box:
                opened.set_result(box)
                await over.wait()
        except Exception as error:  # raised by the next call to the box
            if not opened.done():
                opened.set_exception(error)
                await over.wait()
        finally:
            del self._open[number], self._over[number]
            if not opened.done():
                opened.cancel()
            elif not opened.cancelled():
                opened.exception()  # marks the error as seen, since no call may follow

    async def _do(self, number: int, method: str, *args: Any) -> object:
        """Answer a call to a box; `open` returns the path of a Python interpreter in the box."""
        if number not in self._open:
            raise InfrastructureError("sandbox: the box is closed")
        box = await asyncio.shield(self._open[number])
        if method == "open":
            return box.python
        if method not in METHODS:
            raise ValueError(f"sandbox: a box has no {method}")
        return await box.do(method, *args)

    def _close(self, number: int) -> None:
        if number in self._over:
            self._over[number].set()


class SandboxRpcClient:
    """The `api.SandboxClient` of all rewards or environments in one process; the client numbers their boxes."""

    def __init__(self, parent: ParentChannel) -> None:
        self._parent, self._numbers, self._sample = parent, count(1), 0

    def of(self, sample: int) -> Self:
        """Return a client for the sample with this number."""
        client = copy.copy(self)
        client._sample = sample
        return client

    @asynccontextmanager
    async def open(self, limits: SandboxLimits | None = None) -> AsyncIterator[Box]:
        number = next(self._numbers)
        self._parent.notify(HOLD, number, limits, self._sample)
        try:
            yield _LentBox(self._parent, number, await self._parent.call(CALL, number, "open"))
        finally:
            self._parent.notify(CLOSE, number)


class _LentBox:
    """An `api.Box` in a process of rewards or environments; its calls go to the parent."""

    def __init__(self, parent: ParentChannel, number: int, python: str) -> None:
        self._parent, self._number, self.python = parent, number, python

    async def run(
        self, command: Sequence[str], stdin: bytes = b"", env: Mapping[str, str] | None = None, wall_s: float = 0.0,
        socket: bool = False,
    ) -> ProgramResult:  # fmt: skip
        arguments = tuple(command), stdin, dict(env or {}), wall_s, socket
        result: ProgramResult = await self._parent.call(CALL, self._number, "run", *arguments)
        return result

    async def write(self, path: str, content: bytes) -> None:
        await self._parent.call(CALL, self._number, "write", path, content)

    async def read(self, path: str, at_most: int = 1 << 20) -> bytes:
        content: bytes = await self._parent.call(CALL, self._number, "read", path, at_most)
        return content
