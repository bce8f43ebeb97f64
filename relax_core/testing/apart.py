# SPDX-License-Identifier: Apache-2.0
"""Runs of a suite's exercise in a separate process, so that a blocking or crashing component fails only its suite.

The suite is sent to the process with cloudpickle over a pipe; classes from modules that the process cannot import are
sent by value. Processes are forked from fork servers, one per hash seed. If forking fails, a new interpreter is started.
These processes run `child.py`.
"""

from __future__ import annotations

import os
import pickle
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import cloudpickle

from relax_core.registry.handshake import find_module
from relax_core.runners.local.fork_server import ForkedProcess, ForkServer

START_S = 180.0
"""Seconds for imports, before the exercise's own deadline begins; heavy libraries load slowly on a busy machine."""
READY = b"\x00ready\n"


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
    modules = [name for name in suite.slow_modules if name in sys.modules]
    modules += [cls.__module__ for cls in suite.__mro__ if cls.__module__.startswith("relax_core.testing.")]
    child = _forked(modules, environ, path) or _started(environ)
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
    handle: int = field(init=False)
    """A pidfd, which never refers to a later process with the same id."""

    def __post_init__(self) -> None:
        self.handle = os.pidfd_open(self.pid)

    def end(self) -> None:
        """Kill the process and all processes that it started, and close the pipes."""
        with suppress(ProcessLookupError):  # the process and its children have ended already
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # a process that was just forked is not in its own process group yet
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        self.wait()
        for pipe in (self.stdin, self.stdout, self.stderr, self.handle):
            with suppress(OSError):
                os.close(pipe)


def _started(environ: Mapping[str, str]) -> ExerciseProcess:
    """Start a new interpreter."""
    given, pipes = _pipes()
    process = subprocess.Popen(
        [sys.executable, "-m", "relax_core.testing.child"], stdin=given[0], stdout=given[1], stderr=given[2], env=dict(environ),
        start_new_session=True,
    )  # fmt: skip
    for end in given:
        os.close(end)
    return ExerciseProcess(process.pid, *pipes, process.wait)


def _pipes() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Make pipes for stdin, stdout and stderr; return the child's ends and this process's ends."""
    (reads, to_child), (from_child, writes), (noise, complains) = os.pipe(), os.pipe(), os.pipe()
    return (reads, writes, complains), (to_child, from_child, noise)


def _forked(modules: list[str], environ: Mapping[str, str], path: list[str]) -> ExerciseProcess | None:
    """Fork a child that has imported these modules from the server of its hash seed; return None if that fails."""
    server = ForkServer.of(environ, ("exercises", environ["PYTHONHASHSEED"]))
    given, pipes = _pipes()
    pid = server.fork("relax_core.testing.child:exercise_forked", modules, environ, given, (path, os.getcwd())).result()
    if not pid:
        for end in pipes:
            os.close(end)
        return None
    process = ForkedProcess(server, pid)

    def wait() -> int:
        select.select([child.handle], [], [])
        return process.wait()

    child = ExerciseProcess(pid, *pipes, wait)
    return child


def _converse(child: ExerciseProcess, payload: bytes, deadline_s: float) -> Apart:
    with suppress(BrokenPipeError), os.fdopen(os.dup(child.stdin), "wb") as pipe:
        os.close(child.stdin)
        pipe.write(payload)
    started = _read_until_ready(child.stdout, time.monotonic() + START_S)
    if started is None:
        return Apart(error=f"the component's import did not end within {START_S:g} s", blocked=True)
    read = _read_to_end((child.stdout, child.stderr), time.monotonic() + deadline_s)
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


def _read_to_end(pipes: tuple[int, int], deadline: float) -> tuple[bytes, bytes] | None:
    """Read both pipes until all their writers have closed them; return None if the deadline passed."""
    got = {pipe: bytearray() for pipe in pipes}
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
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
    elif callable(suite.component):  # a check's function
        owners.add(suite.component.__module__)
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
