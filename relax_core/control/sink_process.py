# SPDX-License-Identifier: Apache-2.0
"""The child process in which a run's sinks work.

The packages of sinks compute in Python. In the controller's process they would hold up the roles that run there. In a
process of its own, with a lower priority, a sink uses only what the run leaves free, and a crash of its package does not
end the run. The child ends with the controller.

`python -m relax_core.control.sink_process FD ...` is the child. It serves one sink on each socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from relax_core.api.component import Chosen
from relax_core.api.errors import InfrastructureError
from relax_core.api.events import Sink, Span
from relax_core.api.options import Options
from relax_core.observe.process_log import send_to_parent
from relax_core.observe.redaction import Redactor
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc import messages
from relax_core.rpc.host import Failure, describe, raised
from relax_core.runners.local.child_log import ChildLog

NAME = "sinks"
"""Name of the process in the run's logs."""
NICENESS = 5
"""Priority of the child; Linux may group processes by session, and then has a priority for each group."""
END_S = 5.0
"""Seconds that the child has to end by itself. A sink whose call hangs is killed then."""


@contextlib.contextmanager
def sinks_apart(
    chosen: Sequence[Chosen],
    catalogue: Catalogue,
    plugin_files: Sequence[str],
    logs: Path,
    redactor: Redactor,
    run: str,
) -> Iterator[dict[str, Sink]]:
    """Start the child, and yield stand-ins of the sinks by name, which raise what the sinks raise.

    Does not wait for the child. After the body, the child has END_S for what packages do at the end of a program. `run`:
    the run's name in the logs.
    """
    if not chosen:
        yield {}
        return
    log = ChildLog(logs / f"{NAME}.log", redactor, {"run": run})
    pairs = [socket.socketpair() for _ in chosen]
    descriptors = [theirs.fileno() for _, theirs in pairs]
    modules = ("relax_core.runners.local.parent_death", "relax_core.control.sink_process")
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", *modules, *map(str, descriptors)],
            stdin=subprocess.PIPE, stdout=log.writes, stderr=log.writes, pass_fds=descriptors, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(log.writes)
        for _, theirs in pairs:
            theirs.close()
    log.started(child.pid)
    try:
        yield {
            sink.name: _stand_in(sink, catalogue, plugin_files, line)
            for sink, (line, _) in zip(chosen, pairs, strict=True)
        }
    finally:
        for line, _ in pairs:
            with contextlib.suppress(OSError):  # the child has ended
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        with child, contextlib.suppress(subprocess.TimeoutExpired):  # the end of `with` closes its standard input
            child.wait(END_S)
        log.join(END_S)


def _stand_in(chosen: Chosen, catalogue: Catalogue, plugin_files: Sequence[str], line: socket.socket) -> Sink:
    connection = Connection(os.dup(line.fileno()))
    with contextlib.suppress(OSError):  # the child has ended, which the first call reports
        connection.send_bytes(messages.encode((chosen, tuple(plugin_files))))
    target: Any = catalogue.target(chosen.kind, chosen.name)
    return (_StandIn if target.spans is Sink.spans else _StandInWithSpans)(chosen.name, connection)


class _StandIn(Sink[Options]):
    """Passes the calls to the sink in the child, and waits for their end."""

    def __init__(self, name: str, line: Connection) -> None:
        super().__init__()
        self._name, self._line = name, line

    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        self._call("open", run_dir, name, config)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._call("metrics", step, values)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._call("samples", step, samples)

    def rewind(self, step: int, last: int) -> None:
        self._call("rewind", step, last)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            self._line.send_bytes(messages.encode((method, messages.PlainData(arguments))))
            failure = messages.decode(self._line.recv_bytes())
        except (EOFError, OSError):
            raise InfrastructureError(f"the process of the sinks has ended; its log is logs/{NAME}.log") from None
        if isinstance(failure, Failure):
            error = raised(failure, f"sink {self._name}")
            error.add_note(failure.frames)
            raise error


class _StandInWithSpans(_StandIn):
    """A stand-in for a sink that has `spans`. The recorder computes spans only for such sinks."""

    def spans(self, step: int, spans: Sequence[Span]) -> None:
        self._call("spans", step, spans)


def main() -> None:
    """Build the sinks, and serve each in a thread of its own until the controller closes its line."""
    send_to_parent()
    lower_priority()
    threads = []
    for descriptor in map(int, sys.argv[1:]):
        line = Connection(descriptor)
        chosen, plugin_files = messages.decode(line.recv_bytes())
        threads.append(
            threading.Thread(target=_serve, args=(line, _built(chosen, plugin_files)), name=f"relax-{chosen.name}")
        )
    for thread in threads:
        thread.start()
    for thread in threads:  # after the main thread has ended, Python starts no threads of executors
        thread.join()


def lower_priority() -> None:
    """Let this process use only the processors that the run leaves free."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a kernel without such groups
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def _built(chosen: Chosen, plugin_files: Sequence[str]) -> Sink | Failure:
    """Build a sink. Its check imports its package here, since packages that several threads import may see each other half."""
    try:
        sink = Catalogue.load(plugin_files).build(chosen, Sink)
        sink.check()
        return sink
    except Exception as error:
        return describe(error)


def _serve(line: Connection, sink: Sink | Failure) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, arguments = messages.decode(line.recv_bytes())
            failure = sink if isinstance(sink, Failure) else _failure(getattr(sink, method), arguments.value)
            line.send_bytes(messages.encode(failure))


def _failure(call: Callable[..., None], arguments: Sequence[Any]) -> Failure | None:
    try:
        call(*arguments)
    except BaseException as error:  # a SystemExit of a package is a failure of the call
        return describe(error)
    return None


if __name__ == "__main__":
    main()
