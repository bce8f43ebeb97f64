# SPDX-License-Identifier: Apache-2.0
"""The protocol between processes: calls and streams as numbered frames over a socket, and typed proxies over it.

A connection is symmetric: either end may serve, call, or both. Values are encoded by `rpc.messages`, so received data
can't run code. Large arrays follow their message and are received into separate memory. Errors are sent as data. A
listening end accepts a peer only if the peer's first frame has the listener's token and protocol number.

A sender must not change an array until its call has been answered. A call brings the fields that are bound for the log,
such as the step, so that records of the called process have them.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import secrets
import socket
import struct
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from relax_core.observe.process_log import bind, bound_fields
from relax_core.registry.error_text import said
from relax_core.registry.shapes import checked, shown
from relax_core.rpc import messages
from relax_core.rpc.host import Failure, describe, raised

HEAD = struct.Struct("<QBIQ")
"""A frame's head: request number, kind, number of arrays after the message, size of the message in bytes."""
HELLO, CALL, STREAM, CANCEL, VALUE, ITEM, END, FAILURE = range(8)
ANSWERS, ITEMS = frozenset({VALUE, FAILURE}), frozenset({ITEM, END, FAILURE})
"""Kinds of frames that may answer a call, and those that may answer a stream."""
SCRATCH_BYTES = 1 << 18
"""Size of the receive buffer in which small frames are parsed. A larger frame is received into separate memory."""
JOINED_BYTES = 1 << 16
"""Arrays up to this size are copied into one buffer with their message; larger arrays are written separately."""
GREET_S = 10.0
"""Seconds until a caller that has not sent the token is disconnected."""
HELLO_S = 60.0
"""Longest wait until a busy process accepts the greeting. If no process listens, the socket fails at once."""

Call = Callable[[str, Sequence[Any]], Awaitable[Any]]
Stream = Callable[[str, Sequence[Any]], AsyncIterator[Any]]
P = TypeVar("P")


