# SPDX-License-Identifier: Apache-2.0
"""The engine's side of an engine that joins a run from elsewhere: a server that one run at a time may call.

The engine itself is a child process, as in a run. The child is started when a run calls `start`, and killed when that
run's connection ends, so that every run gets a new engine. `external` is the run's side.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from relax_core.api.engine import Engine, EngineSpec
from relax_core.api.errors import ConfigError, InfrastructureError, WorkerDied
from relax_core.api.role import Worker, Workers, WorkerSpec
from relax_core.launch import compose
from relax_core.registry.shapes import checked
from relax_core.rpc.connection import GREET_S, Connection
from relax_core.runners.local.workers import LocalWorkers
from relax_plugin_scaling.external import EngineDescription, describe, keep_alive

CALLS = frozenset({"start", "score", "update_weights", "pause", "resume", "abort", "offload", "onload", "health"})
"""Methods of `api.Engine` that a run may call."""
STREAMS = frozenset({"generate"})
START_S = 300.0
"""Seconds in which the engine's process must start."""
UNBOUNDED_S = 1e9
"""Deadline of the engine's calls, in seconds: the run has the deadlines."""
End: TypeAlias = Literal["left", "lost"]
"""End of a run's use of the engine: the run let the engine go, or the connection ended."""


class EngineHost:
    """The server of one engine: `idle -> used by a run -> idle`.

    Invariants:
    - A caller without the token starts nothing. A caller of a second run is refused while a first one uses the engine.
    - The engine's process belongs to one connection, and ends with it.
    - The model folder is this machine's; every other setting of the engine's model comes from the run.
    """

    def __init__(
        self, spec: WorkerSpec, workers: Workers, description: EngineDescription, model: Path, token: str
    ) -> None:
        """`spec`: the engine's process, which `workers` starts. `model`: the model folder."""
        self._spec, self._workers, self._description = spec, workers, description
        self._model, self._token = model, token
        self._server: asyncio.Server | None = None
        self._user: Caller | None = None
        self._connections: set[Connection] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self.ends: asyncio.Queue[End] = asyncio.Queue()
        """End of each run's use of the engine."""

    async def open(self, listener: socket.socket) -> None:
        """Answer callers of a bound socket."""
        self._server = await asyncio.get_running_loop().create_server(self._accepted, sock=listener)

    async def close(self) -> None:
        """Disconnect all callers, and end the engine's process."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.close()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._workers.close()

    def _accepted(self) -> Connection:
        caller = Caller(self)
        connection = EngineConnection(
            "a run", caller.call, caller.stream, self._token, on_lost=lambda lost: self._lost(lost, caller)
        )
        self._connections.add(connection)
        asyncio.get_running_loop().call_later(GREET_S, connection.close_unless_greeted)
        return connection

    def _lost(self, connection: Connection, caller: Caller) -> None:
        connection.close()  # ends the calls that are in progress
        self._connections.discard(connection)
        if self._user is caller:
            task = asyncio.get_running_loop().create_task(self._end(caller))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _end(self, caller: Caller) -> None:
        """End the engine's process; then the engine is idle."""
        if caller.worker is not None:
            await caller.worker.kill()
        self._user = None
        self.ends.put_nowait("left" if caller.left else "lost")

    async def start(self, caller: Caller, spec: EngineSpec) -> Worker:
        """Start the engine's process for a caller, unless another run uses the engine."""
        if self._user is not None:
            raise InfrastructureError("another run uses this engine; let it leave there, or serve one more engine")
        self._user = caller
        (worker,) = await self._workers.start([replace(self._spec, name=spec.name)], START_S)
        return worker

    def own(self, spec: EngineSpec) -> EngineSpec:
        """Return a run's settings with the model folder of this machine."""
        return replace(spec, model={**spec.model, "path": str(self._model)})

    @property
    def description(self) -> EngineDescription:
        return self._description


def host_engine(files: Sequence[str], overrides: Sequence[str], token: str) -> EngineHost:
    """Return the host of a configuration's engine on this machine. Raises ConfigError.

    `token`: the secret that a run must send before it may use the engine.
    """
    composed = compose(files, overrides, on_disk=False)
    config, catalogue = composed.config, composed.catalogue
    model = config.model.path.absolute()
    if not (model / "config.json").is_file():
        raise ConfigError("model.path", str(model), "name the model folder of the run, or a copy, on this machine")
    engine = cast(type[Engine], catalogue.target("engine", config.engine.name))
    resolved = [tuple(plugin) for plugin in catalogue.resolved]
    spec = WorkerSpec(
        "engine", config.engine.chosen, str(config.engine.python or ""),
        {"OMP_NUM_THREADS": str(config.placement.rollout.threads or 1)}, preload=engine.preload,
    )  # fmt: skip
    workers = LocalWorkers([str(path) for path in config.plugins], resolved, run_env=config.run.revealed_env())
    return EngineHost(spec, workers, describe(config.engine.chosen, engine, resolved), model, token)


class EngineConnection(Connection):
    """A connection that is kept alive."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        keep_alive(transport)
        super().connection_made(transport)


class Caller:
    """One connection of a run, and the engine's process that serves it."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self.worker: Worker | None = None
        self.left = False
        """True once the run has said that it needs the engine no more."""

    async def call(self, method: str, args: Sequence[Any]) -> Any:
        """Answer a call of the run: of the engine's contract, `describe` or `leave`."""
        if method == "describe":
            return self._host.description
        if method == "leave":
            self.left = True
            return None
        if method not in CALLS:
            raise ValueError(f"{method[:40]!r} is not a method that a run may call of an engine")
        if method == "start":
            (spec,) = args
            checked(spec, EngineSpec, "start()")
            self.worker = await self._host.start(self, spec)
            args = (self._host.own(spec),)
        worker = self._started(method)
        try:
            return await worker.call(method, *args, timeout_s=UNBOUNDED_S)
        except WorkerDied as error:
            raise _ended(method) from error

    async def stream(self, method: str, args: Sequence[Any]) -> AsyncIterator[Any]:
        """Pass the items of a stream of the engine on to the run."""
        if method not in STREAMS:
            raise ValueError(f"{method[:40]!r} is not a stream that a run may read from an engine")
        try:
            async for item in self._started(method).stream(method, *args, timeout_s=UNBOUNDED_S):
                yield item
        except WorkerDied as error:
            raise _ended(method) from error

    def _started(self, method: str) -> Worker:
        if self.worker is None:
            raise ValueError(f"{method} was called before start")
        return self.worker


def _ended(method: str) -> WorkerDied:
    return WorkerDied(f"the engine's process ended during {method}; its output is where `relax engine serve` runs")
