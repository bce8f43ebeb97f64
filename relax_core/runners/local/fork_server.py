# SPDX-License-Identifier: Apache-2.0
"""The fork server: a process that has imported slow modules once, and forks the children that need them.

A child of its own interpreter start imports torch and transformers for seconds, at the start of a run and whenever an engine
or a rank is replaced. `python -m relax_core.runners.local.fork_server FD` takes requests through the socket that is FD, and
ends with the process that started it. It never runs code of authors, and its children see no GPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, ClassVar, NoReturn, Self, cast

from relax_core.rpc import messages

NOT_AT_IMPORT = frozenset({"CUDA_VISIBLE_DEVICES", "MALLOC_ARENA_MAX", "PYTEST_CURRENT_TEST"})
"""Variables that no module reads while it is imported: a child has its own values of them."""
REQUEST_BYTES = 1 << 16
REQUEST_S = 120.0
"""For an answer: the first one comes when everything is imported."""
M_ARENA_MAX = -8
"""The name of malloc's number of arenas, which its variable sets only at the start of a process."""
UNKNOWN_STATUS = 255
"""Of a child whose server has died: it was somebody else's to know."""


class ForkedProcess:
    """A child of the server, with as much of `subprocess.Popen` as the parent of a worker needs."""

    def __init__(self, server: ForkServer, pid: int, stdin: BinaryIO) -> None:
        self._server, self.pid, self.stdin = server, pid, stdin
        self.returncode: int | None = None

    def wait(self) -> int:
        """Return the status of the process, which has ended, and free its number."""
        if self.returncode is None:
            self.returncode = _zombie_status(self.pid, self._server.pid)
            self._server.reap(self.pid)
        return self.returncode


class ForkServer:
    """The parent's side: `started -> (asked to fork)* -> ended`, with this process or by its own death.

    Invariants:
    - There is one for each environment; its children have that environment, but for NOT_AT_IMPORT.
    - It forks only while it has a single thread. Where it can't, or died, there is no child, and the caller starts one plainly.
    - A child's number stays its own until `reap`.
    """

    _running: ClassVar[dict[frozenset[tuple[str, str]], ForkServer]] = {}

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "relax_core.runners.local.fork_server", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=dict(environment), pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )  # fmt: skip
        self._line.settimeout(REQUEST_S)
        self._asking = ThreadPoolExecutor(1, "fork server")  # one request after another, beside the event loop
        self.pid = self._process.pid

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Return the running server of this environment; start it where there is none."""
        key = frozenset((name, value) for name, value in environment.items() if name not in NOT_AT_IMPORT)
        server = cls._running.get(key)
        if server is None or server._process.poll() is not None:
            server = cls._running[key] = cls(environment)
        return cast(Self, server)

    async def fork(
        self, preload: Sequence[str], environment: Mapping[str, str], output: int | None, channel: int
    ) -> ForkedProcess | None:
        """Fork a child worker that has these modules. It inherits `channel`, and writes to `output`, or where this process
        does. None: it can't be forked."""
        own = {name: environment[name] for name in NOT_AT_IMPORT & environment.keys()}
        request = messages.encode({"preload": list(preload), "environment": own})
        reads, writes = os.pipe()
        outputs = (1, 2) if output is None else (output, output)
        given = [os.dup(number) for number in (reads, *outputs, channel)]  # the request may outlive its caller
        os.close(reads)
        stdin = os.fdopen(writes, "wb", 0)
        asked = asyncio.get_running_loop().run_in_executor(self._asking, self._ask, request, given)
        try:
            pid = await asyncio.shield(asked)
        except asyncio.CancelledError:
            stdin.close()  # which ends the child
            asked.add_done_callback(self._reap_unwanted)
            raise
        if not pid:
            stdin.close()
            return None
        return ForkedProcess(self, pid, stdin)

    def _ask(self, request: bytes, given: Sequence[int]) -> int:
        try:
            socket.send_fds(self._line, [request], given)
            answer = self._line.recv(REQUEST_BYTES)
            return int(messages.decode(answer)) if answer else 0
        except OSError:  # it has died, or hangs in an import
            self._process.kill()
            self._process.wait()
            return 0
        finally:
            for number in given:
                os.close(number)

    def _reap_unwanted(self, asked: asyncio.Future[int]) -> None:
        if pid := asked.result():
            self.reap(pid)

    def reap(self, pid: int) -> None:
        """Let the server wait for a child that has ended, or is about to."""
        with contextlib.suppress(OSError):
            self._line.send(messages.encode(pid))


def _zombie_status(pid: int, parent: int) -> int:
    """Read the exit status of a process that has ended and was not waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return UNKNOWN_STATUS
    return os.waitstatus_to_exitcode(int(fields[-1])) if int(fields[1]) == parent else UNKNOWN_STATUS


# -- the server ---------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer requests until the parent is gone."""
    line = socket.socket(fileno=int(sys.argv[1]))
    for sent in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
    ):  # the parent decides when this process ends
        signal.signal(sent, signal.SIG_IGN)
    while True:
        data, given, _, _ = socket.recv_fds(line, REQUEST_BYTES, 4)
        if not data:
            os._exit(0)
        request = messages.decode(data)
        if isinstance(request, int):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(request, 0)
            continue
        pid = 0
        if _imported(request["preload"]) and len(os.listdir("/proc/self/task")) == 1:
            gc.freeze()  # what is collected never would be shared no longer
            pid = os.fork()
            if pid == 0:
                _become_child(line, given, request["environment"])
        for number in given:
            os.close(number)
        line.send(messages.encode(pid))


def _imported(modules: Sequence[str]) -> bool:
    """Import what is missing; False where it can't be: a child that is started plainly tells why."""
    try:
        for name in modules:
            importlib.import_module(name)
    except Exception:
        return False
    return True


def _become_child(line: socket.socket, given: Sequence[int], environment: Mapping[str, str]) -> NoReturn:
    """Be a child worker, as one that was started plainly: its descriptors, its session, its random numbers."""
    try:
        line.close()
        os.setsid()
        stdin, output, errors, channel = given
        for number, own in ((stdin, 0), (output, 1), (errors, 2)):
            os.dup2(number, own)
            os.close(number)
        for name in NOT_AT_IMPORT:
            os.environ.pop(name, None)
        os.environ.update(environment)
        if arenas := environment.get("MALLOC_ARENA_MAX"):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, int(arenas))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        from relax_core.runners.local.child import serve

        serve(socket.socket(fileno=channel))
    except BaseException:
        sys.excepthook(*cast(tuple[type[BaseException], BaseException, None], sys.exc_info()))
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
