# SPDX-License-Identifier: Apache-2.0
"""The run's side of an engine that was started elsewhere: the connection to the engine, and the check of its kind.

The run calls only addresses that its configuration lists, and only with the token of its configuration. Messages are
data of registered types, so an answer of the engine can't run code. `engine_host` is the engine's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from relax_core.api import Capabilities, Chosen, Clock, Engine, Secret, Worker, WorkerSpec
from relax_core.api.engine import switched_off
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, RelaxError, WorkerDied
from relax_core.registry.shapes import WrongShape, checked
from relax_core.rpc import messages
from relax_core.rpc.connection import Connection
from relax_core.rpc.remote_worker import RemoteWorker

CONNECT_S = 30.0
"""Seconds in which an engine must accept the connection and describe itself."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A connection to a machine that has vanished ends after a minute of silence."""


@messages.register
@dataclass(frozen=True, slots=True)
class EngineDescription:
    """The kind of an engine, without its model and its options."""

    engine: str
    """Name of the engine's component."""
    capabilities: Capabilities
    switched_off: tuple[str, ...]
    """Capabilities that the engine's options disable."""
    plugins: tuple[tuple[str, ...], ...]
    """Name, version and content of each plugin of the engine's process."""


def describe(chosen: Chosen, engine: type[Engine[Any]], plugins: Sequence[Sequence[str]]) -> EngineDescription:
    """Return the description of an engine with these options in a process with these plugins."""
    off = tuple(sorted(name for name in engine.switches if switched_off(engine, name, chosen.options)))
    return EngineDescription(chosen.name, engine.capabilities, off, tuple(tuple(plugin) for plugin in plugins))


def check_description(found: EngineDescription, wanted: EngineDescription) -> None:
    """Raise InfrastructureError unless an engine can do what the run's own engines can do."""
    if found.engine != wanted.engine:
        raise InfrastructureError(
            f"it is an engine {found.engine}, and the run has {wanted.engine}; serve the same engine"
        )
    plugins = {plugin[:1]: plugin[1:] for plugin in found.plugins}
    for name, *version in wanted.plugins:
        theirs = plugins.get((name,), tuple(version))  # only plugins that both have are compared
        if theirs != tuple(version):
            has, needs = (" content ".join(filter(None, one)) for one in (theirs, version))
            raise InfrastructureError(f"its plugin {name} is {has}, and the run's is {needs}; install the same plugins")
    have, want = asdict(found.capabilities), asdict(wanted.capabilities)
    if differing := [name for name in want if have[name] != want[name]]:
        raise InfrastructureError(f"its {', '.join(differing)} differ from those of the run's engine {wanted.engine}")
    if off := sorted(set(found.switched_off) - set(wanted.switched_off)):
        raise InfrastructureError(f"its options disable {', '.join(off)}; give it the [engine] table of the run")


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Let a TCP connection end when the other machine has vanished."""
    connected = transport.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        with contextlib.suppress(AttributeError):  # not every system has all of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class ExternalWorkers:
    """`api.role.Workers` of one engine that was started elsewhere: `start` connects, and starts no process.

    Invariant: a worker is returned only if the engine accepted the token and passed `check_description`.
    """

    def __init__(self, address: str, token: Secret, wanted: EngineDescription, clock: Clock) -> None:
        self._address, self._token, self._wanted, self._clock = address, token, wanted, clock
        self._worker: ExternalWorker | None = None

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[Worker, ...]:
        (spec,) = specs
        who, limit_s = f"{spec.name} at {self._address}", min(timeout_s, CONNECT_S)
        connection = Connection(who)
        try:
            async with asyncio.timeout(limit_s):
                await self._connect(connection, who)
                found = await connection.call("describe", ())
            check_description(checked(found, EngineDescription, "describe()"), self._wanted)
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(who, "the engine to describe itself", limit_s) from None
            if isinstance(error, WrongShape | ConnectionError):
                raise InfrastructureError(f"{who}: {error}") from error
            if isinstance(error, RelaxError) and self._address not in str(error):
                raise InfrastructureError(f"{who}: {error}") from error
            raise
        self._worker = ExternalWorker(spec.name, self._address, connection, self._clock)
        return (self._worker,)

    async def _connect(self, connection: Connection, who: str) -> None:
        host, _, port = self._address.rpartition(":")
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: connection, host.strip("[]"), int(port)
            )
        except TimeoutError:
            raise
        except OSError as error:
            raise InfrastructureError(
                f"{who} does not answer ({error}); is `relax engine serve` running there?"
            ) from error
        keep_alive(transport)
        try:
            await connection.greet(self._token.reveal())
        except ConnectionError as error:
            fix = (
                "give it the token of placement.rollout.external.token; a bare inference server, such as SGLang's, can't prove "
                "its weights: use `relax engine serve`"
            )
            raise InfrastructureError(f"{who} is not an engine of Relax, or refuses the token; {fix}") from error

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.kill()


class ExternalWorker(RemoteWorker):
    """An engine that was started elsewhere: `api.role.Worker`. Its process is not the run's to kill."""

    pid = 0

    def __init__(self, name: str, address: str, connection: Connection, clock: Clock) -> None:
        super().__init__(name, connection, clock)
        self._address, self.host = address, address.rpartition(":")[0]

    async def _died(self, method: str, error: Exception) -> WorkerDied:
        return WorkerDied(f"{self.name}: the engine at {self._address} ended during {method} ({error})")

    async def free_port(self, address: str) -> int:
        raise NotImplementedError(f"{self.name} at {self._address} is an engine, which needs no port of its machine")

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Tell the engine that the run needs it no more, and disconnect."""
        with contextlib.suppress(RelaxError):
            await self.call("leave", timeout_s=timeout_s)
        await self.kill()

    async def kill(self) -> None:
        self._connection.close()
