# SPDX-License-Identifier: Apache-2.0
"""Promises of `landlock` beyond those of every sandbox."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from relax_plugin_sandboxes import confine
from relax_plugin_sandboxes.landlock import Landlock, LandlockOptions
from relax_plugin_sandboxes.program import descendants

from relax_core.api import InfrastructureError, OpenBox, ProgramEnd, ProgramResult, SandboxLimits

LIMITS = SandboxLimits(wall_s=30.0, memory_mb=256, pids=24, disk_mb=8, output_kb=64)
ATTEMPTS = """
import ctypes, os, shutil, signal, socket, sys
path, abstract, pid = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)

def called(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)

def talks():
    with socket.socket(socket.AF_UNIX) as talk:
        talk.connect("\\0" + abstract)

for what, attempt in {
    "write": lambda: open(path, "r+"),
    "truncate": lambda: os.truncate(path, 0),
    "remove": lambda: os.unlink(path),
    "move": lambda: os.rename(path, "mine"),
    "link": lambda: os.link(path, "mine"),
    "chmod": lambda: os.chmod(path, 0o777),
    "fchmod": lambda: os.fchmod(os.open(path, os.O_RDONLY), 0o777),
    "chown": lambda: os.chown(path, os.getuid(), os.getgid()),
    "utime": lambda: os.utime(path),
    "setxattr": lambda: os.setxattr(path, "user.x", b"x"),
    "list": lambda: os.listdir(os.path.dirname(path)),
    "read a process": lambda: open(f"/proc/{pid}/environ").read(),
    "signal": lambda: os.kill(int(pid), 0),
    "signal its watcher": lambda: os.kill(os.getppid(), 0),
    "trace": lambda: called("ptrace", 16, int(pid), 0, 0),
    "internet": lambda: socket.socket(socket.AF_INET),
    "internet 6": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "abstract socket": talks,
    "datagrams": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    "shared memory": lambda: called("shmget", 0, 4096, 0o1600),
    "semaphores": lambda: called("semget", 0, 1, 0o1600),
    "keys": lambda: called("syscall", 250 if os.uname().machine == "x86_64" else 219, 0, -3, 1),
    "watch files": lambda: called("inotify_init1", 0),
    "limits of a process": lambda: __import__("resource").prlimit(int(pid), 7, (99, 99)),
    "slow down a process": lambda: os.setpriority(os.PRIO_PROCESS, int(pid), 19),
    "namespace": lambda: called("unshare", 0x10000000),
    "become root": lambda: os.setuid(0) if os.getuid() else called("chroot", b"."),
}.items():
    try:
        attempt()
        print(what)
    except OSError:
        pass
for pair in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    socket.socketpair(socket.AF_UNIX, pair)
print(open(path).read())
"""
"""Tells what it could do, and then what it reads in the file."""
MANY = "for at in range(100000): open(str(at), 'w').close()"
SEVERAL = """
import os, time
held = []
for at in range(9):
    held.append(open('x', 'wb'))
    os.unlink('x')
    held[-1].write(bytes(1 << 20))
    held[-1].flush()
time.sleep(60)
"""
IN_MEMORY = """
import os, time
held = [os.memfd_create('x') for _ in range(9)]
for file in held:
    os.write(file, bytes(1 << 20))
time.sleep(60)
"""
DEEP = "import os, time\nfor _ in range(3000):\n os.mkdir('d')\n os.chdir('d')\ntime.sleep(60)"
SCATTERS = """
import os, sys, time
for _ in range(8):
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        os.environ.clear()
        time.sleep(60)
