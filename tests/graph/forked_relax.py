# SPDX-License-Identifier: Apache-2.0
"""`relax` processes that are forked from a fork server, which has imported the core, torch and transformers.

A `relax` process that starts as an interpreter spends 1 s on imports, and 3.5 s more for torch and transformers: in the same
process for the inline runner, in its fork server for the local runner. A forked process has both: it makes its workers' fork
server from itself, too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from relax_core import __main__ as relax
from relax_core.runners.local import fork_server
from relax_core.runners.local.fork_server import ForkedProcess, ForkServer

ROOT = Path(__file__).resolve().parent.parent.parent
PRELOAD = (
    "relax_core.cli.main", "relax_core.cli.runs", "relax_core.control.run", "relax_core.control.prepare",
    "relax_plugin_torch.rank", "relax_plugin_transformers.decoder", "relax_plugin_transformers.weights",
    "transformers.modeling_utils", "transformers.masking_utils",
)  # fmt: skip
SERVER = "relax"
"""Key of the fork server."""
OF_WORKERS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables that the local runner gives to each worker."""


class RelaxProcess:
    """A forked process with the part of `subprocess.Popen` that the tests use."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process, self.pid = process, process.pid
        self._handle = os.pidfd_open(process.pid)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ended, _, _ = select.select([self._handle], [], [], timeout)
            if not ended:
                raise subprocess.TimeoutExpired("relax", timeout or 0)
            self._process.wait()
            os.close(self._handle)
        return self._process.wait()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_relax(
    arguments: Sequence[str], directory: Path, environment: Mapping[str, str], out: int, err: int
) -> RelaxProcess:
    """Fork a process that runs `relax` in a directory, as the leader of a session. `out`, `err`: its stdout and stderr."""
    is_first = SERVER not in ForkServer._running
    with contextlib.chdir(ROOT):
        server = ForkServer.of(environment, SERVER)
    if is_first:
        for key in ("ranks", _key_of_workers()):  # the ranks of `TrainerRanks`, and workers that this process starts
            ForkServer._running.setdefault(key, server)
    given = [os.open(os.devnull, os.O_RDONLY), os.dup(out), os.dup(err)]
    asked = server.fork("tests.graph.forked_relax:run", PRELOAD, environment, given, (str(directory), *arguments))
    pid = asked.result()
    assert pid, "the fork server of the tests could not fork"
    return RelaxProcess(ForkedProcess(server, pid))


def _key_of_workers() -> Hashable:
    """Return the key under which the local runner looks for the fork server of its workers."""
    given = {**os.environ, **OF_WORKERS}
    return frozenset((name, value) for name, value in given.items() if name not in fork_server.NOT_AT_IMPORT)


# -- the forked process -------------------------------------------------------------------------------------------------


def run(directory: str, *arguments: str) -> None:
    """Run `relax` as a new interpreter does, and end the process."""
    for number in fork_server.IGNORED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(directory)
    sys.path[0] = directory
    sys.argv = [str(relax.__file__), *arguments]
    if not any(word.removeprefix("run.runner=") == "inline" for word in arguments):
        ForkServer._running[_key_of_workers()] = WarmServer({**os.environ, **OF_WORKERS})
    code = 0
    try:
        relax.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class WarmServer(ForkServer):
    """A fork server that is forked from this process, with its modules, while the process has one thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._line.close()
            self._serve(theirs)
        theirs.close()
        self._line.settimeout(fork_server.REQUEST_S)
        self._one_request = threading.Lock()
        process = Forked(self.pid)
        self._process = process  # type: ignore[assignment]
        atexit.register(process.end)

    def _serve(self, line: socket.socket) -> None:
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ.clear()
            os.environ.update(self._environment)
            atexit._clear()
            sys.argv = ["fork_server", str(line.detach())]
            fork_server.main()
        finally:
            os._exit(1)


class Forked:
    """A child of this process, with the part of `subprocess.Popen` that a fork server's handle uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, and wait for its end: tests refuse processes that outlive the run."""
        self.kill()
        self.wait()
