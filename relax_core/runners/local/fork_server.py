# SPDX-License-Identifier: Apache-2.0
"""The fork server: a process that imports slow modules once and forks the children that need them.

A newly started interpreter needs seconds to import torch and transformers, at the start of a run and for each replaced
engine or rank. `python -m relax_core.runners.local.fork_server FD` takes requests on the socket with file descriptor
FD, and ends with the process that started it. It never runs code of authors; only its children do. CUDA does not
survive a fork, so children of a server that has imported torch see no GPU. Workers and the processes of the conformance
kit are such children.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NoReturn, Self, cast

from relax_core.rpc import messages

NOT_AT_IMPORT = frozenset({"CUDA_VISIBLE_DEVICES", "MALLOC_ARENA_MAX", "PYTEST_CURRENT_TEST"})
"""Environment variables that no module reads at import, so that children of one server may have different values."""
REQUEST_BYTES = 1 << 16
MAX_DESCRIPTORS = 8
REQUEST_S = 120.0
"""Longest wait for an answer. The first answer comes after all imports."""
M_ARENA_MAX = -8
"""malloc's parameter for the number of arenas. MALLOC_ARENA_MAX sets it only at the start of a process."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that the server ignores, and a child until it sets its own handlers: the parent decides when they end."""
UNKNOWN_STATUS = 255
"""Exit status reported for a child if its server has died, since the real status is lost."""


class ForkedProcess:
    """A child of the server, with the part of `subprocess.Popen` that its parent needs."""

    def __init__(self, server: ForkServer, pid: int, stdin: BinaryIO | None = None) -> None:
        self._server, self.pid, self.stdin = server, pid, stdin
        self.returncode: int | None = None

    def wait(self) -> int:
        """Return the exit status of the ended process, and release its process id."""
        if self.returncode is None:
            self.returncode = _zombie_status(self.pid, self._server.pid)
            self._server.reap(self.pid)
        return self.returncode


class ForkServer:
    """The parent's handle on a fork server: `started -> fork* -> ended`. The server ends with this process.

    Invariants:
    - There is one server for each key. A child gets the environment of its request.
    - The server forks only while it has a single thread. If it can't fork or has died, the caller starts a new
      interpreter.
    - A child's process id is not reused until `reap`.
    """

    _running: ClassVar[dict[Hashable, ForkServer]] = {}

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "relax_core.runners.local.fork_server", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=dict(environment), pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )  # fmt: skip
        self._line.settimeout(REQUEST_S)
        self._one_request = threading.Lock()
        self.pid = self._process.pid
        atexit.register(self._process.kill)  # the server may still import

    @classmethod
    def of(cls, environment: Mapping[str, str], key: Hashable = None) -> Self:
        """Return the running server of `key`, or start one.

        `key`: by default, the environment without the variables in NOT_AT_IMPORT.
        """
        if key is None:
            key = frozenset((name, value) for name, value in environment.items() if name not in NOT_AT_IMPORT)
        server = cls._running.get(key)
        if server is None or server._process.poll() is not None:
            server = cls._running[key] = cls(environment)
        return cast(Self, server)

    def fork(
        self, entry: str, preload: Sequence[str], environment: Mapping[str, str], given: Sequence[int],
        arguments: Sequence[Any] = (),
    ) -> Future[int]:  # fmt: skip
        """Fork a child with modules imported that calls `entry`, a `module:function`.

        `given`: descriptors of stdin, stdout and stderr, and further descriptors, whose numbers in the child precede
        `arguments` in the call. They are closed in this process. The result is the process id, or 0 if the server
        can't fork.
        """
        changed = {name: environment.get(name) for name, _ in environment.items() ^ self._environment.items()}
        request = {"entry": entry, "preload": list(preload), "environment": changed, "arguments": list(arguments)}
        pid: Future[int] = Future()
        asking = (pid, messages.encode(request), given)
        threading.Thread(target=self._ask, args=asking, daemon=True).start()  # no exit waits for the server's imports
        return pid

    async def fork_worker(
        self, preload: Sequence[str], environment: Mapping[str, str], output: int | None, channel: int
    ) -> ForkedProcess | None:
        """Fork a child worker with these modules imported; return None if it can't be forked.

        The child inherits the descriptor `channel`. It writes to `output`, or for None to the outputs of this process.
        """
        reads, writes = os.pipe()
        outputs = (1, 2) if output is None else (output, output)
        given = [os.dup(number) for number in (reads, *outputs, channel)]  # the request may outlive its caller
        os.close(reads)
        stdin = os.fdopen(writes, "wb", 0)
        asked = asyncio.wrap_future(self.fork("relax_core.runners.local.child:serve", preload, environment, given))
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

    def _ask(self, pid: Future[int], request: bytes, given: Sequence[int]) -> None:
        forked = 0
        try:
            with self._one_request:
                socket.send_fds(self._line, [request], given)
                answer = self._line.recv(REQUEST_BYTES)
            forked = int(messages.decode(answer)) if answer else 0
        except OSError:  # the server has died or hangs in an import
            self._process.kill()
            self._process.wait()
        finally:
            for number in given:
                os.close(number)
            pid.set_result(forked)

    def _reap_unwanted(self, asked: asyncio.Future[int]) -> None:
        if pid := asked.result():
            self.reap(pid)

    def reap(self, pid: int) -> None:
        """Let the server wait for a child that has ended or is about to end, which frees the process id."""
        with contextlib.suppress(OSError):
            self._line.send(messages.encode(pid))


