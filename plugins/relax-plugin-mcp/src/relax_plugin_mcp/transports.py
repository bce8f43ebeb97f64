# SPDX-License-Identifier: Apache-2.0
"""The two ways to a server, as the transports that the SDK's client takes: the pipes of a program, and HTTP.

Both note why they failed, in words, and bound what a server may send. The SDK's own pipes are not used: a server may outlive
them, and fill the memory with one line.
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
from relax_plugin_mcp import guard
from relax_plugin_mcp.options import ServerOptions

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")
"""Variables of its worker that a program sees."""
MAX_MESSAGE = 1 << 24
"""Bytes of one message of a server."""
CHUNK = 1 << 16
QUOTED_BYTES = 500
"""Of the end of what a program said on its standard error."""
GRACE_S = 1.0
"""Time that a program has to end after its standard input was closed; then it is killed."""
KILLED_S = 5.0
CONNECT_S = 30.0
ANSWERED = frozenset({400, 404, 422})
"""Statuses at which a server may still answer with an error of its own, as JSON."""
BEGINS, ENDS = (
    re.compile(rb'^{"jsonrpc": ?"2\.0", ?"id": ?(\d+),'),
    re.compile(rb'"jsonrpc": ?"2\.0", ?"id": ?(\d+)}\s*$'),
)
"""The number of the request that a message answers, as the SDKs write it: at the beginning, or at the end."""


class Stdio:
    """A program, and the pipes to it. Whatever it started ends with it, and all of it with this process."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.failure = ""
        self._said, self._stray = bytearray(), ""

    @property
    def evidence(self) -> str:
        """The words of the program beside its messages, for errors."""
        stray = f"; on its standard output, which is for messages alone, it said {self._stray!r}" * bool(self._stray)
        said = self._said.decode(errors="replace").strip()
        return f"{stray}; it said {said!r}" if said else stray

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        """Start the program and give the streams of messages from it and to it; end it at the end."""
        alive, held = os.pipe()
        with contextlib.ExitStack() as descriptors:
            release = descriptors.enter_context(contextlib.ExitStack())
            release.callback(os.close, held)
            program = self._start(alive)
            loop = asyncio.get_running_loop()
            assert program.stdin and program.stdout and program.stderr
            told, speaking, hearing = asyncio.StreamReader(), asyncio.StreamReader(), asyncio.streams.FlowControlMixin
            out, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(speaking), program.stdout)
            descriptors.callback(out.close)
            errors, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), program.stderr)
            descriptors.callback(errors.close)
            pipe, protocol = await loop.connect_write_pipe(hearing, program.stdin)
            descriptors.callback(pipe.abort)
            writer = asyncio.StreamWriter(pipe, protocol, None, loop)
            arrived, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            outgoing, sent = anyio.create_memory_object_stream[SessionMessage](0)
            tasks = [
                asyncio.create_task(self._read(speaking, arrived)),
                asyncio.create_task(self._write(writer, sent)),
                asyncio.create_task(self._keep_end(told)),
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
                    release.close()  # the guard kills what is left
                    for task in tasks:
                        task.cancel()
                    await asyncio.to_thread(_ended, program, KILLED_S)
                    await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, alive: int) -> subprocess.Popen[bytes]:
        first, *rest = self._options.command
        command = [sys.executable if first == "python" else first, *rest]
        known = {name: os.environ[name] for name in INHERITED if name in os.environ}
        directory = self._options.directory
        if directory is not None and not directory.is_dir():
            os.close(alive)
            raise NotADirectoryError(f"there is no directory {directory}")
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(alive), *command], cwd=directory,
                env=known | revealed(self._options.env), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, pass_fds=(alive,), start_new_session=True, bufsize=0,
            )  # fmt: skip
        finally:
            os.close(alive)

    async def _read(self, pipe: asyncio.StreamReader, arrived: Any) -> None:
        """Hand on the lines that are messages. A longer one than may be is the error of the request that it answers."""
        line = bytearray()
        head = b""
        """Beginning of a line that is too long; its rest is read and forgotten, but for the end."""
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
        with contextlib.suppress(OSError):  # the end of its output tells that it has ended
            async with sent:
                async for message in sent:
                    writer.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await writer.drain()

    async def _keep_end(self, pipe: asyncio.StreamReader) -> None:
        while chunk := await pipe.read(CHUNK):
            self._said += chunk
            del self._said[:-QUOTED_BYTES]


class Http:
    """A server at an address."""

    evidence = ""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.failure = ""

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        """Give the streams of messages from the server and to it."""
        headers = {"accept-encoding": "identity", **revealed(self._options.headers)}  # nothing that grows when unpacked
        timeout = httpx2.Timeout(CONNECT_S, read=None)  # a call has a deadline of its own
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout, transport=_Watched(self)) as client,
            streamable_http_client(self._options.url, http_client=client, max_sse_event_size=MAX_MESSAGE) as streams,
        ):
            yield streams


class _Watched(httpx2.AsyncHTTPTransport):
    """Notes requests that failed and answers that no server of this protocol gives, which the SDK turns into errors that look
    like the server's own; ends answers that are too long."""

    def __init__(self, owner: Http) -> None:
        super().__init__()
        self._owner = owner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await super().handle_async_request(request)
        except httpx2.TransportError as error:
            if request.method == "POST":  # the stream of announcements may come and go
                self._owner.failure = f"{type(error).__name__}: {error}"
            raise
        status, is_json = response.status_code, response.headers.get("content-type", "").startswith("application/json")
        if request.method == "POST" and status >= 400 and not (status in ANSWERED and is_json):
            self._owner.failure = f"it answered with status {status}"
        if is_json and isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = _Bounded(response.stream, self._owner)
        return response


class _Bounded(httpx2.AsyncByteStream):
    """The body of an answer, up to `MAX_MESSAGE`."""

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
    """Read credentials. Raises ConfigError that says how one gets to a worker."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = value.reveal() if isinstance(value, Secret) else value
        except ConfigError as error:
            fix = f"{error.fix}; a worker sees only variables that the environment's table names: inherit_env"
            raise ConfigError(error.field, str(error.got), fix) from error
    return found


def _ended(program: subprocess.Popen[bytes], timeout_s: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(timeout_s)
