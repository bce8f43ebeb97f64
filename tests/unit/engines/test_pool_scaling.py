# SPDX-License-Identifier: Apache-2.0
"""Engines that join and leave a live pool: nothing is lost, and nothing serves weights that it did not prove."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any, cast

import pytest

from relax_core.api import Delta, InfrastructureError, Version
from relax_core.engines.engine_state import EngineState, EngineStatus
from relax_core.engines.pool import EnginePool
from relax_core.engines.requests import PendingRequest
from relax_core.engines.router import Dispatch, RequestLimits, Router
from relax_core.engines.slot import EngineSlot
from relax_core.runners.local.workers import LocalWorker
from tests.unit.engines.pool_fixtures import NONE, Gate, ask, call, engines, left, manifest, slot_of, under_way, until
from tests.unit.engines.scripted_engine import LONG

STEPS = ["creating", "health_checking", "weight_syncing", "active"]


class Steps:
    """The steps of the engines that join and leave a pool."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.why = ""

    def __call__(self, engine: str, step: str, why: str) -> None:
        self.seen.append((engine, step))
        self.why = why or self.why

    def of(self, engine: str) -> list[str]:
        return [step for name, step in self.seen if name == engine]

    async def end(self, engine: str) -> str:
        await until(lambda: bool({"active", "failed", "completed"}.intersection(self.of(engine))))
        return self.of(engine)[-1]


def another(pool: EnginePool, number: int, kind: str = "ScriptedEngine") -> EngineSlot:
    """Make the slot of one more engine."""
    return slot_of(f"engine-{number}", kind, pool._slots["engine-0"]._workers)


def alive(slot: EngineSlot) -> bool:
    return slot.worker is not None and cast(LocalWorker, slot.worker).alive


def die(name: str) -> None:
    raise InfrastructureError(f"{name}: it died")


async def answered(asked: asyncio.Task[Any]) -> None:
    """Check that every long request has all of its tokens, each once and in order."""
    for number, completion in enumerate(await asked):
        assert completion.tokens == tuple(range(number * 100 + 1, number * 100 + 1 + LONG))
        assert len(completion.log_probs) == len(completion.versions) == LONG


async def test_an_engine_that_joins_proves_the_newest_weights_before_it_serves(gate: Gate) -> None:
    async with engines(1) as (pool, receipts, told):
        await pool.supervisor.update(manifest(3), NONE)
        steps = Steps()
        pool.grow(another(pool, 1), steps)
        assert pool.facts()["engine-1"]["state"] == "joining"
        assert await steps.end("engine-1") == "active" and steps.of("engine-1") == STEPS
        assert [(receipt.receiver, receipt.version.step) for receipt in receipts] == [("engine-0", 3), ("engine-1", 3)]
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG) for n in range(4)]))
        await until(lambda: all(facts["running"] for facts in pool.facts().values()))
        gate.open()
        await answered(asked)
        assert {step for completion in asked.result() for step in completion.versions} == {3}
        assert await pool.supervisor.update(manifest(4), NONE) == ("engine-0", "engine-1")
        assert told == []


async def test_an_engine_that_joins_during_an_update_misses_no_version(gate: Gate) -> None:
    async with engines(1) as (pool, receipts, _):
        await pool.supervisor.update(manifest(1, 1), NONE)
        steps = Steps()
        pool.grow(another(pool, 1, "SlowEngine"), steps)
        await until(lambda: pool.facts()["engine-1"]["loading"] == "actor@1.1")
        assert await pool.supervisor.update(manifest(2, 1), NONE) == ("engine-0",)
        assert pool.facts()["engine-1"]["state"] == "joining"
        gate.open()
        assert await steps.end("engine-1") == "active"
        assert [receipt.version.step for receipt in receipts if receipt.receiver == "engine-1"] == [1, 2]
        assert pool._router.engines["engine-1"].version == Version("actor", 1, 2)


