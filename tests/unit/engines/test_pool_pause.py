# SPDX-License-Identifier: Apache-2.0
"""A paused pool samples nothing and loses nothing, whatever its engines can do and whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.processes import stop
from tests.unit.engines.pool_fixtures import NONE, Gate, ask, call, engines, left, manifest, under_way, until
from tests.unit.engines.scripted_engine import HELD_BACK, LONG


@pytest.mark.parametrize("kind", ["ScriptedEngine", "AbortingEngine"])
async def test_nothing_is_sampled_while_paused_and_every_token_is_kept(kind: str, gate: Gate) -> None:
    async with engines(2, kind=kind) as (pool, _, told):
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG) for n in range(6)]))
        await until(lambda: left(pool) == 6 * HELD_BACK)  # nothing is on its way here
        await pool.supervisor.pause()
        gate.open()
        before = left(pool)
        late = asyncio.create_task(ask(pool, [call(1000, 2)]))
        await asyncio.sleep(0.1)
        assert left(pool) == before
        assert not asked.done()
        assert not late.done()
        await pool.supervisor.resume()
        for number, completion in enumerate(await asked):
            assert completion.tokens == tuple(range(number * 100 + 1, number * 100 + 1 + LONG))
            assert len(completion.log_probs) == len(completion.versions) == LONG
            assert completion.finish == "length"
        assert (await late)[0].tokens == (1001, 1002)
        assert told == []


async def test_an_engine_that_cannot_let_go_is_paused_when_its_requests_have_ended(gate: Gate) -> None:
    async with engines(1, kind="DrainingEngine") as (pool, _, _told):
        asked = asyncio.create_task(ask(pool, [call(0, LONG)]))
        await under_way(pool, 1)
        pausing = asyncio.create_task(pool.supervisor.pause())
        await asyncio.sleep(0)
        gate.open()
        await pausing
        assert (await asked)[0].tokens == tuple(range(1, LONG + 1))


async def test_a_deterministic_pool_is_paused_when_its_requests_have_ended(gate: Gate) -> None:
    """Held in the middle they would go on without their caches, and computed anew these are not the same bits."""
    async with engines(1, deterministic=True) as (pool, _, _told):
        asked = asyncio.create_task(ask(pool, [call(0, LONG)]))
        await until(lambda: left(pool) == HELD_BACK)
        pausing = asyncio.create_task(pool.supervisor.pause())
        late = asyncio.create_task(ask(pool, [call(1000, 2)]))
        await asyncio.sleep(0.1)
        assert not pausing.done()
        gate.open()
        await pausing
        assert left(pool) == 0 and not late.done()
        assert (await asked)[0].tokens == tuple(range(1, LONG + 1))
        await pool.supervisor.resume()
        assert (await late)[0].tokens == (1001, 1002)


async def test_an_engine_that_dies_while_paused_comes_back_paused(gate: Gate) -> None:
    async with engines(1) as (pool, _, told):
        asked = asyncio.create_task(ask(pool, [call(0, LONG)]))
        await under_way(pool, 1)
        await pool.supervisor.pause()
        os.kill(pool.facts()["engine-0"]["pid"], signal.SIGKILL)
        gate.open()
        await until(lambda: "recovered" in told)
        assert pool.facts()["engine-0"]["paused"]
        assert not asked.done()
        await pool.supervisor.resume()
        assert (await asked)[0].tokens == tuple(range(1, LONG + 1))


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("ScriptedEngine", "generate"),
        ("ScriptedEngine", "pause"),
        ("ScriptedEngine", "update"),
        ("AbortingEngine", "pause"),
    ],
)
async def test_a_hanging_engine_is_detected_by_its_silence_in_any_call(kind: str, asked: str, gate: Gate) -> None:
    async with engines(1, kind=kind, silence_s=1.0) as (pool, _, told):
        answers = asyncio.create_task(ask(pool, [call(0, LONG)]))
        await under_way(pool, 1)
        await asyncio.to_thread(stop, pool.facts()["engine-0"]["pid"])
        gate.open()
        if asked == "pause":
            await pool.supervisor.pause()
            await pool.supervisor.resume()
        elif asked == "update":
            await pool.supervisor.update(manifest(3), NONE)
        assert (await answers)[0].tokens == tuple(range(1, LONG + 1))
        await until(lambda: "recovered" in told)


async def test_weights_that_land_while_paused_sample_only_what_comes_after(gate: Gate) -> None:
    async with engines(1) as (pool, receipts, _told):
        asked = asyncio.create_task(ask(pool, [call(0, LONG)]))
        await under_way(pool, 1)
        await pool.supervisor.pause()
        assert await pool.supervisor.update(manifest(3), NONE) == ("engine-0",)
        gate.open()
        await pool.supervisor.resume()
        (completion,) = await asked
        assert completion.tokens == tuple(range(1, LONG + 1))
        assert sorted(set(completion.versions)) == [0, 3]
        assert list(completion.versions) == sorted(completion.versions)
        assert [receipt.version.step for receipt in receipts] == [3]


async def test_a_request_given_up_while_paused_is_forgotten(gate: Gate) -> None:
    async with engines(1) as (pool, _, _told):
        asked = asyncio.create_task(ask(pool, [call(0, LONG)]))
        await under_way(pool, 1)
        await pool.supervisor.pause()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        gate.open()
        await pool.supervisor.resume()
        await until(lambda: left(pool) == 0)
        assert (await ask(pool, [call(5, 2)]))[0].tokens == (6, 7)


async def test_pausing_twice_and_resuming_at_once_leaves_the_pool_serving(gate: Gate) -> None:
    async with engines(2, kind="AbortingEngine") as (pool, _, _told):
        asked = asyncio.create_task(ask(pool, [call(n * 100, LONG) for n in range(4)]))
        await under_way(pool, 4)
        await asyncio.gather(pool.supervisor.pause(), pool.supervisor.pause(), pool.supervisor.resume())
        gate.open()
        assert [len(completion.tokens) for completion in await asked] == [LONG] * 4


async def test_closing_a_pool_waits_for_an_offload_and_leaves_nothing_to_offload(gate: Gate) -> None:
    async with engines(2, kind="OffloadingEngine", offload_parts=["kv", "weights"]) as (pool, _, told):
        await pool.supervisor.pause()
        offloading = asyncio.create_task(pool.supervisor.offload(["kv"]))
        await asyncio.sleep(0.1)
        assert not offloading.done()
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0.1)
        assert not offloading.done()
        gate.open()
        await closing
        assert await offloading == 2
        assert await pool.supervisor.offload(["kv", "weights"]) == 0
        await asyncio.sleep(0.1)
        assert told == []
