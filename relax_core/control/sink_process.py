# SPDX-License-Identifier: Apache-2.0
"""The child process in which a run's sinks work.

The packages of sinks compute in Python. In the controller's process they would hold up the roles that run there. In a
process of its own, with a lower priority, a sink uses only what the run leaves free, and a crash of its package does not
end the run. The child ends with the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

from relax_core.api.component import Chosen
from relax_core.api.errors import InfrastructureError, RelaxError, WorkerDied
from relax_core.api.events import Sink, Span
from relax_core.api.options import Options
from relax_core.api.role import WorkerSpec
from relax_core.observe.redaction import Redactor
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.host import Failure, describe, raised
from relax_core.rpc.messages import PlainData
from relax_core.runners.local.workers import LocalWorker, LocalWorkers

NAME = "sinks"
"""Name of the process in the run's logs."""
NICENESS = 5
"""Priority of the child; Linux may group processes by session, and then has a priority for each group."""
START_S = 600.0
"""Seconds in which the child must import the packages of all sinks."""
CALL_S = 1e9
"""Time limit of a call, in effect none: the recorder gives up a sink that hangs, and the child is killed at the end."""
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
    workers = LocalWorkers(plugin_files, log_dir=logs, redactor=deepcopy(redactor), about={"run": run})
    process = _SinkProcess(chosen, workers)
    try:
        targets: dict[str, Any] = {sink.name: catalogue.target(sink.kind, sink.name) for sink in chosen}
        yield {
            name: (_StandIn if target.spans is Sink.spans else _StandInWithSpans)(name, process)
            for name, target in targets.items()
        }
    finally:
        process.end()


class _SinkProcess:
    """The child, as the threads that call sinks see it.

    Invariant: a thread of its own serves the connection, because the run's event loop may be busy.
    """

    def __init__(self, chosen: Sequence[Chosen], workers: LocalWorkers) -> None:
        self._chosen, self._workers = tuple(chosen), workers
        self._serves = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=f"relax-{NAME}")
        self._thread.start()
        self._serves.wait()

    def call(self, sink: str, method: str, *args: Any) -> None:
        """Call a method of a sink and wait for its end. Raises the sink's error."""
        try:
            failures = asyncio.run_coroutine_threadsafe(self._call(sink, method, args), self._loop).result()
        except WorkerDied:
            raise InfrastructureError(f"the process of the sinks has ended; its log is logs/{NAME}.log") from None
        for failure in failures:
            error = raised(failure, f"sink {sink}")
            error.add_note(failure.frames)
            raise error

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._starting = asyncio.ensure_future(self._start())
        self._serves.set()
        try:
            await self._over.wait()
            with contextlib.suppress(RelaxError, TimeoutError):
                async with asyncio.timeout(END_S):
                    worker = await self._starting
                    await worker.call("end", timeout_s=END_S)
                    await worker.wait(END_S)
        finally:
            await self._workers.close()

    async def _start(self) -> LocalWorker:
        spec = WorkerSpec(NAME, self._chosen[0], target="relax_core.control.sink_process:SinkHost")
        (worker,) = await self._workers.start([spec], START_S)
        await worker.call("make", self._chosen, timeout_s=START_S)
        return worker

    async def _call(self, sink: str, method: str, args: Sequence[Any]) -> Sequence[Failure]:
        worker = await asyncio.shield(self._starting)
        failures: Sequence[Failure] = await worker.call("do", sink, method, PlainData(args), timeout_s=CALL_S)
        return failures


class _StandIn(Sink[Options]):
    """Passes the calls to the sink in the child, and waits for their end."""

    def __init__(self, name: str, process: _SinkProcess) -> None:
        super().__init__()
        self._name, self._process = name, process

    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        self._process.call(self._name, "open", run_dir, name, config)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._process.call(self._name, "metrics", step, values)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._process.call(self._name, "samples", step, samples)

    def rewind(self, step: int, last: int) -> None:
        self._process.call(self._name, "rewind", step, last)

    def close(self) -> None:
        self._process.call(self._name, "close")


class _StandInWithSpans(_StandIn):
    """A stand-in for a sink that has `spans`. The recorder computes spans only for such sinks."""

    def spans(self, step: int, spans: Sequence[Span]) -> None:
        self._process.call(self._name, "spans", step, spans)


class SinkHost:
    """The host of the sinks in the child. Each sink works in a thread of its own."""

    component: Chosen
    build: Callable[[Chosen], Any]

    async def make(self, chosen: Sequence[Chosen]) -> None:
        """Build the sinks; the error of a sink that can't be built is the answer to each of its calls.

        The check of a sink imports its package, in this thread: packages that several threads import may see each other
        half.
        """
        lower_priority()
        self._threads = {one.name: ThreadPoolExecutor(1, f"relax-{one.name}") for one in chosen}
        self._sinks: dict[str, Sink | Failure] = {}
        for one in chosen:
            try:
                sink: Sink = self.build(one)
                sink.check()
                self._sinks[one.name] = sink
            except Exception as error:
                self._sinks[one.name] = describe(error)

    async def do(self, name: str, method: str, args: PlainData) -> Sequence[Failure]:
        """Call a method of a sink; return its failure, if it failed."""
        sink = self._sinks[name]
        if isinstance(sink, Failure):
            return [sink]

        def call() -> Sequence[Failure]:
            try:
                getattr(sink, method)(*args.value)
            except BaseException as error:  # a SystemExit of a package is a failure of the call
                return [describe(error)]
            return []

        return await asyncio.get_running_loop().run_in_executor(self._threads[name], call)

    async def end(self) -> None:
        """End this process as a program ends, once this call is answered."""
        asyncio.get_running_loop().call_soon(sys.exit)


def lower_priority() -> None:
    """Let this process use only the processors that the run leaves free."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a kernel without such groups
        Path("/proc/self/autogroup").write_text(str(NICENESS))