class Connection(asyncio.BufferedProtocol):
    """One end of a socket between two processes.

    Invariants:
    - Every request ends once: with its answer, with its failure, or with ConnectionError when the connection is lost.
    - No request is served before the peer has sent the right token. Requests begin in the order of their frames.
    - A request or answer of another shape closes the connection, since the peer is broken or hostile. The error names the
      frame.
    """

    def __init__(
        self, peer: str = "", call: Call | None = None, stream: Stream | None = None, token: str = "",
        failure: Failure | None = None, on_lost: Callable[[Connection], None] | None = None,
    ) -> None:  # fmt: skip
        """`peer`: name of the remote end in errors. `failure`: error that rejects the peer's greeting."""
        self._peer, self._call, self._stream, self._token = peer, call, stream, token
        self._failure, self._on_lost = failure, on_lost
        self._greeted, self.lost = False, False
        self._transport: Any = None
        self._numbers = 0
        self._answers: dict[int, tuple[frozenset[int], Callable[[int, Any], None]]] = {}
        """Number of each open request -> (kinds of frames that may answer, callback)."""
        self.refused = ""
        """Description of the frame of another shape that closed the connection; empty: none did."""
        self._bind: Callable[..., object] = bind
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()
        """Numbers of served streams that the peer has stopped reading."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._scratch, self._filled = memoryview(bytearray(SCRATCH_BYTES)), 0
        self._large: tuple[int, int, list[Any]] = (0, 0, [])
        """Request number, kind and parts of the large frame that is being received."""
        self._targets: deque[memoryview] = deque()
        """Memory for the bytes of the large frame that have not arrived yet."""

    # -- requests -----------------------------------------------------------------------------------------------------

    async def greet(self, token: str = "") -> None:
        """Send protocol number and token, and wait until the peer accepts. Raises its failure, or ConnectionError."""
        await self._request(HELLO, [messages.PROTOCOL, token])
        self._greeted = True  # from now on the peer may send calls, too

    async def call(self, method: str, args: Sequence[Any]) -> Any:
        """Call a method of the peer. Raises the method's error, or ConnectionError if the peer ends first."""
        return await self._request(CALL, [method, list(args), bound_fields()])

    def notify(self, method: str, args: Sequence[Any]) -> None:
        """Call a method of the peer without waiting for its answer, which is ignored."""
        del self._answers[self._begin(CALL, [method, list(args), bound_fields()], lambda *_: None)]

    async def stream(self, method: str, args: Sequence[Any]) -> AsyncGenerator[Any, None]:
        """Yield the items of a stream of the peer. Closing the generator ends the stream at the peer."""
        answers: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        number = self._begin(STREAM, [method, list(args), bound_fields()], lambda *answer: answers.put_nowait(answer))
        kind = ITEM
        try:
            while True:
                kind, value = await answers.get()
                if kind == END:
                    return
                if kind == FAILURE:
                    raise value
                yield value
        finally:
            del self._answers[number]
            if kind == ITEM:
                self._send(number, CANCEL, None)

    async def _request(self, kind: int, message: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answered(kind: int, value: Any) -> None:
            if answer.done():
                return
            if kind == FAILURE:
                answer.set_exception(value)
            else:
                answer.set_result(value)

        number = self._begin(kind, message, answered)
        try:
            return await answer
        finally:
            del self._answers[number]

    def _begin(self, kind: int, message: Any, answered: Callable[[int, Any], None]) -> int:
        if self.lost:
            raise self._loss()
        self._numbers += 1
        self._send(self._numbers, kind, message)
        self._answers[self._numbers] = ITEMS if kind == STREAM else ANSWERS, answered
        return self._numbers

    def close_unless_greeted(self) -> None:
        if not self._greeted:
            self.close()

    def close(self) -> None:
        self._end()
        for task in self._serving.values():
            task.cancel()
        if self._transport is not None:
            self._transport.close()

    def _end(self) -> None:
        self.lost = True
        self._writable.set()
        for _, answered in tuple(self._answers.values()):
            answered(FAILURE, self._loss())

    def _loss(self) -> ConnectionResetError:
        return ConnectionResetError(f"it sent {self.refused}" if self.refused else "the connection has ended")

    def _refuse(self, what: str) -> None:
        """Close the connection because of a frame of another shape."""
        self.refused = what
        self._end()
        self._transport.abort()

    # -- serving ------------------------------------------------------------------------------------------------------

    def serve_untrusted(self, call: Call) -> None:
        """Answer the peer's calls from now on. The log fields that the peer sends are ignored."""
        self._call, self._bind = call, lambda **_: None

    async def served(self) -> None:
        """Wait until the requests that this end serves have ended; call `close` first."""
        mine = asyncio.current_task()
        await asyncio.gather(*(task for task in self._serving.values() if task is not mine), return_exceptions=True)

    async def _serve(self, number: int, kind: int, parts: Sequence[Any]) -> None:
        try:
            request = messages.decode(parts[0], parts[1:])
            match request:
                case (str(method), tuple(args), dict(fields)):
                    self._bind(**fields)  # this task serves nothing else
                case _:
                    self._refuse(f"a request {shown(request)}")
                    return
            if kind == CALL and self._call is not None:
                self._send(number, VALUE, await self._call(method, args))
            elif kind == STREAM and self._stream is not None:
                items = self._stream(method, args)
                async for item in items:
                    await self._writable.wait()
                    if self.lost or number in self._cancelled:
                        await items.aclose()  # type: ignore[attr-defined]
                        return
                    self._send(number, ITEM, item)
                self._send(number, END, None)
            else:
                raise ValueError(f"{method}: this end of the connection does not serve this kind of request")
        except asyncio.CancelledError:
            if self.lost or getattr(asyncio.current_task(), "cancelling", int)():
                raise
            self._send(number, FAILURE, Failure("InfrastructureError", "the called method was cancelled"))
        except Exception as error:
            self._send(number, FAILURE, describe(error))

    def _served(self, number: int) -> None:
        del self._serving[number]
        self._cancelled.discard(number)

    def _received(self, number: int, kind: int, parts: Sequence[Any]) -> None:
        if not self._greeted and kind != HELLO and kind < VALUE:
            self._transport.abort()
        elif kind == HELLO:
            self._greet(number, parts[0])
        elif kind in (CALL, STREAM):
            if number in self._serving:
                self._refuse(f"a second request with the number {number}")
                return
            self._serving[number] = task = asyncio.ensure_future(self._serve(number, kind, parts))
            task.add_done_callback(lambda _: self._served(number))
        elif kind == CANCEL:
            if number in self._serving:
                self._cancelled.add(number)
        elif number in self._answers:  # else the caller was cancelled
            kinds, answered = self._answers[number]
            try:
                value = messages.decode(parts[0], parts[1:])
                if isinstance(value, Failure):
                    checked(value, Failure, "failure")
            except Exception as error:
                self._refuse(f"a message that can't be read ({said(error)})")
                return
            if kind not in kinds or isinstance(value, Failure) != (kind == FAILURE):
                self._refuse(f"a frame of kind {kind} with {shown(value)}")
                return
            answered(kind, raised(value, self._peer) if kind == FAILURE else value)

    def _greet(self, number: int, body: Any) -> None:
        try:
            protocol, token = messages.decode_hello(body)
            known = hmac.compare_digest(token.encode(), self._token.encode())
        except ValueError:
            known = False
        if not known:
            self._transport.abort()
            return
        self._greeted = protocol == messages.PROTOCOL and self._failure is None
        other = f"rpc: got protocol {protocol}, want {messages.PROTOCOL}; both sides must run the same relax-core"
        refusal = None if self._greeted else self._failure or Failure("InfrastructureError", other)
        self._send(number, VALUE if refusal is None else FAILURE, refusal)

    # -- frames -------------------------------------------------------------------------------------------------------

    def _send(self, number: int, kind: int, value: Any) -> None:
        arrays: list[Any] = []
        body = messages.encode(value, arrays)
        if self.lost:
            return
        head = HEAD.pack(number, kind, len(arrays), len(body))
        if not arrays:
            self._transport.write(head + body)
            return
        sizes = [array.nbytes for array in arrays]
        head += struct.pack(f"<{len(sizes)}Q", *sizes)
        if max(sizes) <= JOINED_BYTES and sum(sizes) <= SCRATCH_BYTES:
            self._transport.write(b"".join((head, body, *(array.data for array in arrays))))
            return
        self._transport.write(head + body)
        for array in arrays:
            self._transport.write(array.data)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._targets[0] if self._targets else self._scratch[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._targets:
            self._fill(nbytes)
        else:
            self._filled += nbytes
            self._parse()

    def _parse(self) -> None:
        """Take whole frames from the receive buffer; begin a frame that is too large for the buffer."""
        at = 0
        while self._filled - at >= HEAD.size:
            number, kind, count, size = HEAD.unpack_from(self._scratch, at)
            if count > messages.MAX_LARGE:  # no valid sender sends so many; the sizes alone could fill the buffer
                self._transport.abort()
                return
            start = at + HEAD.size + 8 * count
            if start > self._filled:
                break
            sizes = (size, *struct.unpack_from(f"<{count}Q", self._scratch, at + HEAD.size))
            end = start + sum(sizes)
            if end > self._filled and end - at <= SCRATCH_BYTES:
                break
            if end > self._filled:
                self._begin_large(number, kind, sizes, self._scratch[start : self._filled])
                self._filled = 0
                return
            parts = []
            for part in sizes:
                parts.append(bytes(self._scratch[start : start + part]))
                start += part
            at = end
            self._received(number, kind, parts)
            if self.lost:
                return
        if at < self._filled and at:
            left = bytes(self._scratch[at : self._filled])
            self._scratch[: len(left)] = left
        self._filled -= at

    def _begin_large(self, number: int, kind: int, sizes: Sequence[int], received: memoryview) -> None:
        import numpy as np

        if not self._greeted and (kind < VALUE or not self._answers):  # allocate nothing for a peer without a token
            self._transport.abort()
            return
        try:
            parts = [np.empty(size, np.uint8).data for size in sizes]
        except (MemoryError, ValueError, OverflowError):
            self._transport.abort()
            return
        self._large, self._targets = (number, kind, parts), deque(part for part in parts if len(part))
        while received:
            taken = min(len(received), len(self._targets[0]))
            self._targets[0][:taken] = received[:taken]
            self._fill(taken)
            received = received[taken:]

    def _fill(self, taken: int) -> None:
        self._targets[0] = self._targets[0][taken:]
        if not self._targets[0]:
            self._targets.popleft()
        if not self._targets:
            large, self._large = self._large, (0, 0, [])
            self._received(*large)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._end()
        if self._on_lost is not None:
            self._on_lost(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()


class RpcServer:
    """A server that answers the calls of any number of processes on this machine."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._token = secrets.token_hex(16)
        self.address = ""
        """Socket name and token, for `connect`. Empty while closed, and on systems without abstract socket names."""

    async def open(self) -> None:
        """Listen on an abstract socket, which needs no file. Do nothing if already open."""
        if self._server is not None or sys.platform != "linux":
            return
        name = f"relax-{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(f"\0{name}")
        self._server = await asyncio.get_running_loop().create_unix_server(self._accepted, sock=listening)
        self.address = f"{name} {self._token}"

    def close(self) -> None:
        """Stop listening; end all connections and the calls that are in progress on them."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.close()
        self._server, self.address = None, ""

    def _accepted(self) -> Connection:
        connection = Connection(call=self._call, token=self._token, on_lost=self._connections.discard)
        self._connections.add(connection)
        asyncio.get_running_loop().call_later(GREET_S, connection.close_unless_greeted)
        return connection


async def connect(address: str, peer: str) -> Connection | None:
    """Connect to an `RpcServer`; return None if this machine has no such socket or the server refuses the token."""
    name, _, token = address.partition(" ")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(peer)
    try:
        async with asyncio.timeout(HELLO_S):
            await asyncio.to_thread(sock.connect, f"\0{name}")  # not every event loop supports abstract names
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=sock)
            await connection.greet(token)
    except OSError:  # TimeoutError included
        connection.close()
        sock.close()
        return None
    return connection


def proxy(protocol: type[P], call: Call, near: object = None) -> P:
    """Make an object that implements `protocol`: each of its coroutine methods sends a call of the same name.

    A method that `near` has is called there instead.
    """
    made = type(f"{protocol.__name__}Proxy", (), {})()

    async def method(name: str, signature: inspect.Signature, *args: Any, **named: Any) -> Any:
        if named:
            bound = signature.bind(None, *args, **named)
            bound.apply_defaults()
            args = bound.args[1:]
        return await call(name, args)

    for name, function in inspect.getmembers(protocol, inspect.iscoroutinefunction):
        if not name.startswith("_"):
            own = getattr(near, name, None)
            setattr(made, name, own or partial(method, name, inspect.signature(function)))
    return made  # type: ignore[no-any-return]
