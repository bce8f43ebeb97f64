# SPDX-License-Identifier: Apache-2.0
"""The pool over real child processes: nothing is lost when engines die or lie, nothing serves weights it did not prove."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from relax_core.api import Chosen, ConfigError, InfrastructureError, WorkerDied
from relax_core.api.errors import PoolFailed
from relax_core.engines.router import RequestLimits
from relax_core.engines.slot import EngineSlot
from relax_core.registry.catalogue import Catalogue
from relax_core.runners.inline import InlineWorkers
from relax_core.sampling.rollout_worker import check_vocabulary
from tests.unit.engines.pool_fixtures import Gate, ask, call, engines, manifest, under_way, until


async def test_a_killed_engine_loses_no_request_and_no_token(gate: Gate) -> None:
    async with engines(2) as (pool, _, told):
        asked = asyncio.create_task(ask(pool, [call(n * 100, 40) for n in range(8)]))
        await under_way(pool, 8)
        os.kill(pool.facts()["engine-0"]["pid"], signal.SIGKILL)
        gate.open()
        done = await asked
        for number, completion in enumerate(done):
            assert completion.tokens == tuple(range(number * 100 + 1, number * 100 + 41))
            assert len(completion.log_probs) == len(completion.versions) == 40
        await until(lambda: "recovered" in told)
        assert told == ["failed", "retried", "recovered"]


async def test_a_pool_that_lost_its_engines_fails_without_an_open_request(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(slot: EngineSlot) -> dict[str, Any]:
        raise WorkerDied(f"{slot.name}: who starts it is dead")

    async with engines(1) as (pool, _, told):
        pool.check()
        monkeypatch.setattr(EngineSlot, "start", lost)
        asked = asyncio.create_task(ask(pool, [call(0, 40), call(100, 40)]))
        await under_way(pool, 2)
        os.kill(pool.facts()["engine-0"]["pid"], signal.SIGKILL)
        with pytest.raises(
            PoolFailed, match="engine-0 failed more than 8 times in a row, last: .*who starts it is dead"
        ):
            await asked
        with pytest.raises(PoolFailed):
            pool.check()
        assert set(told) == {"failed", "retried"}


@pytest.mark.parametrize("paused", [False, True])
async def test_an_engine_whose_replacement_does_not_start_is_replaced_again(
    paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, starts = EngineSlot.start, 0

    async def second_fails(slot: EngineSlot) -> dict[str, Any]:
        nonlocal starts
        starts += 1
        if starts == 2:
            raise InfrastructureError(f"{slot.name}: no memory")
        return await start(slot)

    monkeypatch.setattr(EngineSlot, "start", second_fails)
    async with engines(1, workers=InlineWorkers(Catalogue.load())) as (pool, _, told):
        if paused:
            await pool.supervisor.pause()
        (slot,) = pool._slots.values()
        with pool.supervisor.containing(slot):
            raise InfrastructureError(f"{slot.name}: it died")
        await until(lambda: "recovered" in told)
        assert told == ["failed", "failed", "recovered"] and starts == 3
        assert (slot.restarts, slot.state.paused) == (1, paused)
        if paused:
            await pool.supervisor.resume()
        assert (await ask(pool, [call(0, 2)]))[0].tokens == (1, 2)


async def test_engines_of_a_resumed_run_serve_nothing_before_their_first_weights() -> None:
    async with engines(2, serve=False) as (pool, _, _told):
        assert not pool.supervisor.serving
        asked = asyncio.create_task(ask(pool, [call(0, 2)]))
        await asyncio.sleep(0.2)
        assert not asked.done()
        await pool.supervisor.update(manifest(5), Chosen("weight-transport", "none"))
        (completion,) = await asked
        assert completion.versions == (5, 5)


async def test_only_the_wrong_request_of_a_batch_is_refused() -> None:
    async with engines(1) as (pool, _, told):
        first, wrong, last = await ask(pool, [call(0, 2), call(999, 2), call(100, 3)])
        assert (first.tokens, last.tokens) == ((1, 2), (101, 102, 103))
        assert (wrong.finish, "999" in wrong.error) == ("error", True)
        assert told == []


async def test_engines_whose_vocabularies_differ_do_not_start() -> None:
    with pytest.raises(InfrastructureError, match="vocab_size"):
        async with engines(2, kind="OddEngine"):
            """Never."""


async def test_an_engine_that_dies_while_it_loads_ends_the_start_with_its_name_and_its_log() -> None:
    with pytest.raises(
        WorkerDied, match=r"engine-\d .*ended with status 9 during start; its log is logs/engine-\d.log"
    ):
        async with engines(2, kind="DyingEngine"):
            """Never."""


def test_a_tokenizer_larger_than_the_engines_vocabulary_is_refused() -> None:
    family: Any = SimpleNamespace(vocab_size=64, foreign_tokens={})
    check_vocabulary(family, {"vocab_size": 64})
    check_vocabulary(family, {"vocab_size": 80})
    with pytest.raises(ConfigError, match=r"model.tokenizer: got a tokenizer of 64 .* model has 63; .*the same model"):
        check_vocabulary(family, {"vocab_size": 63})


async def test_a_turn_ends_at_its_deadline_with_the_tokens_it_has_and_frees_its_engine() -> None:
    async with engines(1, limits=RequestLimits(timeout_s=0.2)) as (pool, _, told):
        pending = asyncio.create_task(ask(pool, [call(0, 2, floor=9)]))  # no engine will ever be as new
        (late,) = await pending
        assert (late.finish, late.tokens) == ("deadline", ())
        assert "turn_timeout_s" in late.error
        assert told == []


async def test_more_than_fits_waits_for_admission_and_is_answered_in_its_turn() -> None:
    async with engines(1, limits=RequestLimits(per_engine=2, backlog=2)) as (pool, _, _told):
        asked = asyncio.create_task(ask(pool, [call(n * 100, 3) for n in range(12)]))
        await until(lambda: not pool.room(1))
        assert pool.facts()["engine-0"]["running"] <= 2
        assert [one.tokens[0] for one in await asked] == [n * 100 + 1 for n in range(12)]
        assert pool.room(1)
