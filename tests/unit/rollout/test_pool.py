# SPDX-License-Identifier: Apache-2.0
"""The pool over real child processes: nothing is lost when engines die, and nothing serves weights it did not prove."""

from __future__ import annotations

import asyncio
import os
import signal

from relax_core.api import Chosen
from tests.unit.rollout.pool_lab import ask, call, engines, manifest, until


async def test_a_killed_engine_loses_no_request_and_no_token() -> None:
    async with engines(2) as (pool, _, told):
        asked = asyncio.create_task(ask(pool, [call(n * 100, 40) for n in range(8)]))
        await asyncio.sleep(0.15)
        os.kill(pool.facts()["engine-0"]["pid"], signal.SIGKILL)
        done = await asked
        for number, completion in enumerate(done):
            assert completion.tokens == tuple(range(number * 100 + 1, number * 100 + 41))
            assert len(completion.log_probs) == len(completion.versions) == 40
        await until(lambda: "recovered" in told)
        assert told == ["failed", "recovered"]


async def test_a_replaced_engine_serves_only_after_it_proved_the_newest_weights() -> None:
    async with engines(1) as (pool, receipts, told):
        await pool.update(manifest(3), Chosen("weight-transport", "none"))
        os.kill(pool.facts()["engine-0"]["pid"], signal.SIGKILL)
        (completion,) = await ask(pool, [call(0, 3)])
        assert completion.versions == (3, 3, 3)
        assert [receipt.version.step for receipt in receipts] == [3, 3]


async def test_engines_of_a_resumed_run_serve_nothing_before_their_first_weights() -> None:
    async with engines(2, serve=False) as (pool, _, _told):
        assert not pool.serves
        asked = asyncio.create_task(ask(pool, [call(0, 2)]))
        await asyncio.sleep(0.2)
        assert not asked.done()
        await pool.update(manifest(5), Chosen("weight-transport", "none"))
        (completion,) = await asked
        assert completion.versions == (5, 5)


async def test_a_request_below_its_floor_waits_for_an_engine_that_is_new_enough() -> None:
    async with engines(1) as (pool, _, _told):
        asked = asyncio.create_task(ask(pool, [call(0, 2, floor=1)]))
        await asyncio.sleep(0.2)
        assert not asked.done()
        await pool.update(manifest(1), Chosen("weight-transport", "none"))
        assert (await asked)[0].versions == (1, 1)


async def test_a_refused_request_is_its_own_fault_and_the_engine_serves_on() -> None:
    async with engines(1) as (pool, _, told):
        (refused,) = await ask(pool, [call(999, 2)])
        assert refused.finish == "error"
        assert "999" in refused.error
        (served,) = await ask(pool, [call(0, 2)])
        assert served.tokens == (1, 2)
        assert told == []