time.sleep(0.3)
print("scattered")
"""


@pytest.fixture
async def box() -> AsyncIterator[OpenBox]:
    box = await Landlock().open(LIMITS)
    yield box
    await box.close()


async def python(box: OpenBox, program: str, *args: str, env: dict[str, str] | None = None) -> ProgramResult:
    return await box.run([box.python, "-I", "-S", "-c", program, *args], b"", env or {}, 0.0, False)


async def test_a_program_changes_no_outside_file_and_reaches_no_host(tmp_path: Path) -> None:
    """Even a file that it may read stays as it is."""
    secret = tmp_path / "given"
    secret.write_text("given")
    before = secret.stat()
    abstract = f"relax-test-{os.getpid()}"
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), f"\0{abstract}")
    box = await Landlock(LandlockOptions(readable=(str(secret),))).open(LIMITS)
    try:
        result = await python(box, ATTEMPTS, str(secret), abstract, str(os.getpid()))
    finally:
        await box.close()
        server.close()
    assert result.stdout == b"given\n", result
    after = secret.stat()
    assert (after.st_mode, after.st_mtime_ns, secret.read_text()) == (before.st_mode, before.st_mtime_ns, "given")


async def test_boxes_reach_nothing_of_each_other(box: OpenBox) -> None:
    other = await Landlock().open(LIMITS)
    try:
        await other.write("secret", b"secret")
        where = (await python(other, "import os; print(os.path.abspath('secret'))")).stdout.decode().strip()
        result = await python(box, f"open({where!r})")
        assert result.end is ProgramEnd.EXIT and b"PermissionError" in result.stderr
        assert (await python(other, f"print(open({where!r}).read())")).stdout == b"secret\n"
    finally:
        await other.close()


@pytest.mark.parametrize("program", [MANY, SEVERAL, IN_MEMORY, DEEP], ids=["many", "nameless", "in memory", "deep"])
async def test_files_of_any_kind_end_a_program_where_they_are_too_much(program: str) -> None:
    box = await Landlock().open(LIMITS)
    result = await python(box, program)
    await box.close()
    assert result.end is ProgramEnd.DISK, result
    await until(lambda: not Path(box._folder).exists())  # type: ignore[attr-defined]


async def test_processes_that_hide_end_with_their_program(box: OpenBox) -> None:
    before = set(descendants(os.getpid()))
    result = await python(box, SCATTERS)
    assert (result.end, result.stdout) == (ProgramEnd.OK, b"scattered\n"), result
    assert set(descendants(os.getpid())) <= before


def test_a_program_ends_with_its_caller() -> None:
    script = (
        "import asyncio, sys\nfrom relax_core.api import SandboxLimits\nfrom relax_plugin_sandboxes.landlock import Landlock\n"
        "async def main():\n box = await Landlock().open(SandboxLimits(wall_s=120))\n print(box._work, flush=True)\n"
        " await box.run([box.python, '-c', 'import time; open(\"here\", \"w\"); time.sleep(100)'], b'', {}, 0.0, False)\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        work = Path(asking.stdout.readline().strip())
        asyncio.run(until((work / "here").exists))
        below = [pid for pid in descendants(asking.pid) if pid != asking.pid]
        assert len(below) >= 2
        asking.kill()
    asyncio.run(until(lambda: not any(Path("/proc", str(pid)).exists() for pid in below)))
    subprocess.run(["rm", "-rf", str(work.parent)], check=True)


async def test_a_killed_watcher_is_an_error_of_the_infrastructure(box: OpenBox) -> None:
    running = asyncio.ensure_future(python(box, "import time; open('here', 'w'); time.sleep(60)"))
    where = Path(box._work, "here")  # type: ignore[attr-defined]
    await until(where.exists)
    os.kill(next(filter(watches, descendants(os.getpid()))), signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="was killed"):
        await running


async def test_the_probe_names_the_actions_that_succeeded() -> None:
    with pytest.raises(InfrastructureError, match="could read a file of yours"):
        await Landlock(LandlockOptions(readable=("/tmp",))).probe()


@pytest.mark.parametrize(
    ("abi", "told"),
    [
        (lambda: 5, r"has Landlock version 5; the sandbox needs version 6 \(Linux 6\.12\)"),
        (lambda: raised(errno.EOPNOTSUPP), "the kernel has no Landlock: .*not supported.*lsm="),
        (lambda: raised(errno.ENOSYS), "the kernel has no Landlock: .*not implemented"),
    ],
)
async def test_a_kernel_without_it_is_refused_by_name(
    abi: Callable[[], int], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confine, "landlock_abi", abi)
    with pytest.raises(InfrastructureError, match=f"sandbox landlock: .*{told}"):
        await Landlock().probe()


async def test_a_machine_without_a_filter_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        InfrastructureError,
        match="this machine is riscv64, but the system call filter supports only x86_64 and aarch64",
    ):
        await Landlock().probe()


@pytest.mark.parametrize("machine", confine.MACHINES)
def test_the_filter_refuses_the_same_on_every_machine(machine: str) -> None:
    column, architecture, _ = confine.MACHINES[machine]
    refuses, unknown = confine.REFUSES | errno.EPERM, confine.REFUSES | errno.ENOSYS

    def answer(number: int, *args: int) -> int:
        return filtered(confine.instructions(machine), architecture, number, args)

    for name, numbers in confine.REFUSED.items():
        assert numbers[column] < 0 or answer(numbers[column]) == refuses, name
    read, openat = ((0, 257), (63, 56))[column]
    assert answer(read) == answer(openat) == confine.ALLOWED
    assert answer(confine.CLONE[column], 0x1200011) == confine.ALLOWED  # as fork does
    assert answer(confine.CLONE[column], 0x10000011) == refuses
    assert answer(confine.CLONE3[column]) == answer(confine.LAST_CALL + 1) == answer(0x40000001) == unknown
    assert [answer(confine.PRLIMIT64[column], pid) for pid in (0, 1)] == [confine.ALLOWED, refuses]
    pairs = [(1, 1), (1, 5 | 0o2000000), (1, 2), (2, 1)]
    assert [answer(confine.SOCKETPAIR[column], *pair) for pair in pairs] == [confine.ALLOWED] * 2 + [refuses] * 2
    requests = (0x5401, *confine.SET_FILE_FLAGS)
    assert [answer(confine.IOCTL[column], 0, request) for request in requests] == [confine.ALLOWED, refuses, refuses]
    assert (
        filtered(confine.instructions(machine), 0x40000003, read, ()) == confine.ENDS
    )  # 32-bit calls have other numbers


def filtered(code: list[tuple[int, int, int, int]], architecture: int, number: int, args: tuple[int, ...]) -> int:
    """Run a filter as the kernel would."""
    at, value = 0, 0
    while True:
        what, true, false, operand = code[at]
        at += 1
        if what == confine.RETURN:
            return operand
        if what == confine.LOAD:
            place = (operand - 16) // 8
            value = {0: number, 4: architecture}.get(operand, args[place] if 0 <= place < len(args) else 0)
        elif what == confine.AND:
            value &= operand
        else:
            held = {
                confine.EQUAL: value == operand,
                confine.GREATER: value > operand,
                confine.SET: bool(value & operand),
            }
            at += true if held[what] else false


def watches(pid: int) -> bool:
    with suppress(OSError):  # it ended meanwhile
        return b"confine.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def raised(number: int) -> int:
    raise confine.Refused(number, os.strerror(number))


async def until(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
