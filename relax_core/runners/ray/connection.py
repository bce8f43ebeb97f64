# SPDX-License-Identifier: Apache-2.0
"""Lines to an actor: calls over a socket between processes of one user on one machine, at a fraction of what Ray's cost.

An actor opens an `RpcServer`, others call it through a `RpcClient`: by its line where there is one, else by Ray, which also
carries what is large. What travels is pickled as Ray does it. The socket has no file and a name nobody can guess; its
peers are this user's. A line ends with its actor, at once, and whoever waits for an answer learns it.

How remote calls answer: a value, or a failure as data. Errors of ours do not survive Ray's own wrapping unchanged.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Self

from ray.exceptions import RayError

from relax_core.api.errors import DeadlineExceeded, WorkerDied
from relax_core.rpc.host import Failure, describe, raised


async def answered(work: Awaitable[Any]) -> Any:
    """On the called side: the value, or what was raised, described."""
    try:
        return await work
    except Exception as error:
        return describe(error)


async def asked(call: Awaitable[Any], name: str, what: str, timeout_s: float) -> Any:
    """On the calling side: the value, or the error raised as its own type."""
    try:
        async with asyncio.timeout(timeout_s):
            value = await call
    except TimeoutError:
        raise DeadlineExceeded(name, f"{what} to return", timeout_s) from None
    except (RayError, ConnectionError) as error:
        raise WorkerDied(f"{name} died during {what}: {_first_line(error)}") from error
    if isinstance(value, Failure):
        raise raised(value, name)
    return value


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


HEAD = struct.Struct("<QQ")
"""Of a frame: the number of its call, the size of what follows."""
PEER = struct.Struct("3i")
BY_RAY_BYTES = 1 << 20
"""A larger call goes by Ray, which need not copy it through a socket."""
HELLO_S = 60.0
"""Of a busy actor; where nobody listens the socket says so at once."""

Take = Callable[["Frames", int, bytes], None]


class Frames(asyncio.Protocol):
    """One end of a line: numbered frames, whole."""

    def __init__(self, take: Take, lost: Callable[[Frames], None], met: Callable[[Frames], None] | None = None) -> None:
        self._take, self._lost, self._met = take, lost, met
        self._read = bytearray()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if self._met is not None:
            self._met(self)

    def data_received(self, data: bytes) -> None:
        self._read += data
        while len(self._read) >= HEAD.size:
            number, size = HEAD.unpack_from(self._read)
            if len(self._read) < HEAD.size + size:
                return
            body = bytes(memoryview(self._read)[HEAD.size : HEAD.size + size])
            del self._read[: HEAD.size + size]
            self._take(self, number, body)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(self)

    def send(self, number: int, body: bytes) -> None:
        self.transport.write(HEAD.pack(number, len(body)) + body)


class RpcServer:
    """The actor's end: answers calls from any number of processes."""

    def __init__(self, handle: Callable[..., Awaitable[Any]]) -> None:
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._ends: set[Frames] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self.address = ""
        """Where it is reached; empty while it is closed, and where there are no such sockets."""

    async def open(self) -> None:
        """Once is enough."""
        if self._server is not None or sys.platform != "linux":
            return
        name = f"relax-{secrets.token_hex(16)}"
        own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own.bind(f"\0{name}")
        self._server = await asyncio.get_running_loop().create_unix_server(self._end, sock=own)
        self.address = name

    def close(self) -> None:
        """Nobody is answered any more."""
        if self._server is not None:
            self._server.close()
        for end in tuple(self._ends):
            end.transport.close()
        for call in tuple(self._calls):
            call.cancel()
        self._server, self.address = None, ""

    def _end(self) -> Frames:
        return Frames(self._called, self._ends.discard, self._met)

    def _met(self, end: Frames) -> None:
        peer = end.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        if PEER.unpack(peer)[1] != os.getuid():
            end.transport.abort()
            return
        self._ends.add(end)
        end.send(0, b"")

    def _called(self, end: Frames, number: int, body: bytes) -> None:
        if end in self._ends:
            call = asyncio.ensure_future(self._answer(end, number, body))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _answer(self, end: Frames, number: int, body: bytes) -> None:
        value = await answered(self._handle(*pickle.loads(body)))
        try:
            packed = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            packed = pickle.dumps(describe(error), pickle.HIGHEST_PROTOCOL)
        if end in self._ends:  # else whoever asked has gone
            end.send(number, packed)


class Connection:
    """The caller's end."""

    def __init__(self) -> None:
        self._end = Frames(self._told, self._lost)
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._numbers = 0
        self.lost = False

    @classmethod
    async def open(cls, address: str) -> Self | None:
        """None where no such socket is on this machine, or it is not for us."""
        line = cls()
        hello = line._open[0] = asyncio.get_running_loop().create_future()
        own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            async with asyncio.timeout(HELLO_S):
                await asyncio.to_thread(own.connect, f"\0{address}")  # not every loop knows names without a file
                await asyncio.get_running_loop().create_unix_connection(lambda: line._end, sock=own)
                await hello
        except OSError:  # a timeout is one too
            line.close()
            if line._end.transport is None:  # else it is the transport's to close
                own.close()
            return None
        return line

    async def ask(self, call: bytes) -> Any:
        """The answer to a pickled call. Raises ConnectionError where the actor ends before it has answered."""
        if self.lost:
            raise ConnectionResetError("its line has ended")
        self._numbers += 1
        number = self._numbers
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._end.send(number, call)
            return await answer
        finally:
            self._open.pop(number, None)

    def close(self) -> None:
        self.lost = True
        if self._end.transport is not None:
            self._end.transport.close()

    def _told(self, end: Frames, number: int, body: bytes) -> None:
        answer = self._open.get(number)
        if answer is None or answer.done():  # whoever asked has gone
            return
        try:
            answer.set_result(pickle.loads(body) if body else None)
        except Exception as error:
            answer.set_exception(error)

    def _lost(self, end: Frames) -> None:
        self.lost = True
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("its line has ended"))


class RpcClient:
    """One process's calls of one actor, by whichever way is there. The actor has `call` and `address`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._opening: asyncio.Future[Connection | None] | None = None

    async def call(self, *args: Any) -> Any:
        line = await self._line()
        if line is not None and len(packed := pickle.dumps(args, pickle.HIGHEST_PROTOCOL)) <= BY_RAY_BYTES:
            return await line.ask(packed)
        return await self._actor.call.remote(*args)

    async def close(self) -> None:
        opening, self._opening = self._opening, None
        if opening is None:
            return
        opening.cancel()
        (line,) = await asyncio.gather(opening, return_exceptions=True)
        if isinstance(line, Connection):
            line.close()

    async def _line(self) -> Connection | None:
        """Opened by the first call; after its end Ray says what became of the actor."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._opened())
        line = self._opening.result() if self._opening.done() else await asyncio.shield(self._opening)
        return None if line is None or line.lost else line

    async def _opened(self) -> Connection | None:
        try:
            address = await self._actor.address.remote()
            return await Connection.open(address) if address else None
        except BaseException:
            self._opening = None
            raise
