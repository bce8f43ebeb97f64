# SPDX-License-Identifier: Apache-2.0
"""The policy's calls reach real servers over both transports, and what it did wrong is told to it in words."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from mcp_types import (
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import ValidationError
from relax_plugin_mcp.environment import Mcp
from relax_plugin_mcp.options import McpOptions, ServerOptions
from relax_plugin_mcp.results import content_of

from relax_core.api import Action, Chosen, ConfigError, Outcome, Task, Tool, tools_digest
from relax_core.api.task import Part, ToolCall
from relax_core.config.run_config import EnvironmentChoice
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.host import free_port
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.episode import InProcess, Limits
from relax_core.sampling.tools import found_tools
from tests.unit.sampling.toy_policy import Script, play, texts

SERVERS = str(Path(__file__).with_name("servers.py"))
TASK = Task("one", "Go.")
LIMITS = Limits(200, 8)
ADDS = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def table(kind: str, *arguments: str, name: str = "tools", **more: Any) -> dict[str, Any]:
    return {"name": name, "command": ("python", SERVERS, kind, *arguments), "start_s": 60.0, **more}


OFFERED: dict[str, tuple[Tool, ...]] = {}
"""The tools of servers that a test has asked already: each answer costs the start of a server."""


async def offered(servers: tuple[dict[str, Any], ...]) -> tuple[Tool, ...]:
    key = repr([{**server, "per": "sample"} for server in servers])
    if key not in OFFERED:
        OFFERED[key] = tuple(await Mcp.find_tools(McpOptions(servers=servers)))
    return OFFERED[key]


@asynccontextmanager
async def playing(*servers: dict[str, Any], shared: Any = None, **more: Any) -> AsyncIterator[Any]:
    """An instance that is reset, with its tools; a function that calls one and gives the content of the answer."""
    options = McpOptions(servers=servers, **more)
    environment = Mcp(options)
    environment.tools = await offered(servers)
    environment.shared = shared if shared is not None else await Mcp.open(options)
    try:
        await environment.reset(TASK, 7)

        async def call(name: str, **arguments: Any) -> Any:
            step = await environment.step(Action("", (1,), (ToolCall(name, arguments),)))
            assert not step.done and step.reward is None
            (message,) = step.observation.messages
            assert (message.role, message.name) == ("tool", name)
            return message.content

        call.environment = environment
        yield call
    finally:
        await environment.close()


async def test_calls_are_answered_and_wrong_calls_get_an_error_text() -> None:
    async with playing(table("good")) as call:
        assert await call("add", a=2, b=3) == "5"
        assert (
            await call("add", a=2)
            == "error: the arguments of add do not fit its parameters: $: 'b' is a required property"
        )
        assert "$.a: 'two' is not of type 'integer'" in await call("add", a="two", b=3)
        assert await call("divide", a=1, b=0) == "Error executing tool divide"
        assert await call("add", a=2, b=3) == "5", "the server goes on"
        long = await call("repeat", word="ab", times=16384)
        assert long == "ab" * 8192 + "\n[16384 bytes more are not shown]"
        text, image = await call("draw")
        assert text == Part("a pixel")
        assert image.media.kind == "image" and image.media.source.startswith("data:image/png;base64,iVBOR")
        assert (await call.environment.step(Action("5", (1,)))).done, "a turn without calls is the last"


async def test_servers_of_samples_share_no_state_and_servers_of_workers_do() -> None:
    own, shared = table("counting", name="own"), table("counting", name="all", per="worker", prefix="all_")
    async with playing(own, shared) as first:
        assert [await first("act"), await first("all_act")] == ["acted 1", "acted 1"]
        async with playing(own, shared, shared=first.environment.shared) as second:
            assert [await second("act"), await second("all_act")] == ["acted 1", "acted 2"]
        assert await first("all_act") == "acted 3", "it serves on after another sample's end"
        assert await first("act") == "acted 2"


async def test_the_calls_of_one_turn_are_made_in_order_and_only_so_many() -> None:
    async with playing(table("counting"), calls_per_turn=2) as call:
        step = await call.environment.step(Action("", (1,), (ToolCall("act", {}),) * 3))
    assert [message.content for message in step.observation.messages] == [
        "acted 1", "acted 2", "error: only 2 calls of a turn are made, and this was not",
    ]  # fmt: skip


async def test_a_program_sees_its_own_variables_and_no_credential_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    monkeypatch.setenv("CALC_KEY", "calc-secret")
    given = {"MODE": "plain", "KEY": "env:CALC_KEY"}
    telling = table("telling", "HF_TOKEN", "CALC_KEY", "MODE", "KEY", env=given)
    async with playing(telling) as call:
        assert await call("act") == "unset unset plain calc-secret"
    monkeypatch.delenv("CALC_KEY")
    with pytest.raises(ConfigError, match="env:CALC_KEY.*inherit_env"):
        await Mcp.find_tools(McpOptions(servers=[telling]))


async def test_tools_are_allowed_prefixed_and_held_fast_by_their_digest(address: str) -> None:
    chosen = {"name": "tools", "url": address, "allow": ("divide", "add"), "prefix": "calc_"}
    tools = await Mcp.find_tools(McpOptions(servers=[chosen]))
    assert [(tool.name, tool.description, tool.source) for tool in tools] == [
        ("calc_add", "Add two numbers.", "tools"), ("calc_divide", "Divide two numbers.", "tools"),
    ]  # fmt: skip
    assert tools[0].parameters["required"] == ["a", "b"]
    digest = tools_digest(tools)
    assert await Mcp.find_tools(McpOptions(servers=[{**chosen, "digest": digest}])) == tools
    with pytest.raises(ConfigError, match=f"servers.0.digest: got {digest}, and tools offers calc_add with sha256:"):
        await Mcp.find_tools(McpOptions(servers=[{**chosen, "allow": ["add"], "digest": digest}]))
    with pytest.raises(ConfigError, match="no tool 'multiply', which allow lists; the server has add, divide"):
        await Mcp.find_tools(McpOptions(servers=[{**chosen, "allow": ["multiply"]}]))


async def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="servers.1.prefix: got a tool 'act' of one and of two"):
        await Mcp.find_tools(McpOptions(servers=[table("plain", name="one"), table("plain", name="two")]))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "a"}, "set either command or url"),
        ({"name": "a", "command": ["x"], "url": "http://x"}, "set either command or url"),
        ({"name": "a", "url": "http://x", "env": {"A": "b"}}, "remove env and directory, which belong to a command"),
        ({"name": "a", "command": ["x"], "headers": {"A": "b"}}, "remove headers, which belong to a url"),
        ({"name": "a", "url": "ftp://x"}, "pattern"),
    ],
)
def test_a_server_is_reached_in_one_way(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ServerOptions(**wrong)
    with pytest.raises(ValidationError, match="two servers are named 'a'"):
        McpOptions(servers=[{"name": "a", "command": ["x"]}] * 2)


def test_content_is_shown_up_to_a_bound_and_in_words() -> None:
    cut = content_of(CallToolResult(content=[TextContent(text="äöü")]), 3, True)
    assert cut == "ä\n[4 bytes more are not shown]", "between characters"
    odd = [
        AudioContent(data="AAAA", mime_type="audio/wav"),
        ImageContent(data="AAAAAAAA", mime_type="image/png"),
        ResourceLink(name="x", uri="file:///x", description="a file"),
        EmbeddedResource(resource=TextResourceContents(uri="file:///y", text="inside")),
    ]  # fmt: skip
    said = content_of(CallToolResult(content=odd), 1000, False)
    assert (
        said
        == "[sound, audio/wav, 3 bytes, not shown]\n[image, image/png, 6 bytes, not shown]\n[link to file:///x: a file]\ninside"
    )
    assert content_of(CallToolResult(content=[], structured_content={"sum": 5}), 100, True) == '{"sum": 5}'


# -- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    port = free_port("127.0.0.1")
    server = subprocess.Popen([sys.executable, SERVERS, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                probe.settimeout(0.1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None
            threading.Event().wait(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait()


async def test_a_server_at_an_address_answers_as_a_program_does(address: str) -> None:
    at = {"name": "tools", "url": address, "per": "worker"}
    async with playing(at) as call:
        assert await call("add", a=2, b=3) == "5"
        assert await call("divide", a=1, b=0) == "Error executing tool divide"
        assert "do not fit its parameters" in await call("add", a=2)
        with pytest.raises(RuntimeError, match="server tools: it answered with more than 16777216 bytes"):
            await call("repeat", word="x" * 1000, times=20_000)
        with pytest.raises(RuntimeError, match="more than 16777216 bytes"):
            await call("add", a=2, b=3)
        async with playing(at, shared=call.environment.shared) as after:
            assert await after("add", a=2, b=3) == "5", "the next sample has another connection"


async def test_an_address_without_a_server_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match="server tools: it answered with status 404"):
        await Mcp.find_tools(McpOptions(servers=[{"name": "tools", "url": address + "/nothing"}]))
    with pytest.raises(ConfigError, match="server tools: ConnectError"):
        await Mcp.find_tools(
            McpOptions(servers=[{"name": "tools", "url": f"http://127.0.0.1:{free_port('127.0.0.1')}/mcp"}])
        )


async def test_a_header_carries_its_credential_and_the_error_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    class Guarded(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.headers["authorization"])
            self.send_error(401)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    monkeypatch.setenv("SERVER_KEY", "Bearer secret-key")
    with HTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        at = {
            "name": "tools",
            "url": f"http://127.0.0.1:{server.server_port}",
            "headers": {"authorization": "env:SERVER_KEY"},
        }
        with pytest.raises(ConfigError, match="status 401") as refused:
            await Mcp.find_tools(McpOptions(servers=[at]))
        server.shutdown()
    assert set(heard) == {"Bearer secret-key"}
    assert "secret-key" not in str(refused.value)


# -- in the processes of a run ----------------------------------------------------------------------------------------


async def test_a_sample_calls_a_tool_and_its_result_is_masked(address: str) -> None:
    server = {"name": "tools", "url": address, "allow": ("add",)}
    choice = EnvironmentChoice(chosen=Chosen("environment", "mcp", {"servers": [server]}), timeout_s=60.0)
    workers, build = LocalWorkers(), Catalogue.load().build
    run: Any = type("Run", (), {"environment": choice, "environments": ()})
    script = Script(ADDS, "<tool_call>no", "5")
    try:
        tools = (await found_tools(run, build, workers))["mcp"]
        pool = EnvironmentPool(choice, ProcessStarter(workers), build=build, tools=tools)
        await pool.start()
        async with asyncio.timeout(120):
            trajectory = await pool.play(lambda environment: play(environment, script, limits=LIMITS))
        await pool.stop()
    finally:
        await workers.close()
    assert [tool.name for tool in tools] == ["add"]
    assert trajectory.outcome is Outcome.FINISHED
    (row,) = texts(trajectory)
    assert (
        row
        == f"[user:go][a:{ADDS.upper()}$][tool:5][a:<TOOL_CALL>NO$][tool:<tool_call> was not closed with </tool_call>][a:5$"
    )
    assert trajectory.response == "5" and trajectory.step_rewards == ()


async def test_a_server_that_fails_is_the_outcome_of_the_sample_and_no_reward() -> None:
    server = table("leaving")
    environment = Mcp(McpOptions(servers=[server]))
    environment.tools, environment.shared = await offered((server,)), await Mcp.open(environment.options)
    script = Script('<tool_call>{"name": "act"}</tool_call>', "never said")
    trajectory = await play(InProcess(environment, 60.0), script, limits=LIMITS)
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "server tools: " in trajectory.info["error"]
    assert trajectory.step_rewards == ()
