# SPDX-License-Identifier: Apache-2.0
"""Runs of a suite's exercise in a separate process, so that a blocking or crashing component fails only its suite.

The suite is sent to the process with cloudpickle over a pipe; classes from modules that the process cannot import are
sent by value. Processes are forked from servers, one per hash seed. A server has imported slow modules and never runs a
plugin's code. If forking fails, a new interpreter is started. These processes run `child.py`.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Self

import cloudpickle

from relax_core.registry.handshake import find_module

START_S = 180.0
"""Seconds for imports, before the exercise's own deadline begins; heavy libraries load slowly on a busy machine."""
READY = b"\x00ready\n"
MODULE = "relax_core.testing.child"
SLOW_MODULES = ("numpy", "sympy", "math_verify", "torch", "transformers", "transformers.modeling_utils")
"""Modules that a server imports if the process of the tests has imported them too."""


@dataclass(frozen=True, slots=True)
class Apart:
    """The result of an exercise: its value, or an error."""

    value: Any = None
    error: str = ""
    raised: bool = False
    """True if the component raised an exception; the suite's samples may not suit the component."""
    blocked: bool = False
    """True if the exercise, or its imports, missed the deadline."""


def run_apart(suite: type[Any], hash_seed: int, deadline_s: float) -> Apart:
    """Run `suite.exercise` on a new instance in another process with this hash seed."""
    path = [entry for entry in sys.path if entry]
    environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(path)}
    modules = [name for name in SLOW_MODULES if name in sys.modules]
    modules += [cls.__module__ for cls in suite.__mro__ if cls.__module__.startswith("relax_core.testing.")]
    child = Server.of(environ).fork(modules, environ, path) or _started(environ)
    try:
        return _converse(child, _packed(suite), deadline_s)
    finally:
        child.end()


@dataclass
class ExerciseProcess:
    """A process that runs an exercise, in a process group of its own, and the process's pipes."""

    pid: int
    stdin: int
    stdout: int
    stderr: int
    wait: Callable[[], int]
    """Wait for the end of the process; return its exit code, or the negative number of the signal that ended it."""

    def end(self) -> None:
        """Kill the process and all processes that it started, and close the pipes."""
        with suppress(ProcessLookupError):  # the process and its children have ended already
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        for pipe in (self.stdin, self.stdout, self.stderr):
            with suppress(OSError):
                os.close(pipe)


def _started(environ: Mapping[str, str]) -> ExerciseProcess:
    """Start a new interpreter."""
    given, pipes = _pipes()
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE], stdin=given[0], stdout=given[1], stderr=given[2], env=dict(environ),
        start_new_session=True,
    )  # fmt: skip
    for end in given:
        os.close(end)
    return ExerciseProcess(process.pid, *pipes, process.wait)


