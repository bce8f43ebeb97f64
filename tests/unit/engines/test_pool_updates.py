# SPDX-License-Identifier: Apache-2.0
"""Weights that land in mid-generation: tokens keep their version and log-prob, whether the engine can take them or not."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from relax_core.api import Receipt
from relax_core.engines.requests import PendingRequest
from tests.unit.engines.pool_fixtures import NONE, Gate, ask, call, engines, left, manifest, under_way, until
from tests.unit.engines.scripted_engine import LONG
from tests.unit.sampling.toy_policy import Completion


@pytest.mark.parametrize("kind", ["ScriptedEngine", "AbortingEngine"])
async def test_a_publish_in_mid_generation_changes_only_the_tokens_after_it(kind: str, gate: Gate) -> None:
    async with engines(2, kind=kind) as (pool, receipts, told):
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG) for n in range(4)]))
        await under_way(pool, 4)
        assert await pool.supervisor.update(manifest(1), NONE) == ("engine-0", "engine-1")
        gate.open()
        for number, completion in enumerate(await asked):
            assert completion.tokens == tuple(range(number * 100 + 1, number * 100 + 1 + LONG))
            assert set(completion.log_probs) == {-0.5}
            assert set(completion.versions) == {0, 1}
            assert list(completion.versions) == sorted(completion.versions)
        assert len(receipts) == 2
        assert told == []


async def test_an_engine_that_can_only_drain_takes_weights_after_what_it_runs_and_before_anything_else(
    gate: Gate,
) -> None:
    async with engines(1, kind="DrainingEngine") as (pool, _, told):
        asked = asyncio.create_task(ask(pool, [call(0, LONG)]))
        await under_way(pool, 1)
        updating = asyncio.create_task(pool.supervisor.update(manifest(1), NONE))
        await asyncio.sleep(0)
        late = asyncio.create_task(ask(pool, [call(100, 2)]))
        gate.open()
        await updating
        assert set((await asked)[0].versions) == {0}
        assert (await late)[0].versions == (1, 1)
        assert told == []


async def test_a_watch_ends_a_turn_and_the_engine_continues_other_requests() -> None:
    async with engines(1) as (pool, _, told):
        seen: list[int] = []

        def enough(tokens: object) -> bool:
            seen[:] = list(tokens)  # type: ignore[call-overload]
            return 7 in seen

        first, second = await ask(pool, [PendingRequest((0,), LONG, watch=enough), call(100, 12)])
        assert first.finish == "stop"
        assert first.tokens == tuple(seen) == tuple(range(1, 8))
        assert len(second.tokens) == 12
        await until(lambda: left(pool) == 0)
        assert told == []


async def test_a_deterministic_pool_begins_the_batch_of_a_dead_engine_again_as_it_was(gate: Gate) -> None:
    async with engines(1, deterministic=True) as (pool, _, told):
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG) for n in range(3)]))
        await under_way(pool, 3)
        await pool.supervisor.update(manifest(1), NONE)
        os.kill(pool.facts()["engine-0"]["pid"], signal.SIGKILL)
        gate.open()
        for number, completion in enumerate(await asked):
            assert completion.tokens == tuple(range(number * 100 + 1, number * 100 + 1 + LONG))
            assert set(completion.versions) == {1}, "nothing of what the dead engine gave is left"
        await until(lambda: "recovered" in told)


def weights_of(completion: Completion) -> list[tuple[int, int]]:
    """(incarnation, step) of each token."""
    starts = dict(completion.incarnations)
    told, incarnation = [], -1
    for place, step in enumerate(completion.versions):
        incarnation = starts.get(place, incarnation)
        told.append((incarnation, step))
    return told


async def test_an_engine_that_still_loads_after_a_rollback_gets_and_continues_no_request(
    gate: Gate,
) -> None:
    async with engines(2, kind="SlowEngine") as (pool, _, told):
        await pool.supervisor.update(manifest(15), NONE)
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG, floor=10) for n in range(4)]))
        await under_way(pool, 4)
        arrived = asyncio.Event()

        async def on_arrival(receipt: Receipt) -> None:
            arrived.set()

        updating = asyncio.create_task(pool.supervisor.update(manifest(10, 1), NONE, on_arrival))
        await arrived.wait()
        assert str(pool.supervisor.newest()) == "actor@1.10", "the newest incarnation, not the largest step"
        await until(lambda: pool.facts()["engine-1"]["loading"])  # it may still end what it ran
        slow = pool.facts()["engine-1"]
        assert (slow["version"], slow["loading"], slow["running"]) == ("actor@0.15", "actor@1.10", 0)
        late = await ask(pool, [call(1000 + n * 100, 10, floor=10) for n in range(4)])
        assert not updating.done()
        assert [set(weights_of(one)) for one in late] == [{(1, 10)}] * 4
        gate.open()
        for number, completion in enumerate(await asked):
            assert completion.tokens == tuple(range(number * 100 + 1, number * 100 + 1 + LONG))
            assert set(weights_of(completion)) == {(0, 15), (1, 10)}
        assert await updating == ("engine-0", "engine-1")
        assert told == []


@pytest.mark.parametrize("kind", ["ScriptedEngine", "AbortingEngine"])
async def test_no_request_runs_on_while_its_engine_takes_weights_of_another_incarnation(kind: str, gate: Gate) -> None:
    """Both have the step 0: only what leaves the engine and comes back can be told apart."""
    async with engines(1, kind=kind) as (pool, _, told):
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG) for n in range(4)]))
        await under_way(pool, 4)
        slot = pool._slots["engine-0"]  # its route led further than the pool had heard of
        await slot.update(manifest(0, 1), NONE)
        slot.state.loaded = manifest(0, 1).version
        assert pool.facts()["engine-0"]["running"] == 0
        await pool.supervisor.update(manifest(0, 1), NONE)
        gate.open()
        for number, completion in enumerate(await asked):
            assert completion.tokens == tuple(range(number * 100 + 1, number * 100 + 1 + LONG))
            assert set(completion.versions) == {0}
            assert [incarnation for _, incarnation in completion.incarnations] == [0, 1]
        assert told == []


async def test_an_engine_that_loads_an_abandoned_version_continues_no_request(
    gate: Gate,
) -> None:
    async with engines(1) as (pool, _, told):
        await pool.supervisor.update(manifest(15), NONE)
        asked = asyncio.create_task(ask(pool, [call(0, LONG, floor=10)]))
        await under_way(pool, 1)
        async with pool._slots["engine-0"].update_lock:  # as long as it takes that one, it can't take another
            updating = asyncio.create_task(pool.supervisor.update(manifest(10, 1), NONE))
            await until(lambda: pool.facts()["engine-0"]["running"] == 0)
            late = asyncio.create_task(ask(pool, [call(1000, 2, floor=10)]))
            await asyncio.sleep(0.05)
            assert pool.facts()["engine-0"]["running"] == 0
            assert not (asked.done() or late.done() or updating.done())
        gate.open()
        assert await updating == ("engine-0",)
        assert set(weights_of((await asked)[0])) == {(0, 15), (1, 10)}
        assert set(weights_of((await late)[0])) == {(1, 10)}
        assert told == []