async def test_an_engine_joins_a_resumed_run_when_its_first_weights_are_there() -> None:
    async with engines(1, serve=False) as (pool, receipts, _):
        steps = Steps()
        pool.grow(another(pool, 1), steps)
        await until(lambda: steps.of("engine-1") == STEPS[:3])
        assert pool.facts()["engine-1"]["state"] == "joining"
        await pool.supervisor.update(manifest(5), NONE)
        assert await steps.end("engine-1") == "active"
        assert {(receipt.receiver, receipt.version.step) for receipt in receipts} == {("engine-0", 5), ("engine-1", 5)}


async def test_an_engine_that_joins_a_paused_pool_is_paused(gate: Gate) -> None:
    async with engines(1) as (pool, _, _told):
        await pool.supervisor.pause()
        steps = Steps()
        pool.grow(another(pool, 1), steps)
        assert await steps.end("engine-1") == "active"
        assert pool.facts()["engine-1"]["paused"]
        gate.open()
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG) for n in range(4)]))
        await asyncio.sleep(0.05)
        assert left(pool) == 0
        await pool.supervisor.resume()
        await answered(asked)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("DyingEngine", "engine-1 .*ended with status 9 during start; its log is logs/engine-1.log"),
        ("OddEngine", "engine-1: an engine has the vocab_size 1001, the first of its pool None; give all engines"),
        ("SickEngine", "engine-1: unhealthy after its start: its device fell off the bus"),
        ("HangingEngine", "engine-1 did not join within 1 s; its log is logs/engine-1.log"),
    ],
)
async def test_an_engine_that_can_not_join_is_stopped_and_the_pool_serves_on(kind: str, why: str) -> None:
    async with engines(1) as (pool, _, told):
        await pool.supervisor.update(manifest(1), NONE)
        steps, slot = Steps(), another(pool, 1, kind)
        pool.grow(slot, steps, 1.0 if kind == "HangingEngine" else 60.0)
        assert await steps.end("engine-1") == "failed"
        assert re.search(why, steps.why), steps.why
        assert list(pool.facts()) == list(pool._router.engines) == ["engine-0"]
        assert not alive(slot)
        assert (await ask(pool, [call(0, 2)]))[0].tokens == (1, 2)
        assert await pool.supervisor.update(manifest(2), NONE) == ("engine-0",)
        assert told == []


async def test_a_cancelled_join_leaves_nothing() -> None:
    async with engines(1) as (pool, _, told):
        await pool.supervisor.update(manifest(1), NONE)
        steps, slot = Steps(), another(pool, 1, "HangingEngine")
        pool.grow(slot, steps)
        await until(lambda: bool(pool.facts()["engine-1"]["loading"]))
        pool.cancel_join("engine-1")
        pool.cancel_join("engine-0")  # it serves
        assert await steps.end("engine-1") == "completed" and not steps.why
        assert list(pool.facts()) == ["engine-0"] and not alive(slot)
        assert told == []


@pytest.mark.parametrize("kind", ["ScriptedEngine", "AbortingEngine", "DrainingEngine"])
async def test_the_requests_of_an_engine_that_leaves_continue_from_their_last_token(kind: str, gate: Gate) -> None:
    """The last kind can't abort them: they are taken back when the time is over."""
    async with engines(2, kind=kind) as (pool, _, told):
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG) for n in range(6)]))
        await under_way(pool, 6)
        steps, slot = Steps(), pool._slots["engine-1"]
        pool.drain("engine-1", steps, 0.05 if kind == "DrainingEngine" else 60.0)
        assert pool.facts()["engine-1"]["state"] == "leaving"
        assert await steps.end("engine-1") == "completed" and steps.of("engine-1") == ["removing", "completed"]
        assert list(pool.facts()) == list(pool._router.engines) == ["engine-0"]
        assert not alive(slot)
        gate.open()
        await answered(asked)
        assert await pool.supervisor.update(manifest(1), NONE) == ("engine-0",)
        assert told == []


async def test_an_engine_that_dies_while_it_leaves_is_not_replaced(gate: Gate) -> None:
    async with engines(2, kind="DrainingEngine") as (pool, _, told):
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG) for n in range(4)]))
        await under_way(pool, 4)
        steps = Steps()
        pool.drain("engine-1", steps)
        os.kill(pool.facts()["engine-1"]["pid"], signal.SIGKILL)
        assert await steps.end("engine-1") == "completed"
        gate.open()
        await answered(asked)
        assert told == [] and list(pool.facts()) == ["engine-0"]