def _pipes() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Make pipes for stdin, stdout and stderr; return the child's ends and this process's ends."""
    (reads, to_child), (from_child, writes), (noise, complains) = os.pipe(), os.pipe(), os.pipe()
    return (reads, writes, complains), (to_child, from_child, noise)


class Server:
    """A client of a fork server: `started -> (fork -> exit code of the child)* -> ended` with this process.

    Invariants:
    - There is one server per hash seed. A child gets the environment, directory and path of the moment of its request.
    - A server has one child at a time and waits for its end.
    - A server that cannot fork, or has died, yields no child; the caller then starts a new interpreter.
    """

    _running: ClassVar[dict[str, Server]] = {}

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())], stdin=subprocess.DEVNULL, env=dict(environ),
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self._line.settimeout(START_S)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        """Return the running server of this hash seed; start one if necessary."""
        server = cls._running.get(environ["PYTHONHASHSEED"])
        if server is None or server._process.poll() is not None:
            server = cls._running[environ["PYTHONHASHSEED"]] = cls(environ)
        return server  # type: ignore[return-value]

    def fork(self, modules: list[str], environ: Mapping[str, str], path: list[str]) -> ExerciseProcess | None:
        """Fork a child that has imported these modules; return None if that fails."""
        given, pipes = _pipes()
        request = pickle.dumps((modules, dict(environ), path, os.getcwd()))
        try:
            socket.send_fds(self._line, [len(request).to_bytes(8)], given)
            self._line.sendall(request)
            pid = self._number()
        except OSError:  # the server has died, or hangs in an import
            self._process.kill()
            self._process.wait()
            pid = 0
        finally:
            for end in given:
                os.close(end)
        if not pid:
            for end in pipes:
                os.close(end)
            return None
        status: list[int] = []

        def wait() -> int:
            if not status:
                status.append(self._status())
            return status[0]

        return ExerciseProcess(pid, *pipes, wait)

    def _status(self) -> int:
        try:
            return self._number()
        except OSError:
            return -signal.SIGKILL

    def _number(self) -> int:
        got = b""
        while len(got) < 8:
            piece = self._line.recv(8 - len(got))
            if not piece:
                raise ConnectionError("the server has ended")
            got += piece
        return int.from_bytes(got, signed=True)


def serve(line: socket.socket) -> None:
    """Serve fork requests until the client's end of `line` closes, then exit; return only in the forked children."""
    while True:
        head, given, _, _ = socket.recv_fds(line, 8, 3)
        if len(head) < 8:
            os._exit(0)
        request = b""
        while len(request) < int.from_bytes(head):
            request += line.recv(1 << 20)
        modules, environ, path, folder = pickle.loads(request)
        pid = 0
        if _imported(modules) and len(os.listdir("/proc/self/task")) == 1:
            pid = os.fork()
            if pid == 0:
                break
        for end in given:
            os.close(end)
        line.sendall(pid.to_bytes(8, signed=True))
        if pid:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            line.sendall(status.to_bytes(8, signed=True))
    with suppress(PermissionError):
        os.setsid()
    line.close()
    for number, end in enumerate(given):
        os.dup2(end, number)
        os.close(end)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    os.chdir(folder)


def _imported(modules: list[str]) -> bool:
    try:
        for name in modules:
            __import__(name)
    except Exception:  # a new interpreter will report the error
        return False
    return True


def _converse(child: ExerciseProcess, payload: bytes, deadline_s: float) -> Apart:
    with suppress(BrokenPipeError), os.fdopen(os.dup(child.stdin), "wb") as pipe:
        os.close(child.stdin)
        pipe.write(payload)
    started = _read_until_ready(child.stdout, time.monotonic() + START_S)
    if started is None:
        return Apart(error=f"the component's import did not end within {START_S:g} s", blocked=True)
    read = _read_to_end((child.stdout, child.stderr), time.monotonic() + deadline_s if started else None)
    if read is None:
        return Apart(blocked=True)
    answer, noise = read
    if not answer:
        last = noise.decode(errors="replace").strip()[-1500:]
        return Apart(error=f"the component ended its process with exit code {child.wait()}\n{last}")
    value, error, raised = pickle.loads(answer)
    return Apart(value, error, raised)


def _read_until_ready(pipe: int, deadline: float) -> bool | None:
    """Return True once the child has imported its modules, False if it ended first, None if the deadline passed."""
    got = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while got != READY:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            piece = os.read(pipe, len(READY) - len(got))
            if not piece:
                return False
            got += piece
    return True


def _read_to_end(pipes: tuple[int, int], deadline: float | None) -> tuple[bytes, bytes] | None:
    """Read both pipes until all their writers have closed them; return None if the deadline passed."""
    got = {pipe: bytearray() for pipe in pipes}
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                got[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
    return bytes(got[pipes[0]]), bytes(got[pipes[1]])


def _packed(suite: type[Any]) -> bytes:
    owners = {suite.__module__}
    if isinstance(suite.component, type):
        owners |= {cls.__module__ for cls in suite.component.__mro__}
    with _by_value([module for name in owners if (module := sys.modules.get(name))]):
        return bytes(cloudpickle.dumps(suite))


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    """Pickle the definitions of these modules by value if a new interpreter could not import the module."""
    strangers = [module for module in modules if not _importable(module)]
    for module in strangers:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in strangers:
            cloudpickle.unregister_pickle_by_value(module)


def _importable(module: ModuleType) -> bool:
    spec = None if module.__name__ == "__main__" else find_module(module.__name__)
    return spec is not None and spec.origin == getattr(module, "__file__", spec.origin)
