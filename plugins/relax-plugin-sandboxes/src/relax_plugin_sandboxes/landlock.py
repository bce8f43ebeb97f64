# SPDX-License-Identifier: Apache-2.0
"""Boxes that are folders to which the kernel confines programs, for machines that refuse user namespaces.

Landlock confines files and signals; a filter of system calls (seccomp) refuses the network and further calls. Neither
needs root privileges.

A program runs as the user and sees the machine's file tree. It can check whether a path exists and read its size and
times. It can read only the box's files and the system's programs, and change only the box's files.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from relax_core.api import InfrastructureError, OpenBox, Options, ProgramResult, Sandbox, SandboxLimits
from relax_plugin_sandboxes import confine
from relax_plugin_sandboxes.files import BLOCK, read_file, size_of, write_file
from relax_plugin_sandboxes.program import STOPPED_S, Program, bounded, descendants
from relax_plugin_sandboxes.system import interpreter_folders, system_paths

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PROBE_S = 10.0
WATCHER_MB = 24
"""MiB added to a program's memory limit for its watcher process, which is measured together with the program."""
PROBE = """
import os, socket, sys
secret, port, pid = sys.argv[1:]
for what, attempt in {
    "read a file of yours": lambda: open(secret).read(),
    "change a file of yours": lambda: os.truncate(secret, 0),
    "change the mode of a file of yours": lambda: os.chmod(secret, 0o777),
    "change a kernel setting": lambda: os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY),
    "connect to this machine": lambda: socket.create_connection(("127.0.0.1", int(port)), 1),
    "signal a process of yours": lambda: os.kill(int(pid), 0),
}.items():
    try:
        attempt()
        print(what)
    except OSError:
        pass
print("confined")
"""
"""Test program: prints each forbidden action that succeeded, and `confined` at its end."""
ADVICE = (
    'use [sandbox] name = "bubblewrap" if user namespaces are allowed, or a weaker sandbox: [sandbox] name = "process"'
)


class LandlockOptions(Options):
    """Options of `landlock`."""

    python: str = ""
    """Path of the interpreter that a box offers as `box.python`; empty: Relax's interpreter, without its packages."""
    readable: tuple[str, ...] = ()
    """Further files and folders that programs may read; their paths in a box are the same as outside."""


class Landlock(Sandbox[LandlockOptions]):
    """A sandbox of Landlock and a filter of system calls."""

    hides_names: ClassVar[bool] = False

    def __init__(self, options: LandlockOptions | None = None) -> None:
        super().__init__(options)
        self.python = self.options.python or str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())

    async def probe(self) -> None:
        """Check the kernel, and run a test program that attempts forbidden actions.

        Raises InfrastructureError naming the missing feature, or the action that succeeded.
        """
        check_kernel()
        with tempfile.NamedTemporaryFile(prefix="relax-probe-") as secret:
            secret.write(b"secret")
            secret.flush()
            server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
            box = await self.open(SandboxLimits(wall_s=PROBE_S))
            try:
                arguments = (secret.name, str(server.sockets[0].getsockname()[1]), str(os.getpid()))
                result = await box.run([box.python, "-I", "-S", "-c", PROBE, *arguments], b"", {}, 0.0, False)
            finally:
                await box.close()
                server.close()
        *could, last = result.stdout.decode().splitlines() or [""]
        if last != "confined":
            said = result.stderr.decode(errors="replace").strip() or result.end
            raise InfrastructureError(f"sandbox landlock: a test program failed in it: {said}; {ADVICE}")
        if could:
            raise InfrastructureError(f"sandbox landlock: a program in it could {', '.join(could)}; {ADVICE}")

    async def open(self, limits: SandboxLimits) -> OpenBox:
        return LandlockBox(limits, self.options, self.python)


def check_kernel() -> None:
    """Raise InfrastructureError if the machine or its kernel lacks a feature that the sandbox needs."""
    machine = platform.machine()
    if machine not in confine.MACHINES:
        known = " and ".join(confine.MACHINES)
        raise InfrastructureError(
            f"sandbox landlock: this machine is {machine}, but the system call filter supports only {known}; {ADVICE}"
        )
    needs = f"the sandbox needs version {confine.MIN_ABI} ({confine.KERNEL_OF_ABI})"
    try:
        found = confine.landlock_abi()
    except confine.Refused as error:
        fix = "boot the kernel with landlock in lsm=, or allow the system calls landlock_* in the container's filter"
        raise InfrastructureError(
            f"sandbox landlock: the kernel has no Landlock: {error}; {needs}; {fix}, or {ADVICE}"
        ) from error
    if found < confine.MIN_ABI:
        raise InfrastructureError(f"sandbox landlock: the kernel has Landlock version {found}; {needs}; {ADVICE}")