async def test_an_engine_that_is_being_replaced_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(slot: EngineSlot) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("it never ends")

    async with engines(2) as (pool, _, told):
        monkeypatch.setattr(EngineSlot, "start", never)
        with pool.supervisor.containing(pool._slots["engine-1"]):
            die("engine-1")
        await until(lambda: told == ["failed"])
        steps = Steps()
        pool.drain("engine-1", steps)
        assert await steps.end("engine-1") == "completed"
        assert told == ["failed"] and list(pool.facts()) == ["engine-0"]
        assert (await ask(pool, [call(0, 2)]))[0].tokens == (1, 2)


async def test_an_engine_leaves_in_the_middle_of_loading_weights(gate: Gate) -> None:
    async with engines(2, kind="SlowEngine") as (pool, receipts, told):
        updating = asyncio.create_task(pool.supervisor.update(manifest(1, 1), NONE))
        await until(lambda: [receipt.receiver for receipt in receipts] == ["engine-0"])
        steps = Steps()
        pool.drain("engine-1", steps)
        assert await steps.end("engine-1") == "completed"
        assert await updating == ("engine-0",)
        assert told == [] and (await ask(pool, [call(0, 2)]))[0].versions == (1, 1)


async def test_log_probs_are_computed_elsewhere_when_their_engine_leaves() -> None:
    async with engines(2) as (pool, _, told):
        scoring = asyncio.create_task(pool.score([(1, n + 2) for n in range(8)], 1.0))
        await until(lambda: bool(pool._scored_parts))
        name = next(iter(pool._scored_parts))
        steps = Steps()
        pool.drain(name, steps, 0.0)
        assert await scoring == [(0.0, -float(n + 2)) for n in range(8)]
        assert await steps.end(name) == "completed" and told == []


async def test_closing_a_pool_stops_the_engines_that_join_and_leave(gate: Gate) -> None:
    steps = Steps()
    async with engines(2, kind="DrainingEngine") as (pool, _, told):
        await pool.supervisor.update(manifest(1), NONE)
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG) for n in range(4)]))
        await under_way(pool, 4)
        pool.grow(another(pool, 2, "HangingEngine"), steps)
        await until(lambda: bool(pool.facts()["engine-2"]["loading"]))
        pool.drain("engine-1", steps)
        slots = list(pool._slots.values())
    assert len(slots) == 3 and not any(map(alive, slots))
    assert (steps.of("engine-2")[-1], steps.of("engine-1"), told) == ("weight_syncing", [], [])
    asked.cancel()


def test_the_router_counts_no_capacity_of_an_engine_that_joins_or_leaves() -> None:
    states = [EngineState(name, status=EngineStatus.SERVING) for name in ("one", "two")]
    router = Router(states, RequestLimits(per_engine=2, backlog=1))
    requests = [PendingRequest((1,), 4, id=str(number)) for number in range(4)]
    router.submit(requests, 0.0)
    assert router.has_capacity(1) and not router.has_capacity(2)
    router.join(EngineState("three"))
    assert not router.has_capacity(2)
    assert router.on_proved("three", 0, Version("actor", 0, 0), 0.0) and router.has_capacity(3)
    dispatched = router.dispatch(0.0)
    router.leave("one")
    assert not router.has_capacity(2)
    assert not router.on_proved("one", 0, Version("actor", 0, 1), 1.0), "it does not come back"
    (batch,) = [one.batch for one in dispatched if one.engine == "one"]
    assert router.remove("one") == [] and [request.engine for request in batch] == [""] * len(batch)
    assert router.on_deltas("one", 0, [Delta(batch[0].id, (2,), (-0.1,), 0, 0, "")], 2.0) == []
    assert router.on_stream_end("one", 0, batch) == router.on_failure("one", 0, "late") == []
    again = router.dispatch(2.0)
    assert [type(one) for one in again] == [Dispatch] * len(again) and "one" not in {one.engine for one in again}
    assert sorted(request.id for one in again for request in one.batch) == sorted(request.id for request in batch)
