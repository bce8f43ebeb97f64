# SPDX-License-Identifier: Apache-2.0
"""One program under limits: its time, what it prints, and what all of its processes together take.

Nothing here isolates. The kernel bounds what a single process may do (`bounded`); a watcher looks at all of them twenty times a
second, since nothing that needs no rights bounds a whole tree of processes.
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
"""Longest time in which the kernel ends killed processes."""


def bounded(limits: SandboxLimits) -> list[str]:
    """Return the command before a command that bounds each of its processes: memory, size of files, number of processes."""
    memory, disk = limits.memory_mb << 20, limits.disk_mb << 20
    return [
        "/usr/bin/prlimit", f"--data={memory}", f"--fsize={disk}", f"--nproc={limits.pids}", f"--nofile={OPEN_FILES}",
        "--core=0", "--",
    ]  # fmt: skip


def check_socket(limits: SandboxLimits) -> None:
    """Raise ValueError where what the limits name as a socket is none."""
    if limits.socket and not Path(limits.socket).is_socket():
        raise ValueError(f"sandbox limit socket: got {limits.socket!r}, which is no Unix socket; name one that listens")


def socket_variable(limits: SandboxLimits, given: bool, path: str) -> dict[str, str]:
    """Return the variable that tells a program of the box's socket, where it is given that. Raises ValueError without one."""
    if given and not limits.socket:
        raise ValueError(
            "sandbox: the program is to have the box's socket, and the box has none; set `socket` in its limits"
        )
    return {SOCKET: path} if given else {}


@dataclass(slots=True)
class Tree:
    """The processes below a first one, as they are now."""

    memory: int = 0
    """Bytes in memory, shared ones counted in each process."""
    tasks: int = 0
    """Threads of all of them."""

    @classmethod
    def below(cls, pid: int) -> Tree:
        """Measure a process and all that it started; those that end meanwhile count as far as they were seen."""
        found = cls()
        for one in descendants(pid):
            with suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{one}/statm") as file:
                    found.memory += int(file.read().split()[1]) * _PAGE
                found.tasks += len(os.listdir(f"/proc/{one}/task"))
        return found


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all below it; who outlives its parent is a child of the first process of its namespace."""
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
    """One program: `started -> (it ends | it meets a limit and is killed) -> result`.

    Invariants: at most `output_kb` of its output are held in memory; nothing of it runs once `run` has returned or raised.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    limits: SandboxLimits
    kill: Callable[[int, bool], None]
    """Kill all of it, told the pid of its first process and whether that has ended; called again until all have."""
    first: Callable[[int], int | None] = lambda pid: pid
    """Pid of the process below which all are counted, told that of its first one; None while it is not known."""
    full: Callable[[], bool] = lambda: False
    """Tell whether the box has no room left."""
    overfull: Callable[[int], bool] | None = None
    """Tell, in a thread, whether its files are more than the box may hold, where nothing of the kernel bounds them; told the
    pid of `first`."""
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
            end = _told(code, self.full())
            code = 128 - code if end is ProgramEnd.SIGNAL and code > 128 else code
        return ProgramResult(end, code, bytes(output.parts[0]), bytes(output.parts[1]), seconds)

    async def _end(
        self, process: asyncio.subprocess.Process, ending: asyncio.Task[int], reading: Sequence[asyncio.Task[None]]
    ) -> None:
        """Kill what is left of the program, and read what it had printed before."""
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
        """Return once the program takes more than it may."""
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
    """The text that a program prints on two streams, up to a bound for both."""

    def __init__(self, at_most: int) -> None:
        self.parts = (bytearray(), bytearray())
        self.over = asyncio.Event()
        self._left = at_most

    async def read(self, stream: asyncio.StreamReader | None, at: int) -> None:
        """Read to the end, also what is more than may be kept: a process whose pipes hold something unread never ends for
        asyncio."""
        while stream is not None and (got := await stream.read(CHUNK)):
            self.parts[at].extend(got[: self._left])
            if len(got) > self._left:
                self.over.set()
            self._left = max(0, self._left - len(got))


async def _feed(pipe: asyncio.StreamWriter | None, content: bytes) -> None:
    """Write a program's input; it need not read all of it."""
    if pipe is not None:
        with suppress(OSError):
            pipe.write(content)
            await pipe.drain()
            pipe.close()
            await pipe.wait_closed()


def _told(code: int, full: bool) -> ProgramEnd:
    if code == 0:
        return ProgramEnd.OK
    if full:
        return ProgramEnd.DISK
    return ProgramEnd.SIGNAL if code < 0 or code > 128 else ProgramEnd.EXIT
