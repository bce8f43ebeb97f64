# SPDX-License-Identifier: Apache-2.0
"""The two transports for the SDK's client: the pipes of a program, and HTTP.

Both record the reason of a failure, and limit the size of a server's messages. The SDK's own pipe transport is not
used: its server may outlive the transport, and one long line can fill the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import INVALID_PARAMS, ErrorData, JSONRPCError, jsonrpc_message_adapter

from relax_core.api import ConfigError
from relax_core.api.options import Secret
from relax_core.api.role import PROGRAM_ENV, visible_environment
from relax_plugin_mcp import guard
from relax_plugin_mcp.options import ServerOptions

MAX_MESSAGE = 1 << 24
"""Maximum size of a message from a server, in bytes."""
CHUNK = 1 << 16
QUOTED_BYTES = 500
"""Number of bytes at the end of a program's standard error that an error quotes."""
GRACE_S = 1.0
"""Seconds in which a program must end after its standard input is closed; then the program is killed."""
KILLED_S = 5.0
CONNECT_S = 30.0
ANSWERED = frozenset({400, 404, 422})
"""HTTP statuses with which a server may still send a protocol error as JSON."""
BEGINS, ENDS = (
    re.compile(rb'^{"jsonrpc": ?"2\.0", ?"id": ?(\d+),'),
    re.compile(rb'"jsonrpc": ?"2\.0", ?"id": ?(\d+)}\s*$'),
)
"""Patterns for a message's request id, which SDKs write at the message's beginning or end."""


class Stdio:
    """A server that is a program, and its pipes. All processes of the server end with the program or this process."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.failure = ""
        self._said, self._stray = bytearray(), ""

    @property
    def evidence(self) -> str:
        """The program's output besides messages, to append to an error text; empty if it wrote nothing else."""
        stray = f"; its standard output, which must hold only messages, has {self._stray!r}" * bool(self._stray)
        said = self._said.decode(errors="replace").strip()
        return f"{stray}; its standard error ends with {said!r}" if said else stray

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        """Start the program and yield the streams of messages from and to it; stop it when the context ends."""
        alive, held = os.pipe()
        with contextlib.ExitStack() as descriptors:
            release = descriptors.enter_context(contextlib.ExitStack())
            release.callback(os.close, held)
            program = self._start(alive)
            loop = asyncio.get_running_loop()
            assert program.stdin and program.stdout and program.stderr
            error_text, speaking, hearing = (
                asyncio.StreamReader(),
                asyncio.StreamReader(),
                asyncio.streams.FlowControlMixin,
            )
            out, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(speaking), program.stdout)
            descriptors.callback(out.close)
            errors, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(error_text), program.stderr)
            descriptors.callback(errors.close)
            pipe, protocol = await loop.connect_write_pipe(hearing, program.stdin)
            descriptors.callback(pipe.abort)
            writer = asyncio.StreamWriter(pipe, protocol, None, loop)
            arrived, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            outgoing, sent = anyio.create_memory_object_stream[SessionMessage](0)
            tasks = [
                asyncio.create_task(self._read(speaking, arrived)),
                asyncio.create_task(self._write(writer, sent)),
                asyncio.create_task(self._keep_end(error_text)),
            ]
            try:
                yield incoming, outgoing
            finally:
                for stream in (incoming, outgoing, arrived, sent):
                    stream.close()
                writer.close()
                try:
                    await asyncio.to_thread(_ended, program, GRACE_S)
                finally:
                    release.close()  # the guard kills the remaining processes
                    for task in tasks:
                        task.cancel()
                    await asyncio.to_thread(_ended, program, KILLED_S)
                    await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, alive: int) -> subprocess.Popen[bytes]:
        first, *rest = self._options.command
        command = [sys.executable if first == "python" else first, *rest]
        known = visible_environment(os.environ, PROGRAM_ENV)
        directory = self._options.directory
        if directory is not None and not directory.is_dir():
            os.close(alive)
            raise NotADirectoryError(f"directory {directory} does not exist; correct option directory")
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(alive), *command], cwd=directory,
                env=known | revealed(self._options.env), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, pass_fds=(alive,), start_new_session=True, bufsize=0,
            )  # fmt: skip
        finally:
            os.close(alive)

    async def _read(self, pipe: asyncio.StreamReader, arrived: Any) -> None:
        """Send each line that is a message to `arrived`; for a line above `MAX_MESSAGE`, send an error answer."""
        line = bytearray()
        head = b""
        """Beginning of a line that is too long. Its rest is read and dropped, except for the line's end."""
        with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async with arrived:
                while chunk := await pipe.read(CHUNK):
                    *whole, rest = chunk.split(b"\n")
                    for part in whole:
                        line += part
                        await self._hand_on(bytes(line), head, arrived)
                        line.clear()
                        head = b""
                    line += rest
                    if len(line) > MAX_MESSAGE:
                        head = head or bytes(line[:QUOTED_BYTES])
                        del line[:-QUOTED_BYTES]
                self.failure = self.failure or "it ended"

    async def _hand_on(self, line: bytes, head: bytes, arrived: Any) -> None:
        if head:
            number = BEGINS.search(head) or ENDS.search(line)
            if number is None:
                self.failure = f"it wrote a message of more than {MAX_MESSAGE} bytes"
                arrived.close()
                return
            too_long = ErrorData(code=INVALID_PARAMS, message=f"the result has more than {MAX_MESSAGE} bytes")
            answer: Any = JSONRPCError(jsonrpc="2.0", id=int(number[1]), error=too_long)
        else:
            try:
                answer = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                self._stray = line[:200].decode(errors="replace").strip() or self._stray
                return
        await arrived.send(SessionMessage(answer))

    async def _write(self, writer: asyncio.StreamWriter, sent: Any) -> None:
        with contextlib.suppress(OSError):  # `_read` notices the program's end
            async with sent:
                async for message in sent:
                    writer.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await writer.drain()

    async def _keep_end(self, pipe: asyncio.StreamReader) -> None:
        while chunk := await pipe.read(CHUNK):
            self._said += chunk
            del self._said[:-QUOTED_BYTES]


