"""The sandbox `{{ cookiecutter.name }}`: a box is a folder, in which programs run as plain processes under limits, without isolation.

To isolate the programs, start them in a container or a virtual machine: change the command in `run`.
"""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import ClassVar

from relax_core.api import InfrastructureError, OpenBox, Options, ProgramEnd, ProgramResult, Sandbox, SandboxLimits

PRLIMIT = "/usr/bin/prlimit"
LOOK_S = 0.05
"""Seconds between two looks at what a program uses."""
END_S = 5.0
"""Seconds within which a killed program must end."""


class {{ cookiecutter.class_name }}Options(Options):
    """Options of `{{ cookiecutter.name }}`."""

    python: str = ""
    """Path of the interpreter that a box offers as `box.python`; empty: Relax's interpreter."""


class {{ cookiecutter.class_name }}(Sandbox[{{ cookiecutter.class_name }}Options]):
    """Makes boxes that are folders; runs in a process of its own."""

    isolates: ClassVar[bool] = False
    """Set it to True once programs reach neither the user's files nor a network. The suite then tests that."""

    async def probe(self) -> None:
        """Check what the sandbox needs of the machine; the run does not start without it."""
        if not os.access(PRLIMIT, os.X_OK):
            raise InfrastructureError(f"sandbox {{ cookiecutter.name }}: no {PRLIMIT}; install util-linux")

    async def open(self, limits: SandboxLimits) -> "FolderBox":
        """Return a new, empty box."""
        return FolderBox(limits, self.options.python or sys.executable)


class FolderBox(OpenBox):
    """A folder with the programs that run in it."""

    def __init__(self, limits: SandboxLimits, python: str) -> None:
        self.python, self._limits, self._closed = python, limits, False
        self._folder = Path(tempfile.mkdtemp(prefix="relax-box-"))
        self._running: set[int] = set()

    async def run(
        self, command: Sequence[str], stdin: bytes, env: Mapping[str, str], wall_s: float, socket: bool
    ) -> ProgramResult:
        """Run a program until it ends or exceeds a limit, then kill what it has started."""
        if self._closed:
            raise InfrastructureError("sandbox {{ cookiecutter.name }}: the box is closed")
        limits, now = self._limits, asyncio.get_running_loop().time
        own = [PRLIMIT, f"--as={limits.memory_mb << 20}", f"--fsize={limits.disk_mb << 20}", "--core=0", "--"]
        variables = dict(PATH="/usr/local/bin:/usr/bin:/bin", HOME=str(self._folder), TMPDIR=str(self._folder)) | dict(env)
        began = now()
        child = await asyncio.create_subprocess_exec(
            *own, *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=variables, cwd=self._folder, start_new_session=True
        )
        self._running.add(child.pid)
        output = Output(limits.output_kb << 10)
        ending, watching = asyncio.ensure_future(child.wait()), asyncio.ensure_future(self._watch(child.pid, output))
        reading = [asyncio.ensure_future(output.read(i, pipe)) for i, pipe in enumerate((child.stdout, child.stderr))]
        feeding = asyncio.ensure_future(feed(child.stdin, stdin))
        try:
            await asyncio.wait((ending, watching), timeout=wall_s or limits.wall_s, return_when=asyncio.FIRST_COMPLETED)
            end = None if ending.done() else watching.result() if watching.done() else ProgramEnd.WALL
        finally:
            watching.cancel()
            feeding.cancel()
            kill(child.pid)
            await asyncio.shield(asyncio.wait((ending, *reading), timeout=END_S))
            self._running.discard(child.pid)
        code = child.returncode or 0
        if end is None and output.over:
            end = ProgramEnd.OUTPUT
        if end is None and code:
            full = size_of(self._folder) >= limits.disk_mb << 20
            end = ProgramEnd.DISK if full else ProgramEnd.SIGNAL if code < 0 else ProgramEnd.EXIT
        return ProgramResult(end or ProgramEnd.OK, code, bytes(output.parts[0]), bytes(output.parts[1]), now() - began)

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, and create its parent folders."""
        if size_of(self._folder) + len(content) > self._limits.disk_mb << 20:
            raise InfrastructureError(f"sandbox file {path!r}: the box is full; raise disk_mb in its limits")
        file = self._inside(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    async def read(self, path: str, at_most: int) -> bytes:
        """Return the first bytes of a regular file."""
        file = self._inside(path)
        if not file.exists():
            raise ValueError(f"sandbox file {path!r}: the box has no such file")
        with file.open("rb") as opened:
            return opened.read(at_most)

    async def close(self) -> None:
        """End every program of the box and delete its files."""
        self._closed = True
        for pid in self._running:
            kill(pid)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _inside(self, path: str) -> Path:
        """Return the place of a file in the box. Raises ValueError for one outside, a link, a folder or a pipe."""
        parts, place = PurePosixPath(path).parts, self._folder
        if not parts or path.startswith("/") or ".." in parts:
            raise ValueError(f"sandbox file {path!r}: give a relative path inside the box")
        for part in parts:
            place /= part
            if place.is_symlink():
                raise ValueError(f"sandbox file {path!r}: {part} is a link")
        if place.exists() and not place.is_file():
            raise ValueError(f"sandbox file {path!r}: it is not a regular file")
        return place

    async def _watch(self, pid: int, output: "Output") -> ProgramEnd:
        """Return the limit that the program and its children exceed together."""
        while True:
            await asyncio.sleep(LOOK_S)
            tasks, memory = used(pid)
            if output.over:
                return ProgramEnd.OUTPUT
            if tasks > self._limits.pids:
                return ProgramEnd.PIDS
            if memory > self._limits.memory_mb << 20:
                return ProgramEnd.MEMORY


class Output:
    """What a program writes to its two streams, up to a common limit in bytes."""

    def __init__(self, limit: int) -> None:
        self.parts, self.over, self._left = (bytearray(), bytearray()), False, limit

    async def read(self, index: int, pipe: asyncio.StreamReader | None) -> None:
        """Read a stream to its end; discard what exceeds the limit, so that the program does not wait."""
        while pipe is not None and (data := await pipe.read(1 << 16)):
            self.parts[index].extend(data[: self._left])
            self.over = self.over or len(data) > self._left
            self._left = max(0, self._left - len(data))


async def feed(pipe: asyncio.StreamWriter | None, content: bytes) -> None:
    """Write the program's input, which the program may close early."""
    if pipe is not None:
        with suppress(OSError):
            pipe.write(content)
            await pipe.drain()
            pipe.close()


def used(session: int) -> tuple[int, int]:
    """Return the number of threads, and the bytes of memory, of all processes of a session."""
    tasks = pages = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # the process has ended
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                tasks, pages = tasks + int(fields[17]), pages + int(fields[21])
    return tasks, pages * os.sysconf("SC_PAGE_SIZE")


def kill(session: int) -> None:
    """Kill the processes that a program started in its process group."""
    with suppress(OSError):
        os.killpg(session, signal.SIGKILL)


def size_of(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    return sum(file.lstat().st_size for file in folder.rglob("*"))
