# SPDX-License-Identifier: Apache-2.0
"""The environment `mcp`: the policy calls tools of MCP servers in each turn, until a turn without a tool call.

The run's `[[rewards]]` judge the sample. The result of a wrong call is an error text. If a server fails, the sample
ends with the outcome `environment_error`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

from relax_core.api import (
    Action,
    ConfigError,
    Environment,
    Observation,
    Step,
    Task,
    Tool,
    tools_digest,
)
from relax_core.api.task import Message, ToolCall
from relax_plugin_mcp.connection import Connection, ServerFailed, SharedServer
from relax_plugin_mcp.options import McpOptions, ServerOptions
from relax_plugin_mcp.results import content_of


class Mcp(Environment[McpOptions]):
    """An environment with the tools of MCP servers; the episode ends with the first turn without a tool call."""

    def __init__(self, options: McpOptions | None = None) -> None:
        super().__init__(options)
        self._connections: list[tuple[Connection, SharedServer | None]] = []
        self._by_tool: dict[str, Connection] = {}

    @classmethod
    async def find_tools(cls, options: McpOptions) -> tuple[Tool, ...]:
        """List the tools of every server. Raises ConfigError if a server fails or its tools are not as expected."""
        connections = [Connection(server) for server in options.servers]
        try:
            await _together(connection.open() for connection in connections)
            return _united(connections)
        except ServerFailed as error:
            fix = "run its command by hand, or correct its table [[environment.servers]]"
            raise ConfigError("environment.servers", str(error), fix) from error
        finally:
            await asyncio.gather(*(connection.close() for connection in connections))

    @classmethod
    async def open(cls, options: McpOptions) -> dict[str, SharedServer]:
        """Start the servers that samples share, so that a server that can't start stops the run at once."""
        shared = {server.name: SharedServer(server) for server in options.servers if server.per == "worker"}
        for server in shared.values():
            await server.release(await server.acquire())
        return shared

    async def reset(self, task: Task, seed: int) -> Observation | None:
        await _together(self._connect(server) for server in self.options.servers)
        self._by_tool = {tool.name: connection for connection, _ in self._connections for tool in connection.tools}
        return None

    async def step(self, action: Action) -> Step:
        if not action.tool_calls:
            return Step("", done=True)
        most = self.options.calls_per_turn
        answers = [await self._answer(call) for call in action.tool_calls[:most]]
        answers += [
            Message("tool", f"error: only {most} calls of a turn are made, and this was not", name=call.name)
            for call in action.tool_calls[most:]
        ]
        return Step(Observation(messages=tuple(answers)), done=False)

    async def close(self) -> None:
        connections, self._connections = self._connections, []
        await asyncio.gather(
            *(
                connection.close() if shared is None else shared.release(connection)
                for connection, shared in connections
            )
        )

    async def _connect(self, server: ServerOptions) -> None:
        """Open or acquire the sample's connection to a server, and check that its tools equal those in the prompt."""
        shared: SharedServer | None = None
        if server.per == "worker":
            shared = self.shared[server.name]  # type: ignore[index]
            connection = await shared.acquire()
            self._connections.append((connection, shared))
        else:
            connection = Connection(server)
            self._connections.append((connection, None))
            await connection.open()
        await connection.check(tuple(tool for tool in self.tools if tool.source == server.name))

    async def _answer(self, call: ToolCall) -> Message:
        connection = self._by_tool[call.name]
        result = await connection.call(call.name, call.arguments)
        return Message("tool", content_of(result, connection.options.result_bytes, self.options.images), name=call.name)


async def _together(work: Iterable[Awaitable[None]]) -> None:
    """Await all of `work`; raise the first error only after all have ended, so that no connection is left opening."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _united(connections: Sequence[Connection]) -> tuple[Tool, ...]:
    """Return the tools of all servers.

    Raises ConfigError if two tools have the same name, no server has a tool, or tools differ from the option `digest`.
    """
    tools: dict[str, Tool] = {}
    for at, connection in enumerate(connections):
        field, expected, found = f"environment.servers.{at}", connection.options.digest, tools_digest(connection.tools)
        if expected and expected != found:
            names = ", ".join(tool.name for tool in connection.tools)
            got = f"{expected}, and {connection.options.name} offers {names} with {found}"
            raise ConfigError(
                f"{field}.digest", got, "set digest to the new value if you want to train with these tools"
            )
        for tool in connection.tools:
            if tool.name in tools:
                got = f"a tool {tool.name!r} of {tools[tool.name].source} and of {tool.source}"
                raise ConfigError(f"{field}.prefix", got, "set prefix for one server, or exclude the tool with allow")
            tools[tool.name] = tool
    if not tools:
        raise ConfigError("environment.servers", "no tool at all", "add a server that offers tools")
    return tuple(tools.values())
