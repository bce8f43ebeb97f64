# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of sandboxes: limits, results of programs, and removal of everything in a closed box.

If a sandbox declares `isolates`, its programs must neither see the user's data and processes nor reach a network.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

import pytest

from relax_core.api.errors import InfrastructureError
from relax_core.api.sandbox import Box, ProgramEnd, ProgramResult, SandboxLimits
from relax_core.testing.direct_sandbox import DirectSandbox
from relax_core.testing.suite import Suite

LIMITS = SandboxLimits(wall_s=20.0, memory_mb=256, pids=24, disk_mb=8, output_kb=64)
LOOK = """
import os
def reads(path):
    try:
        return (os.listdir if os.path.isdir(path) else open)(path) is not None
    except OSError:
        return False
pids = [name for name in os.listdir("/proc") if name.isdigit()] if reads("/proc") else []
found = dict(os.environ)
for pid in pids:
    try:
        found[pid] = open("/proc/" + pid + "/environ").read()
    except OSError:
        pass
places = {0!r}, {0!r} + "/secret", "/etc/passwd", {1!r}, "/sys/kernel"
print(*map(reads, places), "SECRET_TOKEN" in str(found), len(pids) > 5, *map(os.path.exists, places))
"""
"""Program that prints True or False for each attempt: read a folder and a file of the user, a file of the system, a
process of the user, settings of the kernel; find a secret in the environment; see more than five processes. Then it
prints whether each of the five paths exists."""
TALK = """
import os, socket
with socket.socket(socket.AF_UNIX) as talk:
    talk.connect(os.environ["RELAX_SOCKET"])
    talk.sendall(b"hello")
    print(talk.recv(100).decode())
"""
CHANGE = """
import os
path = os.environ["RELAX_SOCKET"]
for change in (lambda: os.chmod(path, 0o777), lambda: os.unlink(path), lambda: os.rename(path, path + "x")):
    try:
        change()
        print("changed")
    except OSError:
        pass
print(os.listdir(os.path.dirname(path)))
"""
T = TypeVar("T")
PROGRAMS = {
    "exit": ("import sys; sys.exit(3)", ProgramEnd.EXIT),
    "signal": ("import os; os.kill(os.getpid(), 11)", ProgramEnd.SIGNAL),
    "output": ("while True: print('x' * 1000)", ProgramEnd.OUTPUT),
    "output of two streams": ("import sys\nwhile True: print('x'); print('y', file=sys.stderr)", ProgramEnd.OUTPUT),
    "disk": ("open('big', 'wb').write(bytes(1 << 25))", ProgramEnd.DISK),
}
GREEDY = {
    # Without the pause, a busy machine would have tens of thousands of processes before the limit takes effect.
    "forks": "import os, time\nwhile True:\n os.fork()\n time.sleep(0.1)",
    # Small stacks, so that the limit on memory does not end it first.
    "threads": "import threading, time\nthreading.stack_size(1 << 16)\nfor _ in range(40):\n"
    " threading.Thread(target=time.sleep, args=(900,), daemon=True).start()\ntime.sleep(900)",
    "memory": "held = [bytearray(1 << 20) for _ in range(4096)]",
    "shared memory": "import mmap\nheld = [mmap.mmap(-1, 1 << 20) for _ in range(999)]\n"
    "for m in held: m.write(bytes(1 << 20))",
    "sleep": "import time; time.sleep(60)",
}


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test without a plugin of pytest; open the asynchronous contexts among its fixtures."""

    @wraps(test)
    def run(suite: Any, **fixtures: Any) -> None:
        async def scene() -> None:
            async with AsyncExitStack() as stack:
                for name, value in fixtures.items():
                    if isinstance(value, AbstractAsyncContextManager):
                        fixtures[name] = await stack.enter_async_context(value)
                await test(suite, **fixtures)

        asyncio.run(scene())

    return run


@asynccontextmanager
async def _listening() -> AsyncIterator[tuple[str, int]]:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read(100)).upper())
        await writer.drain()
        writer.close()

    with TemporaryDirectory(prefix="relax-") as folder:  # short, since the length of a socket's path is limited
        path = f"{folder}/socket"
        local = await asyncio.start_unix_server(shout, path)
        tcp = await asyncio.start_server(shout, "127.0.0.1", 0)
        yield path, tcp.sockets[0].getsockname()[1]
        local.close()
        tcp.close()


class SandboxSuite(Suite):
    """The suite of a sandbox; a subclass sets `component`."""

    kind = "sandbox"
    deadline_s: ClassVar[float] = 60.0

    @classmethod
    def exercise(cls, component: Any) -> Any:
        async def scene(box: Box) -> list[str]:
            result = await _python(box, "print(6 * 7)")
            return [result.end.value, result.stdout.decode()]

        return asyncio.run(_in_box(component, scene))

    @pytest.fixture(scope="class")
    @classmethod
    def probed(cls, seen: Any) -> None:
        """Run the sandbox's `probe` once, before any box is opened."""
        asyncio.run(cls.make().probe())

    @pytest.fixture
    def box(self, made: Any, probed: None) -> AbstractAsyncContextManager[Box]:
        """Return a box, which `in_loop` opens and closes."""
        return DirectSandbox(made, LIMITS).open()

    @pytest.fixture
    def listening(self) -> AbstractAsyncContextManager[tuple[str, int]]:
        """Return an echo in capital letters: the path of its Unix socket and its port on 127.0.0.1."""
        return _listening()

    @in_loop
    async def test_a_program_gets_its_input_and_its_output_is_returned(self, box: Box) -> None:
        result = await _python(box, "import sys; print(input()[::-1]); print('so', file=sys.stderr)", b"abc\nmore")
        assert (result.end, result.code, result.stdout, result.stderr) == (ProgramEnd.OK, 0, b"cba\n", b"so\n")
        assert 0.0 < result.seconds < LIMITS.wall_s

    @in_loop
    async def test_files_stay_for_the_next_program_of_the_box_alone(self, made: Any, box: Box) -> None:
        await box.write("data/in.txt", b"one")
        result = await _python(box, "open('out.txt', 'w').write(open('data/in.txt').read() * 2)")
        assert result.end is ProgramEnd.OK, result.stderr
        assert await box.read("out.txt") == b"oneone" and await box.read("out.txt", 3) == b"one"
        async with DirectSandbox(made, LIMITS).open() as other:
            with pytest.raises(ValueError, match="out"):
                await other.read("out.txt")

    @in_loop
    async def test_only_regular_files_of_the_box_are_reached(self, box: Box) -> None:
        made = "import os; os.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'folder'); os.mkfifo('pipe')"
        assert (await _python(box, made)).end is ProgramEnd.OK
        for path in ("/etc/passwd", "../x", "a/../../x", "", "link", "folder/passwd", "pipe", "folder"):
            with pytest.raises(ValueError):
                await box.read(path)
                pytest.fail(f"read {path!r}")
            with pytest.raises(ValueError):
                await box.write(path, b"x")
                pytest.fail(f"wrote {path!r}")

    @pytest.mark.parametrize("what", PROGRAMS)
    @in_loop
    async def test_the_end_of_a_program_is_reported(self, box: Box, what: str) -> None:
        program, end = PROGRAMS[what]
        result = await _python(box, program)
        assert result.end is end, result.stderr[-500:]
        assert len(result.stdout) + len(result.stderr) <= LIMITS.output_kb << 10

    @pytest.mark.parametrize("what", GREEDY)
    @in_loop
    async def test_a_greedy_program_ends_within_its_limits_and_the_box_continues(self, box: Box, what: str) -> None:
        # Only "sleep" may reach the time limit, also on a slow machine.
        result = await _python(box, GREEDY[what], wall_s=1.0 if what == "sleep" else 600.0)
        assert result.end not in (ProgramEnd.OK, ProgramEnd.OUTPUT), result.stderr[-500:]
        assert (result.end is ProgramEnd.WALL) == (what == "sleep")
        assert (await _python(box, "print(1)")).stdout == b"1\n"

    @in_loop
    async def test_a_program_that_reads_nothing_is_not_waited_for(self, box: Box) -> None:
        assert (await _python(box, "pass", bytes(1 << 22))).end is ProgramEnd.OK

    @in_loop
    async def test_no_more_is_written_to_a_box_than_it_holds(self, box: Box) -> None:
        with pytest.raises(InfrastructureError, match="big"):
            await box.write("big", bytes(1 << 25))

    @in_loop
    async def test_programs_run_side_by_side(self, box: Box) -> None:
        meet = "import os, time\nopen({0!r}, 'w').close()\nwhile not os.path.exists({1!r}): time.sleep(0.01)"
        results = await asyncio.gather(_python(box, meet.format("a", "b")), _python(box, meet.format("b", "a")))
        assert [result.end for result in results] == [ProgramEnd.OK] * 2

    @in_loop
    async def test_a_closed_box_ends_its_programs_and_takes_no_more(self, made: Any) -> None:
        box = await made.open(LIMITS)
        running = asyncio.ensure_future(box.run([box.python, "-c", "import time; time.sleep(60)"], b"", {}, 0.0, False))
        await asyncio.sleep(0.5)
        running.cancel()
        await box.close()
        await asyncio.gather(running, return_exceptions=True)
        with pytest.raises(InfrastructureError):
            await box.run(["/bin/true"], b"", {}, 0.0, False)

    @in_loop
    async def test_a_missing_program_is_reported(self, box: Box) -> None:
        result = await box.run(["/no/such/program"])
        assert result.end is ProgramEnd.EXIT and b"/no/such/program" in result.stderr

    @in_loop
    async def test_a_program_talks_over_the_socket_that_it_is_given(
        self, made: Any, listening: tuple[str, int]
    ) -> None:
        path, port = listening
        limits = replace(LIMITS, socket=path)
        if not made.gives_socket:
            return
        async with DirectSandbox(made, limits).open() as box:
            results = await asyncio.gather(*(_python(box, TALK, socket=True) for _ in range(3)))
            assert [result.stdout for result in results] == [b"HELLO\n"] * 3, results[0].stderr
            if made.isolates:
                assert await _error_of_loopback(box, port, socket=True) == b"refused"
            assert b"KeyError" in (await _python(box, TALK)).stderr, (
                "a program without socket=True must not get the socket"
            )
            result = await _python(box, "import os; print(os.environ['RELAX_SOCKET'])", socket=True)
            tried = f"import socket; socket.socket(socket.AF_UNIX).connect({result.stdout.decode().strip()!r})"
            assert (await _python(box, tried)).end is (ProgramEnd.EXIT if made.isolates else ProgramEnd.OK)

    @in_loop
    async def test_a_box_without_a_socket_gives_none(self, made: Any, box: Box) -> None:
        if not made.gives_socket:
            return
        with pytest.raises(ValueError, match="the box has none"):
            await _python(box, TALK, socket=True)

    @in_loop
    async def test_a_path_that_is_not_a_socket_is_refused(self, made: Any, tmp_path: Path) -> None:
        if not made.gives_socket:
            return
        for path in (tmp_path, tmp_path / "nothing"):
            with pytest.raises(ValueError, match="not a Unix socket"):
                await made.open(replace(LIMITS, socket=str(path)))

    # -- isolation -----------------------------------------------------------------------------------------------------

    @in_loop
    async def test_a_program_sees_no_files_processes_or_variables_of_the_user(
        self, made: Any, box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not made.isolates:
            return
        (tmp_path / "secret").write_text("secret")
        monkeypatch.setenv("SECRET_TOKEN", "secret")
        look = LOOK.format(str(tmp_path), f"/proc/{os.getpid()}/environ")
        result = await _python(box, look)
        seen = result.stdout.split() if made.hides_names else result.stdout.split()[:7]
        assert seen == [b"False"] * (12 if made.hides_names else 7), result

    @in_loop
    async def test_a_program_reaches_no_network(self, made: Any, box: Box) -> None:
        if not made.isolates:
            return
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert await _error_of_loopback(box, server.getsockname()[1]) in (b"refused", b"permitted")

    @in_loop
    async def test_a_program_changes_nothing_of_its_socket(self, made: Any, listening: tuple[str, int]) -> None:
        if not (made.isolates and made.gives_socket):
            return
        path, _ = listening
        before = os.stat(path).st_mode
        async with DirectSandbox(made, replace(LIMITS, socket=path)).open() as box:
            result = await _python(box, CHANGE, socket=True)
            assert b"changed" not in result.stdout and Path(path).parent.name.encode() not in result.stdout
            assert (await _python(box, TALK, socket=True)).stdout == b"HELLO\n"
        assert os.stat(path).st_mode == before

    @in_loop
    async def test_a_program_writes_nowhere_but_in_its_box(self, made: Any, box: Box) -> None:
        if not made.isolates:
            return
        tried = "import os\nfor at in ('/', '/usr', '/dev', '/proc', '/etc', os.path.dirname({0!r})):\n"
        tried += " try: open(at + '/x', 'w'); print(at)\n except OSError: pass\n"
        assert (await _python(box, tried.format(box.python))).stdout == b""

    @in_loop
    async def test_processes_left_by_a_program_end_with_it(self, made: Any, box: Box) -> None:
        if not made.isolates:
            return
        daemon = (
            "import os, time\nif not os.fork():\n os.setsid()\n if not os.fork():\n"
            "  time.sleep(0.3); open('late', 'w')\n"
        )
        assert (await _python(box, daemon)).end is ProgramEnd.OK
        await asyncio.sleep(0.8)
        with pytest.raises(ValueError, match="late"):
            await box.read("late")

    @in_loop
    async def test_a_program_makes_no_namespaces_of_its_own(self, made: Any, box: Box) -> None:
        if not made.isolates:
            return
        result = await box.run(["/usr/bin/unshare", "-Ur", "/bin/true"])
        assert result.end is ProgramEnd.EXIT, result


async def _python(
    box: Box, program: str, stdin: bytes = b"", wall_s: float = 0.0, socket: bool = False
) -> ProgramResult:
    return await box.run([box.python, "-I", "-S", "-c", program], stdin, wall_s=wall_s, socket=socket)


async def _error_of_loopback(box: Box, port: int, socket: bool = False) -> bytes:
    """Run a program that connects to a port of this machine; return the last word of the program's error text."""
    result = await _python(box, f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)", socket=socket)
    return result.stderr.split()[-1]


async def _in_box(component: Any, scene: Callable[[Box], Awaitable[T]]) -> T:
    async with DirectSandbox(component, LIMITS).open() as box:
        return await scene(box)
