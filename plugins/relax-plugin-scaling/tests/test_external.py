# SPDX-License-Identifier: Apache-2.0
"""Engines that were started elsewhere: who may use them, when they serve, and how they leave or are lost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import AsyncMock

import pytest
from relax_plugin_scaling.engine_host import EngineHost
from relax_plugin_scaling.external import EngineDescription, ExternalWorkers

from relax_core.api import EngineSpec, InfrastructureError, SystemClock, Version, WorkerSpec
from relax_core.api.engine import Capabilities
from relax_core.api.options import Secret
from relax_core.engines.pool import EnginePool
from relax_core.engines.slot import EngineSlot
from relax_core.rpc.connection import RpcServer
from relax_core.runners.local.workers import LocalWorker, LocalWorkers
from tests.unit.engines.pool_fixtures import ENGINE, FORKED, NONE, Gate, ask, call, engines, manifest, under_way, until
from tests.unit.engines.scripted_engine import GATE, LONG
from tests.unit.engines.test_pool_scaling import STEPS, Steps, answered

TOKEN = "0123456789abcdef"
PLUGIN = ("relax-plugin-scripted", "1.0", "abc")
SCRIPTED = EngineDescription("scripted", Capabilities(in_flight_updates=True), (), (PLUGIN,))


class Elsewhere(NamedTuple):
    """A served engine and the run's side of it."""

    host: EngineHost
    address: str
    token: Path

    def workers(self, wanted: EngineDescription = SCRIPTED) -> ExternalWorkers:
        return ExternalWorkers(self.address, Secret(f"file:{self.token}"), wanted, SystemClock())

    def slot(self, name: str) -> EngineSlot:
        return EngineSlot(
            name, ENGINE, EngineSpec({"path": "/of/the/run"}, 64), WorkerSpec(name, ENGINE), self.workers(),
            SCRIPTED.capabilities, silence_s=60.0, address=self.address,
        )  # fmt: skip

    @property
    def child(self) -> LocalWorker:
        """The process of the engine that a run uses."""
        assert self.host._user is not None
        return cast(LocalWorker, self.host._user.worker)

    def kill(self) -> None:
        os.kill(self.child.pid, signal.SIGKILL)


@asynccontextmanager
async def served(folder: Path, kind: str = "ScriptedEngine") -> AsyncIterator[Elsewhere]:
    env = {"PYTHONPATH": os.getcwd(), **({GATE: os.environ[GATE]} if GATE in os.environ else {})}
    target = f"tests.unit.engines.scripted_engine:{kind}"
    spec = WorkerSpec("engine", ENGINE, env=env, target=target, preload=FORKED)
    host = EngineHost(spec, LocalWorkers(), SCRIPTED, Path("/of/the/engine"), TOKEN)
    listener = socket.create_server(("127.0.0.1", 0))
    (token := folder / "token").write_text(f"{TOKEN}\n")
    await host.open(listener)
    try:
        yield Elsewhere(host, f"127.0.0.1:{listener.getsockname()[1]}", token)
    finally:
        await host.close()


async def joined(pool: EnginePool, elsewhere: Elsewhere, name: str = "engine-1") -> Steps:
    steps = Steps()
    pool.grow(elsewhere.slot(name), steps)
    assert await steps.end(name) == "active", steps.why
    return steps


async def test_an_engine_from_elsewhere_serves_once_it_has_proved_published_weights(tmp_path: Path, gate: Gate) -> None:
    async with served(tmp_path) as elsewhere, engines(1) as (pool, receipts, told):
        steps = Steps()
        pool.grow(elsewhere.slot("engine-1"), steps)
        await until(lambda: steps.of("engine-1") == STEPS[:3])
        await ask(pool, [call(0, 2)])
        assert pool.facts()["engine-1"]["state"] == "joining", "its own model folder proves nothing"
        await pool.supervisor.update(manifest(3), NONE)
        assert await steps.end("engine-1") == "active" and steps.of("engine-1") == STEPS
        assert {(receipt.receiver, receipt.version.step) for receipt in receipts} == {("engine-0", 3), ("engine-1", 3)}
        assert pool.facts()["engine-1"]["address"] == elsewhere.address
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG) for n in range(4)]))
        await until(lambda: all(facts["running"] for facts in pool.facts().values()))
        gate.open()
        await answered(asked)
        assert {step for completion in asked.result() for step in completion.versions} == {3}
        child = elsewhere.child
        pool.drain("engine-1", steps)
        await until(lambda: steps.of("engine-1")[-1] == "completed")
        assert await elsewhere.host.ends.get() == "left"
        assert not child.alive and told == [] and list(pool.facts()) == ["engine-0"]


