# SPDX-License-Identifier: Apache-2.0
"""Running of a program under limits on time, output, and the total memory and number of its processes.

This module does not isolate programs. The kernel limits each single process (`bounded`). No unprivileged kernel feature
limits a whole tree of processes, so a watcher measures the tree 20 times a second.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from relax_core.api import InfrastructureError, ProgramEnd, ProgramResult, SandboxLimits
from relax_core.api.sandbox import SOCKET

LOOK_S = 0.05
CHUNK = 1 << 16
OPEN_FILES = 256
STOPPED_S = 5.0
"""Seconds within which a killed process must end."""


def bounded(limits: SandboxLimits) -> list[str]:
    """Return words to put before a command, which limit memory, file size and process count of each process."""
    memory, disk = limits.memory_mb << 20, limits.disk_mb << 20
    return [
        "/usr/bin/prlimit", f"--data={memory}", f"--fsize={disk}", f"--nproc={limits.pids}", f"--nofile={OPEN_FILES}",
        "--core=0", "--",
    ]  # fmt: skip


def check_socket(limits: SandboxLimits) -> None:
    """Raise ValueError if the limits name a path that is not a Unix socket."""
    if limits.socket and not Path(limits.socket).is_socket():
        raise ValueError(
            f"sandbox limit socket: got {limits.socket!r}, which is not a Unix socket; name a listening socket"
        )


def socket_variable(limits: SandboxLimits, given: bool, path: str) -> dict[str, str]:
    """Return the environment variable with the path of the box's socket; empty unless `given`.

    Raises ValueError if a program needs a socket (`given`) but the box has none.
    """
    if given and not limits.socket:
        raise ValueError(
            "sandbox: the program needs a socket (socket=True), but the box has none; set `socket` in its limits"
        )
    return {SOCKET: path} if given else {}


@dataclass(slots=True)
class Tree:
    """The resources of a process and its descendants at one moment."""

    memory: int = 0
    """Bytes of resident memory; shared memory counts in each process."""
    tasks: int = 0
    """Number of threads of all processes."""

    @classmethod
    def below(cls, pid: int) -> Tree:
        """Measure a process and its descendants. A process that ends meanwhile may count only in part."""
        found = cls()
        for one in descendants(pid):
            with suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{one}/statm") as file:
                    found.memory += int(file.read().split()[1]) * _PAGE
                found.tasks += len(os.listdir(f"/proc/{one}/task"))
        return found


def descendants(pid: int) -> Iterator[int]:
    """Yield the pids of a process and its descendants.

    Orphaned descendants are included only if the process adopts orphans, as the first process of a pid namespace does.
    """
    left = [pid]
    while left:
        one = left.pop()
        yield one
        with suppress(OSError):
            for task in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{task}/children") as file:
                    left += map(int, file.read().split())


_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Program:
    """A run of a program: `started -> (ended | killed at a limit) -> result`.

    Invariants: at most `output_kb` of output are held in memory. After `run` returns or raises, `kill` has been called
    until the program ended.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    limits: SandboxLimits
    kill: Callable[[int, bool], None]
    """Function that kills all of the program's processes; called until they have ended. Arguments: the first process's
    pid, and True if this process has ended."""
    first: Callable[[int], int | None] = lambda pid: pid
    """Function from the first process's pid to the pid whose descendants are measured; returns None while unknown."""
    full: Callable[[], bool] = lambda: False
    """Function that returns True if the box's disk is full."""
    overfull: Callable[[int], bool] | None = None
    """Function that returns True if the box's files exceed the disk limit, given the pid from `first`; called in a
    thread. None: no such check."""
    cwd: str | None = None
    pass_fds: tuple[int, ...] = ()

    async def run(self, stdin: bytes, wall_s: float) -> ProgramResult:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, env=dict(self.env), cwd=self.cwd, pass_fds=self.pass_fds,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise InfrastructureError(f"sandbox: {self.command[0]} can't be started: {error}") from error
        output = _Output(self.limits.output_kb << 10)
        reading = [
            asyncio.create_task(output.read(stream, at)) for at, stream in enumerate((process.stdout, process.stderr))
        ]
        feeding = asyncio.create_task(_feed(process.stdin, stdin))
        watching = asyncio.create_task(self._watch(process.pid))
        ending = asyncio.create_task(process.wait())
        end: ProgramEnd | None = None
        try:
            waiting = {ending, watching, asyncio.create_task(output.over.wait())}
            done, _ = await asyncio.wait(
                waiting, timeout=wall_s or self.limits.wall_s, return_when=asyncio.FIRST_COMPLETED
            )
            if ending not in done:
                end = watching.result() if watching in done else ProgramEnd.OUTPUT if done else ProgramEnd.WALL
        finally:
            for task in (watching, feeding, *(waiting - {ending})):
                task.cancel()
            await asyncio.shield(self._end(process, ending, reading))
        code, seconds = int(process.returncode or 0), loop.time() - began
        if end is None:
            end = _program_end(code, self.full())
            code = 128 - code if end is ProgramEnd.SIGNAL and code > 128 else code
        return ProgramResult(end, code, bytes(output.parts[0]), bytes(output.parts[1]), seconds)

    async def _end(
        self, process: asyncio.subprocess.Process, ending: asyncio.Task[int], reading: Sequence[asyncio.Task[None]]
    ) -> None:
        """Kill the remaining processes, and read the rest of the output.

        Raises InfrastructureError if the program has not ended after `STOPPED_S` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STOPPED_S
        while True:
            self.kill(process.pid, ending.done())
            _, left = await asyncio.wait({ending, *reading}, timeout=LOOK_S)
            if not left:
                return
            if loop.time() > deadline:
                for task in left:
                    task.cancel()
                if not ending.done():
                    raise InfrastructureError("sandbox: a killed program did not end")
                return

    async def _watch(self, pid: int) -> ProgramEnd:
        """Measure the program repeatedly; return the first limit that the program exceeds."""
        while True:
            await asyncio.sleep(LOOK_S)
            first = self.first(pid)
            if first is None:
                continue
            tree = Tree.below(first)
            if tree.memory > self.limits.memory_mb << 20:
                return ProgramEnd.MEMORY
            if tree.tasks > self.limits.pids:
                return ProgramEnd.PIDS
            if self.overfull is not None and await asyncio.to_thread(self.overfull, first):
                return ProgramEnd.DISK


class _Output:
    """The output of a program on both streams, up to a common limit in bytes."""

    def __init__(self, at_most: int) -> None:
        self.parts = (bytearray(), bytearray())
        self.over = asyncio.Event()
        self._left = at_most

    async def read(self, stream: asyncio.StreamReader | None, at: int) -> None:
        """Read a stream to its end, and discard output beyond the limit.

        Reading must not stop at the limit: asyncio does not report the end of a process whose pipes hold unread data.
        """
        while stream is not None and (got := await stream.read(CHUNK)):
            self.parts[at].extend(got[: self._left])
            if len(got) > self._left:
                self.over.set()
            self._left = max(0, self._left - len(got))


async def _feed(pipe: asyncio.StreamWriter | None, content: bytes) -> None:
    """Write the program's input; errors are ignored, because the program may close its input early."""
    if pipe is not None:
        with suppress(OSError):
            pipe.write(content)
            await pipe.drain()
            pipe.close()
            await pipe.wait_closed()


def _program_end(code: int, full: bool) -> ProgramEnd:
    if code == 0:
        return ProgramEnd.OK
    if full:
        return ProgramEnd.DISK
    return ProgramEnd.SIGNAL if code < 0 or code > 128 else ProgramEnd.EXIT
