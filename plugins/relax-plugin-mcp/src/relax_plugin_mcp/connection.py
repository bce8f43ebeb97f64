# SPDX-License-Identifier: Apache-2.0
"""A connection to an MCP server, and a connection that several samples share.

The SDK's client must be entered and left in the same asyncio task, so each connection has an owner task that lives as
long as the connection. A call waits for its answer or for the end of the owner task.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolResult,
    Implementation,
    TextContent,
    ToolListChangedNotification,
)
from referencing import Registry
from referencing.exceptions import Unresolvable

from relax_core.api import RelaxError, Tool, tools_digest
from relax_plugin_mcp.options import ServerOptions
from relax_plugin_mcp.transports import Http, Stdio

CLOSE_S = 10.0
"""Time limit for closing a connection, in seconds."""
MAX_PAGES = 100
"""Maximum number of pages of a server's list of tools; a longer list is an error."""
OWN_ERRORS = frozenset({INVALID_PARAMS, INTERNAL_ERROR})
"""Error codes that answer a single call; any other code means that the connection failed."""


class ServerFailed(RuntimeError):
    """Error for a failure of the server or the connection, which is not the policy's fault."""


class Connection:
    """A session with one server: `new -> open -> broken -> closed`.

    Invariants:
    - once open, `tools` holds the allowed tools that the server offered at the start, with prefixed names, sorted by
      name;
    - after a failure the connection is `broken`, and every call raises ServerFailed; after a call that timed out, which
      may be the call's own fault, the connection is only `unfit` for further samples;
    - after `close`, a server that is a program has ended with all processes that it started.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.tools: tuple[Tool, ...] = ()
        self._names: dict[str, str] = {}
        """The server's name of each tool, by the name that the policy calls."""
        self._validators: dict[str, Any] = {}
        self._transport = Stdio(options) if options.command else Http(options)
        self._client: Any = None
        self._owner: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._changed = False
        """True after the server announced a change of its tools, until `check` has compared them."""
        self._why = ""
        """Reason of the connection's failure; empty while the connection works."""
        self._late = False
        """True after a call that timed out."""

    @property
    def broken(self) -> bool:
        return bool(self._why) or self._owner is None or self._owner.done()

    @property
    def unfit(self) -> bool:
        return self.broken or self._late

    async def open(self) -> None:
        """Start or reach the server and read its tools. Raises ServerFailed, or ConfigError for wrong options."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(opened))
        try:
            await asyncio.wait({self._owner, opened}, timeout=self.options.start_s, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                late = f"it did not list its tools within {self.options.start_s:g} s"
                await self._end(late if not self._owner.done() else "")
                raise self._failed(late)
        except asyncio.CancelledError:
            await self.close()
            raise

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool by its prefixed name; wrong arguments give a result with an error text for the policy.

        Raises ServerFailed if no answer comes, or if the server's tools have changed since the start.
        """
        if self.broken:
            raise self._failed("it is gone")
        if misfit := self._misfit(tool, arguments):
            return _error_result(f"error: the arguments of {tool} do not fit its parameters: {misfit}")
        request = asyncio.ensure_future(self._client.call_tool(self._names[tool], dict(arguments)))
        assert self._owner is not None
        try:
            await asyncio.wait({request, self._owner}, timeout=self.options.call_s, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                self._late = True
                raise self._failed(f"{tool} did not answer within {self.options.call_s:g} s")
            result = self._answer(tool, request)
        finally:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        if self._changed or result.is_error:  # a removed tool may be the cause of an error
            await self.check(self.tools)
        return result

    async def check(self, frozen: tuple[Tool, ...]) -> None:
        """List the server's tools again. Raises ServerFailed if they differ from `frozen`."""
        try:
            async with asyncio.timeout(self.options.call_s):
                tools = await self._offered()
        except (TimeoutError, MCPError, RelaxError, ValueError) as error:
            silent = f"it does not list its tools any more: {error or 'no answer'}"
            self._why = self._why or self._transport.failure or silent
            raise self._failed("") from error
        if _shown(tools) != _shown(frozen):
            ours, theirs = {tool.name: tool for tool in frozen}, {tool.name: tool for tool in tools}
            differ = sorted(name for name in ours | theirs if _shown((ours.get(name),)) != _shown((theirs.get(name),)))
            self._why = f"its tools are not those that the run began with: {', '.join(differ)} changed"
            raise self._failed("")
        self._changed = False

    async def close(self) -> None:
        """End the session, and the server if it is a program."""
        self._closing.set()
        if self._owner is not None:
            await asyncio.wait({self._owner}, timeout=CLOSE_S)
            await self._end("it was closed")

    # -- the owner ------------------------------------------------------------------------------------------------

    async def _own(self, opened: asyncio.Future[None]) -> None:
        info = Implementation(name="relax", version="1")
        try:
            client = Client(self._transport.streams(), cache=None, message_handler=self._heard, client_info=info)
            async with client:
                self._client = client
                try:
                    self.tools = await self._offered()
                except Exception as error:
                    self._why = self._transport.failure or _words(error)
                    raise
                self._transport.failure = ""  # ignore a request that this version of the server does not support
                opened.set_result(None)
                await self._closing.wait()
        except Exception as error:
            self._why = self._why or self._transport.failure or _words(error)
            if isinstance(leaf := _leaf(error), RelaxError):
                raise leaf from error

    async def _end(self, why: str) -> None:
        self._why = self._why or why
        assert self._owner is not None
        self._owner.cancel()
        await asyncio.wait({self._owner}, timeout=CLOSE_S)

    async def _heard(self, message: Any) -> None:
        self._changed = self._changed or isinstance(message, ToolListChangedNotification)

    # -- tools and answers ----------------------------------------------------------------------------------------

    async def _offered(self) -> tuple[Tool, ...]:
        """List the server's tools as they are shown to the policy. Raises ValueError for an invalid list."""
        listed: dict[str, Any] = {}
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            listed |= {tool.name: tool for tool in page.tools}
            cursor = page.next_cursor
            if not cursor:
                break
        else:
            raise ValueError(f"the list of tools has more than {MAX_PAGES} pages")
        if absent := sorted(set(self.options.allow) - set(listed)):
            raise ValueError(f"no tool {absent[0]!r}, which allow lists; the server has {', '.join(sorted(listed))}")
        prefix = self.options.prefix
        names = {f"{prefix}{name}": name for name in sorted(self.options.allow or listed)}
        for shown, name in names.items():
            schema = listed[name].input_schema
            try:
                kind = validator_for(schema, Draft202012Validator)
                kind.check_schema(schema)
            except SchemaError as error:
                raise ValueError(f"the parameters of its tool {name} are not a JSON schema: {error.message}") from error
            self._validators[shown] = kind(schema, registry=Registry())  # an empty registry downloads no schemas
        self._names = names
        return tuple(
            Tool(shown, {"type": "object", "properties": {}, **listed[name].input_schema}, listed[name].description or "",
                 self.options.name)
            for shown, name in names.items()
        )  # fmt: skip

    def _misfit(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return why arguments do not fit a tool's schema; empty if they do. Raises ServerFailed for a broken schema."""
        try:
            error = best_match(self._validators[tool].iter_errors(dict(arguments)))
        except Unresolvable as unresolvable:
            raise self._failed(f"the parameters of its tool {tool} can't be read: {unresolvable}") from unresolvable
        return "" if error is None else f"{error.json_path}: {error.message}"

    def _answer(self, tool: str, request: asyncio.Future[CallToolResult]) -> CallToolResult:
        if request.cancelled():
            raise self._failed(f"{tool}: the connection ended")
        error = request.exception()
        if error is None:
            return request.result()
        failure = self._transport.failure
        if isinstance(error, MCPError) and error.error.code in OWN_ERRORS and not failure:
            return _error_result(f"error: {error.error.message}")
        if failure or (isinstance(error, MCPError) and error.error.code not in OWN_ERRORS):
            self._why = self._why or failure or _words(error)
        raise self._failed(f"{tool}: {_words(error)}") from error

    def _failed(self, why: str) -> Exception:
        """Return the error for a caller that waits for the server: the owner task's RelaxError, else ServerFailed."""
        ended = self._owner is not None and self._owner.done() and not self._owner.cancelled()
        if ended and isinstance(wrong := self._owner.exception(), RelaxError):
            return wrong
        reason = self._why or self._transport.failure or why
        return ServerFailed(f"server {self.options.name}: {reason}{self._transport.evidence}")


class SharedServer:
    """A connection that all samples of a process share, replaced once unfit: `open -> unfit -> closed when unused`.

    Invariants: no sample acquires an unfit connection; an unfit connection is closed when its last sample releases it.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._current: Connection | None = None
        self._users: Counter[Connection] = Counter()
        self._starting = asyncio.Lock()  # held during a start, so that concurrent samples wait for the new connection

    async def acquire(self) -> Connection:
        async with self._starting:
            if self._current is None or self._current.unfit:
                old, self._current = self._current, None
                if old is not None and not self._users[old]:
                    await old.close()
                connection = Connection(self._options)
                await connection.open()
                self._current = connection
            self._users[self._current] += 1
            return self._current

    async def release(self, connection: Connection) -> None:
        self._users[connection] -= 1
        if not self._users[connection]:
            del self._users[connection]
            if connection is not self._current:
                await connection.close()


def _shown(tools: tuple[Tool | None, ...]) -> str:
    return tools_digest([tool for tool in tools if tool is not None])


def _error_result(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=text)], is_error=True)


def _leaf(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _words(error: BaseException) -> str:
    leaf = _leaf(error)
    return str(leaf) if type(leaf) is ValueError else f"{type(leaf).__name__}: {leaf}"