class LandlockBox(OpenBox):
    """A folder and programs confined to it: `open -> run ... -> close`.

    Invariants: each program has its own Landlock domain below a watcher process (`confine.py`). The watcher kills all of
    the program's processes when a pipe closes, and so also when this process ends. `close` deletes the folder.
    """

    def __init__(self, limits: SandboxLimits, options: LandlockOptions, python: str) -> None:
        self.python, self._limits = python, limits
        self._readable = [*system_paths(), *interpreter_folders(python), *options.readable]
        self._folder = tempfile.mkdtemp(prefix="relax-box-")
        self._work, self._tmp = f"{self._folder}/work", f"{self._folder}/tmp"
        os.mkdir(self._work, 0o700)
        os.mkdir(self._tmp, 0o700)
        self._closed = False
        self._running: dict[asyncio.Future[None], list[int]] = {}
        """Write ends of the pipes that keep programs alive, by a future that completes when the program ends."""

    async def run(
        self, command: Sequence[str], stdin: bytes, env: Mapping[str, str], wall_s: float, socket: bool
    ) -> ProgramResult:
        if self._closed:
            raise InfrastructureError("sandbox landlock: the box is closed")
        if socket:
            raise ValueError('sandbox landlock: programs can\'t get a socket; use [sandbox] name = "bubblewrap"')
        own = {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self._work, "TMPDIR": self._tmp, "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **env,
        }  # fmt: skip
        words = [
            word for word in bounded(self._limits) if not word.startswith("--nproc")
        ]  # --nproc counts all processes of the user
        alive, held = os.pipe()
        report_read, report_write = os.pipe()
        os.set_blocking(report_read, False)
        holding, ended = [held], asyncio.get_running_loop().create_future()
        self._running[ended] = holding
        limits = replace(
            self._limits, memory_mb=self._limits.memory_mb + WATCHER_MB, pids=self._limits.pids + 1
        )  # includes the watcher process
        program = Program(
            [*self._confined(alive, report_write), *words, *command], own, limits, lambda pid, ended: _close_pipe(holding),
            full=self._is_full, overfull=self._is_overfull, pass_fds=(alive, report_write),
        )  # fmt: skip
        try:
            result = await program.run(stdin, wall_s)
            said = b""
            with suppress(BlockingIOError):
                said = os.read(report_read, 4096)
        finally:
            _close_pipe(holding)
            for descriptor in (alive, report_read, report_write):
                os.close(descriptor)
            del self._running[ended]
            ended.set_result(None)
        if said == confine.READY + confine.ENDED:
            return result
        if confine.READY.startswith(said[: len(confine.READY)]):
            raise InfrastructureError(
                "sandbox landlock: the watcher process of a program was killed, by the kernel (out of memory) or by you"
            )
        why = said.decode(errors="replace")
        raise InfrastructureError(f"sandbox landlock: the kernel refuses to confine a program: {why}; {ADVICE}")

    async def write(self, path: str, content: bytes) -> None:
        self._check()
        if await asyncio.to_thread(size_of, self._folder) + len(content) > self._limits.disk_mb << 20:
            raise InfrastructureError(f"sandbox file {path!r}: the box is full; raise disk_mb in its limits")
        await asyncio.to_thread(write_file, self._work, path, content)

    async def read(self, path: str, at_most: int) -> bytes:
        self._check()
        return await asyncio.to_thread(read_file, self._work, path, at_most)

    async def close(self) -> None:
        self._closed = True
        for holding in self._running.values():
            _close_pipe(holding)
        if self._running:
            await asyncio.wait(list(self._running), timeout=STOPPED_S)
        await asyncio.to_thread(_make_removable, self._folder)
        # Not shutil.rmtree: a program may have created folders deeper than rmtree's recursion limit.
        removing = await asyncio.create_subprocess_exec(
            "/bin/rm", "-rf", "--", self._folder, stderr=asyncio.subprocess.DEVNULL
        )
        await removing.wait()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise InfrastructureError("sandbox landlock: the box is closed")

    def _confined(self, alive: int, report: int) -> list[str]:
        """Return the first words of a command: they confine the process, which then runs the words after them."""
        settings = {
            "alive": alive, "report": report, "work": self._work, "read": self._readable,
            "write": [self._work, self._tmp, *DEVICES],
        }  # fmt: skip
        return [sys.executable, "-I", "-S", confine.__file__, json.dumps(settings)]

    def _is_full(self) -> bool:
        return size_of(self._folder) >= self._limits.disk_mb << 20

    def _is_overfull(self, pid: int) -> bool:
        return size_of(self._folder) + nameless_bytes(pid) > self._limits.disk_mb << 20


def nameless_bytes(pid: int) -> int:
    """Return the bytes of unlinked files that a process or its descendants hold open."""
    found: dict[tuple[int, int], int] = {}
    for one in descendants(pid):
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{one}/fd"):
                with suppress(OSError):
                    file = os.stat(f"/proc/{one}/fd/{descriptor}")
                    if stat.S_ISREG(file.st_mode) and not file.st_nlink:
                        found[file.st_dev, file.st_ino] = max(file.st_blocks << 9, BLOCK)
    return sum(found.values())


def _close_pipe(holding: list[int]) -> None:
    """Close the pipe that keeps a program alive. Does nothing if the pipe is already closed."""
    while holding:
        os.close(holding.pop())


def _make_removable(root: str) -> None:
    """Restore the user's permissions on folders below `root`, so that `rm` can delete them.

    Folders too deep for a path are skipped; `rm` may then fail.
    """
    folders = [root]
    while folders:
        folder = folders.pop()
        with suppress(OSError):
            os.chmod(folder, 0o700)
            with os.scandir(folder) as entries:
                folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