def _zombie_status(pid: int, parent: int) -> int:
    """Read the exit status of a zombie process; return UNKNOWN_STATUS if it is gone or has a different parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return UNKNOWN_STATUS
    return os.waitstatus_to_exitcode(int(fields[-1])) if int(fields[1]) == parent else UNKNOWN_STATUS


# -- the server ---------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer requests until the parent has ended."""
    line = socket.socket(fileno=int(sys.argv[1]))
    for sent in IGNORED:
        signal.signal(sent, signal.SIG_IGN)
    while True:
        data, given, _, _ = socket.recv_fds(line, REQUEST_BYTES, MAX_DESCRIPTORS)
        if not data:
            os._exit(0)
        request = messages.decode(data)
        if isinstance(request, int):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(request, 0)
            continue
        pid = 0
        modules = [*request["preload"], request["entry"].partition(":")[0]]
        if _imported(modules) and len(os.listdir("/proc/self/task")) == 1:
            gc.freeze()  # garbage collection would write to the pages that parent and child share
            pid = os.fork()
            if pid == 0:
                line.close()
                _become_child(given, request["environment"], request["entry"], request["arguments"])
        for number in given:
            os.close(number)
        try:
            line.send(messages.encode(pid))
        except OSError:  # the parent ended during the imports
            os._exit(0)


def _imported(modules: Sequence[str]) -> bool:
    """Import the modules; return False on a failure. The interpreter started in place of a fork will log the reason."""
    try:
        for name in modules:
            importlib.import_module(name)
    except Exception:
        return False
    return True


def _become_child(
    given: Sequence[int], environment: Mapping[str, str | None], entry: str, arguments: Sequence[Any]
) -> NoReturn:
    """Become a child with descriptors, session, environment and random state of its own, and call its entry."""
    status = 1
    try:
        os.setsid()
        for own, number in enumerate(given[:3]):
            os.dup2(number, own)
            os.close(number)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if arenas := environment.get("MALLOC_ARENA_MAX"):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, int(arenas))
        tempfile.tempdir = None  # looked up anew in this environment
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        module, _, function = entry.partition(":")
        getattr(sys.modules[module], function)(*given[3:], *arguments)
        status = 0
    except BaseException:
        sys.excepthook(*cast(tuple[type[BaseException], BaseException, None], sys.exc_info()))
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