class Http:
    """A server at an HTTP address."""

    evidence = ""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.failure = ""

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        """Yield the streams of messages from and to the server."""
        headers = {"accept-encoding": "identity", **revealed(self._options.headers)}  # no compression bombs
        timeout = httpx2.Timeout(CONNECT_S, read=None)  # `Connection.call` has its own deadline
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout, transport=_Watched(self)) as client,
            streamable_http_client(self._options.url, http_client=client, max_sse_event_size=MAX_MESSAGE) as streams,
        ):
            yield streams


class _Watched(httpx2.AsyncHTTPTransport):
    """An HTTP transport that records failures and limits the size of answers.

    Failures are failed requests, and statuses outside the protocol, which the SDK would report as errors of the server.
    """

    def __init__(self, owner: Http) -> None:
        super().__init__()
        self._owner = owner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await super().handle_async_request(request)
        except httpx2.TransportError as error:
            if request.method == "POST":  # a GET opens the stream of announcements, which may fail and reconnect
                self._owner.failure = f"{type(error).__name__}: {error}"
            raise
        status, is_json = response.status_code, response.headers.get("content-type", "").startswith("application/json")
        if request.method == "POST" and status >= 400 and not (status in ANSWERED and is_json):
            self._owner.failure = f"it answered with status {status}"
        if is_json and isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = _Bounded(response.stream, self._owner)
        return response


class _Bounded(httpx2.AsyncByteStream):
    """The body of an answer. Reading raises ReadError after more than `MAX_MESSAGE` bytes."""

    def __init__(self, body: httpx2.AsyncByteStream, owner: Http) -> None:
        self._body, self._owner = body, owner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for part in self._body:
            read += len(part)
            if read > MAX_MESSAGE:
                self._owner.failure = f"it answered with more than {MAX_MESSAGE} bytes"
                raise httpx2.ReadError(self._owner.failure)
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()


def revealed(values: Mapping[str, Secret | str]) -> dict[str, str]:
    """Return values with credentials resolved. Raises ConfigError explaining how a worker gets a missing variable."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = value.reveal() if isinstance(value, Secret) else value
        except ConfigError as error:
            fix = f"{error.fix}; a worker sees only the variables listed in the environment's option inherit_env"
            raise ConfigError(error.field, str(error.got), fix) from error
    return found


def _ended(program: subprocess.Popen[bytes], timeout_s: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(timeout_s)