@pytest.mark.parametrize("how", ["its process dies", "the connection ends"])
async def test_a_lost_engine_leaves_the_pool_and_its_requests_continue(tmp_path: Path, gate: Gate, how: str) -> None:
    async with served(tmp_path) as elsewhere, engines(1) as (pool, _, told):
        await pool.supervisor.update(manifest(1), NONE)
        steps = await joined(pool, elsewhere)
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG) for n in range(6)]))
        await under_way(pool, 6)
        if how == "its process dies":
            elsewhere.kill()
        else:
            for connection in elsewhere.host._connections.copy():
                connection.close()
        await until(lambda: list(pool.facts()) == list(pool._router.engines) == ["engine-0"])
        assert steps.of("engine-1") == [*STEPS, "failed"] and "ended during generate" in steps.why
        gate.open()
        await answered(asked)
        assert told == ["failed", "retried"], "it is not replaced"
        assert await elsewhere.host.ends.get() == "lost"
        await joined(pool, elsewhere, "engine-2")
        assert await pool.supervisor.update(manifest(2), NONE) == ("engine-0", "engine-2")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"engine": "vllm"}, "it is an engine scripted, and the run has vllm; serve the same engine"),
        (
            {"capabilities": Capabilities(in_flight_updates=True, score=True)},
            "its score differ from those of the run's",
        ),
        (
            {"plugins": (("relax-plugin-scripted", "2.0", ""),)},
            "its plugin relax-plugin-scripted is 1.0 content abc, and",
        ),
    ],
)
async def test_an_engine_of_another_kind_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    async with served(tmp_path) as elsewhere:
        with pytest.raises(InfrastructureError, match=f"engine-1 at {elsewhere.address}: {why}"):
            await elsewhere.workers(replace(SCRIPTED, **change)).start([WorkerSpec("engine-1", ENGINE)])
        assert elsewhere.host._user is None


async def test_an_engine_of_another_model_does_not_join(tmp_path: Path) -> None:
    async with served(tmp_path, "OddEngine") as elsewhere, engines(1) as (pool, _, told):
        await pool.supervisor.update(manifest(1), NONE)
        steps = Steps()
        pool.grow(elsewhere.slot("engine-1"), steps)
        assert await steps.end("engine-1") == "failed"
        assert "an engine has the vocab_size 1001, the first of its pool None" in steps.why
        assert await elsewhere.host.ends.get() == "lost"
        assert list(pool.facts()) == ["engine-0"] and told == []


async def test_only_one_run_with_the_token_uses_an_engine(tmp_path: Path) -> None:
    async with served(tmp_path) as elsewhere:
        (first,) = await elsewhere.workers().start([WorkerSpec("engine-1", ENGINE)])
        with pytest.raises(ValueError, match="health was called before start"):
            await first.call("health", timeout_s=60.0)
        await first.call("start", EngineSpec({"path": "/of/the/run"}, 64), timeout_s=60.0)
        (second,) = await elsewhere.workers().start([WorkerSpec("engine-1", ENGINE)])
        with pytest.raises(InfrastructureError, match="another run uses this engine"):
            await second.call("start", EngineSpec({}, 64), timeout_s=60.0)
        with pytest.raises(ValueError, match="'_left' is not a method that a run may call"):
            await first.call("_left", timeout_s=60.0)
        assert (await first.call("health", timeout_s=60.0)).version == Version("actor", 0, 0)
        elsewhere.token.write_text("fedcba9876543210")
        with pytest.raises(InfrastructureError, match="refuses the token; give it the token of placement") as caught:
            await elsewhere.workers().start([WorkerSpec("engine-1", ENGINE)])
        assert "fedcba" not in f"{caught.value!r} {caught.value.__cause__!r}"
        await second.kill()
        assert elsewhere.child.alive, "the end of another caller changes nothing"


async def test_nothing_listens_at_the_address_or_something_else_does(tmp_path: Path) -> None:
    (token := tmp_path / "token").write_text(TOKEN)

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    workers = ExternalWorkers(address, Secret(f"file:{token}"), SCRIPTED, SystemClock())
    with pytest.raises(
        InfrastructureError, match=r"is not an engine of Relax, .* server, such as SGLang's, can't prove"
    ):
        await workers.start([WorkerSpec("engine-1", ENGINE)])
    server.close()
    await server.wait_closed()
    with pytest.raises(InfrastructureError, match=r"does not answer .*; is `relax engine serve` running there\?"):
        await workers.start([WorkerSpec("engine-1", ENGINE)])


async def test_a_caller_without_a_greeting_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_plugin_scaling.engine_host.GREET_S", 0.0)
    monkeypatch.setattr("relax_core.rpc.connection.GREET_S", 0.0)
    hub = RpcServer(AsyncMock())
    await hub.open()
    async with served(tmp_path) as elsewhere:
        for opened in (
            asyncio.open_connection(*elsewhere.address.split(":")),
            asyncio.open_unix_connection(f"\0{hub.address.partition(' ')[0]}"),
        ):
            reader, writer = await opened
            assert await reader.read() == b""
            writer.close()
        assert elsewhere.host._user is None
    hub.close()
