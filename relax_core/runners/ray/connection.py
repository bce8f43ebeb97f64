# SPDX-License-Identifier: Apache-2.0
"""Calls to an actor: over a socket from processes on its machine, else the same messages inside Ray calls.

An actor is an `RpcActor` and is called through an `RpcClient`. A Ray call returns errors as `Failure` values, since Ray
would change the types of raised errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from ray.exceptions import RayError

from relax_core.api.errors import DeadlineExceeded, WorkerDied
from relax_core.registry.error_text import said
from relax_core.registry.shapes import WrongShape, checked
from relax_core.rpc import messages
from relax_core.rpc.connection import Call, Connection, RpcServer, connect, proxy
from relax_core.rpc.host import Failure, describe, raised

NAMESPACE = "relax"
CALL_S = 120.0
"""Time limit of a call, longer than every `wait_s` of the hub's calls."""
Packed = tuple[bytes, list[Any]]
"""An encoded message and its large arrays."""
P = TypeVar("P")


async def answered(work: Awaitable[Any]) -> Any:
    """On the called side, return the result of `work`, or its error as a `Failure`."""
    try:
        return await work
    except Exception as error:
        return describe(error)


async def answered_by_ray(call: Call, packed: Packed) -> Packed:
    """On the called side, answer a call that came through Ray as an encoded message."""
    arrays: list[Any] = []
    value = await answered(call(*messages.decode(*packed)))
    try:
        return messages.encode(value, arrays), arrays
    except Exception as error:
        return messages.encode(describe(error)), []


async def asked(call: Awaitable[Any], name: str, what: str, timeout_s: float, wanted: Any = Any) -> Any:
    """On the calling side, return the value of a call, or raise its error with the original type.

    Raises DeadlineExceeded after `timeout_s`, and WorkerDied if the actor can't be reached, or sends a value of another
    type than `wanted`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            value = well_formed(await call, wanted, what)
    except TimeoutError:
        raise DeadlineExceeded(name, f"{what} to return", timeout_s) from None
    except (RayError, ConnectionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise WorkerDied(f"{name} died during {what}: {reason}") from error
    if isinstance(value, Failure):
        raise raised(value, name)
    return value


def well_formed(value: Any, wanted: Any, what: str) -> Any:
    """Return a value that an actor sent. Raises ConnectionError for another type than `wanted` and than a `Failure`."""
    try:
        return checked(value, *((Failure, "failure") if isinstance(value, Failure) else (wanted, what)))
    except WrongShape as error:
        raise ConnectionError(f"it sent {error}") from error


class RpcActor:
    """The base of actors that an `RpcClient` calls. A subclass opens `_server` and overrides `_serve`."""

    def __init__(self) -> None:
        self._server = RpcServer(self._serve)

    async def address(self) -> str:
        """Return the address of the actor's socket; empty if it has none."""
        return self._server.address

    async def call(self, packed: Packed) -> Packed:
        """Answer a call from another machine, which comes through Ray."""
        return await answered_by_ray(self._serve, packed)

    async def _serve(self, method: str, args: Sequence[Any]) -> Any:
        """Answer a call from the socket or from Ray."""
        raise NotImplementedError


def _is_lost(opening: asyncio.Future[Connection | None]) -> bool:
    """Return True if a connection was opened and has ended."""
    connection = opening.result() if opening.done() and not opening.cancelled() else None
    return connection is not None and connection.lost


class RpcClient:
    """The calls of one process to one actor, over the actor's socket if possible, else through Ray.

    Invariant: `close` fails the calls in progress and does not cancel the tasks that make them.
    """

    def __init__(self, actor: Any, name: str) -> None:
        self._actor, self._name = actor, name
        self._opening: asyncio.Future[Connection | None] | None = None

    async def call(self, method: str, args: Sequence[Any], timeout_s: float = CALL_S) -> Any:
        """Call a method. Raises DeadlineExceeded, WorkerDied, or the method's error."""
        return await asked(self._call(method, args), self._name, method, timeout_s)

    async def _call(self, method: str, args: Sequence[Any]) -> Any:
        if self._opening is None or _is_lost(self._opening):  # ask again: Ray may have restarted the actor
            self._opening = asyncio.ensure_future(self._open())
        opening = self._opening
        if not opening.done():
            await asyncio.wait({opening})
        if opening.cancelled():
            raise ConnectionError("the client was closed")
        connection = opening.result()
        if connection is not None and not connection.lost:
            return await connection.call(method, args)
        arrays: list[Any] = []
        body = messages.encode((method, tuple(args)), arrays)
        packed = await self._actor.call.remote((body, arrays))
        try:
            return messages.decode(*packed)
        except Exception as error:
            raise ConnectionError(f"it sent a message that can't be read ({said(error)})") from error

    async def _open(self) -> Connection | None:
        try:
            address = well_formed(await self._actor.address.remote(), str, "address")
            return await connect(address, self._name) if address else None
        except BaseException:
            self._opening = None
            raise

    def service(self, protocol: type[P], service: str) -> P:
        """Make an object of `protocol` whose methods call one service of the hub."""
        return proxy(protocol, lambda method, args: self.call(f"{service}.{method}", args))

    async def close(self) -> None:
        opening, self._opening = self._opening, None
        if opening is None:
            return
        opening.cancel()
        (connection,) = await asyncio.gather(opening, return_exceptions=True)
        if isinstance(connection, Connection):
            connection.close()
