# SPDX-License-Identifier: Apache-2.0
"""Servers that fail: nobody waits for ever, nothing is left behind, and what happened is said."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from relax_plugin_mcp.connection import Connection, ServerFailed, SharedServer
from relax_plugin_mcp.environment import Mcp
from relax_plugin_mcp.options import McpOptions, ServerOptions

from relax_core.api import ConfigError
from tests.processes import gone

SERVERS = str(Path(__file__).with_name("servers.py"))


def options(kind: str, *arguments: str, **more: Any) -> ServerOptions:
    return ServerOptions(**{"name": "bad", "command": ("python", SERVERS, kind, *arguments), "start_s": 60.0, **more})


async def opened(of: ServerOptions) -> Connection:
    connection = Connection(of)
    await connection.open()
    return connection


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def all_gone(pids: set[int], timeout_s: float = 20.0) -> bool:
    """Wait until none of these processes lives."""
    until = time.monotonic() + timeout_s
    while not all(map(gone, pids)):
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (options("silent", start_s=1.0), "it did not list its tools within 1 s"),
        (options("endless"), "the list of tools has more than 100 pages"),
        (options("odd"), "Input should be a valid dictionary"),
        (options("nonsense"), "the parameters of its tool act are not a JSON schema"),
        (ServerOptions(name="bad", command=("/nowhere/server",)), "can't be started: No such file or directory"),
        (
            ServerOptions(name="bad", command=("python", "-c", "exit('I need a key')")),
            "it ended; its standard error ends with 'I need a key'",
        ),
        (
            ServerOptions(name="bad", command=("python",), directory=Path("/nowhere")),
            "directory /nowhere does not exist",
        ),
    ],
)
async def test_a_server_that_cannot_be_had_is_refused_with_its_reason(server: ServerOptions, said: str) -> None:
    before = children()
    with pytest.raises(ConfigError, match="environment.servers: got server bad: ") as refused:
        await Mcp.find_tools(McpOptions(servers=[server]))
    assert said in str(refused.value)
    assert await all_gone(children() - before)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("leaving", "server bad: it ended; its standard error ends with 'last words'"),
        ("hanging", "server bad: act did not answer within 1 s"),
        ("flood", "server bad: act did not answer within 1 s"),
        ("unknown", "server bad: it wrote a message of more than 16777216 bytes"),
        ("changing", "server bad: its tools are not those that the run began with: act changed"),
        ("broken", "server bad: act: ValidationError"),
    ],
)
async def test_a_server_that_fails_in_a_call_is_not_an_answer_and_the_next_sample_has_another(
    kind: str, said: str
) -> None:
    before = children()
    shared = SharedServer(options(kind, call_s=1.0 if "did not answer" in said else 60.0))
    connection = await shared.acquire()
    other = await shared.acquire()
    assert other is connection
    with pytest.raises(ServerFailed) as failed:
        await connection.call("act", {})
    assert said in str(failed.value)
    after = await shared.acquire()
    assert (after is connection) == (kind == "broken"), "an answer that is none breaks no connection"
    for one in (connection, other, after):
        await shared.release(one)
    assert connection.unfit == (kind != "broken")
    await after.close()
    assert await all_gone(children() - before)


async def test_a_call_that_is_late_costs_its_own_sample_alone() -> None:
    shared = SharedServer(options("forgetful", call_s=1.0))
    first, second = await shared.acquire(), await shared.acquire()
    with pytest.raises(ServerFailed, match="did not answer"):
        await first.call("act", {})
    assert not (await second.call("act", {})).is_error
    third = await shared.acquire()
    assert third is not first, "a server that was late may be so again"
    await shared.release(first)
    assert not (await second.call("act", {})).is_error
    await shared.release(second)
    assert second.broken, "the last of them closes it"
    await third.close()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("stray", "acted"),
        ("refusing", "error: act needs a stage"),
        ("huge", "error: the result has more than 16777216 bytes"),
        ("huge at the end", "error: the result has more than 16777216 bytes"),
    ],
)
async def test_an_answer_is_an_answer_however_odd(kind: str, said: str) -> None:
    connection = await opened(options(kind))
    try:
        for _ in range(2):
            result = await connection.call("act", {})
            assert [block.text for block in result.content] == [said]
    finally:
        await connection.close()


async def test_a_server_with_other_tools_than_the_run_began_with_is_noticed_at_its_start(tmp_path: Path) -> None:
    server = McpOptions(servers=[options("newer", str(tmp_path / "newer"))])
    environment = Mcp(server)
    environment.tools = await Mcp.find_tools(server)
    (tmp_path / "newer").touch()
    with pytest.raises(ServerFailed, match="its tools are not those that the run began with: act changed"):
        await environment.reset(None, 7)
    await environment.close()


async def test_a_sample_that_is_cancelled_in_a_call_leaves_nothing() -> None:
    before = children()
    connection = await opened(options("hanging"))
    calling = asyncio.create_task(connection.call("act", {}))
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert not connection.broken, "it is the sample that ended"
    await connection.close()
    assert await all_gone(children() - before)


async def test_processes_of_a_server_end_with_its_sample() -> None:
    connection = await opened(options("forking"))
    result = await connection.call("act", {})
    pid = int(result.content[0].text)
    assert not gone(pid)
    await connection.close()
    assert await all_gone({pid})


async def test_servers_end_with_a_worker_that_is_killed() -> None:
    worker = await asyncio.create_subprocess_exec(sys.executable, __file__, stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        pid = int(await worker.stdout.readline())
        started = {child.pid for child in psutil.Process(worker.pid).children(recursive=True)} | {pid}
        assert len(started) == 3, "a guard, a server, and what that has started and lost"
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        await worker.wait()
    assert await all_gone(started)


async def _work() -> None:
    """Be the worker of the test above."""
    connection = await opened(options("forking"))
    result = await connection.call("act", {})
    print(result.content[0].text, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_work())
