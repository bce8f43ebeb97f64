# SPDX-License-Identifier: Apache-2.0
"""A role's successor goes on with living workers of its predecessor: which ones, in which state, and what becomes of others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from relax_core.api.component import Chosen
from relax_core.api.errors import InfrastructureError, PluginError
from relax_core.api.role import Worker, WorkerSpec
from relax_core.runners import adoption
from relax_core.runners.adoption import AdoptableWorkers
from relax_core.runners.local.workers import LocalWorkers
from tests.processes import gone, stop

CALL_S = 60.0
SETTINGS = {"model": "tiny"}


def spec(name: str = "engine-0", adoptable: bool = True) -> WorkerSpec:
    env, target = {"PYTHONPATH": os.getcwd()}, "tests.unit.runners.hosted:Hosted"
    return WorkerSpec(name, Chosen("role", name), "", env, target=target, adoptable=adoptable)


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[AdoptableWorkers]:
    workers = LocalWorkers(log_dir=tmp_path)
    yield AdoptableWorkers(workers)
    await workers.close()


async def begun(held: AdoptableWorkers, incarnation: int, *specs: WorkerSpec) -> list[Worker]:
    workers = await held.of("rollout", incarnation).start(specs or [spec()], CALL_S)
    for worker in workers:
        if worker.adopted is None:
            await worker.call("start", SETTINGS, timeout_s=CALL_S)
    return list(workers)


async def test_a_successor_gets_the_same_process_and_what_ran_there_is_aborted(held: AdoptableWorkers) -> None:
    (first,) = await begun(held, 1)
    reading = first.stream("endless", timeout_s=CALL_S)
    assert await anext(reading) == 0
    assert await first.call("readers", timeout_s=CALL_S) == 1
    calling = asyncio.create_task(first.call("rest", 0.3, timeout_s=CALL_S))
    await asyncio.sleep(0)
    await first.release()
    assert not gone(first.pid), "it belongs to the run"

    (second,) = await begun(held, 2)
    assert second.pid == first.pid and calling.done()
    assert second.adopted is not None and second.adopted.start == (SETTINGS,)
    assert second.adopted.facts == {"pid": first.pid, "settings": SETTINGS}
    assert await second.call("readers", timeout_s=CALL_S) == 0
    await calling
    await held.end("rollout")
    assert gone(first.pid)


async def test_what_an_incarnation_started_itself_it_never_gets_again_and_no_earlier_one_gets_it(
    held: AdoptableWorkers,
) -> None:
    (one,) = await begun(held, 2)
    (other,) = await begun(held, 2)
    assert other.pid != one.pid and gone(one.pid)
    with pytest.raises(InfrastructureError, match="incarnation 1 of rollout asks for it, and 2 has it"):
        await begun(held, 1)
    assert not gone(other.pid)


async def test_other_settings_and_workers_that_are_not_adoptable_are_started_anew(held: AdoptableWorkers) -> None:
    (one,) = await begun(held, 1)
    (other,) = await begun(held, 2, replace(spec(), memory_mb=1 << 16))
    assert other.adopted is None and gone(one.pid)
    (ended,) = await begun(held, 3, spec("reward-0", adoptable=False))
    await ended.release()
    assert gone(ended.pid)
    (lost,) = await begun(held, 3, spec("reward-1", adoptable=False))
    await held.lost("rollout")
    assert gone(lost.pid) and not gone(other.pid)


async def test_one_that_failed_in_a_call_or_still_runs_one_is_killed_and_one_that_refused_is_not(
    held: AdoptableWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "QUIET_S", 0.2)
    (worker,) = await begun(held, 1)
    with pytest.raises(ValueError, match="got 3"):
        await worker.call("refuse", timeout_s=CALL_S)
    (same,) = await begun(held, 2)
    assert same.pid == worker.pid
    with pytest.raises(PluginError):
        await same.call("fail", timeout_s=CALL_S)
    (fresh,) = await begun(held, 3)
    assert fresh.adopted is None and gone(same.pid)
    spinning = asyncio.create_task(fresh.call("spin", timeout_s=CALL_S))
    await asyncio.sleep(0)
    (again,) = await begun(held, 4)
    assert again.adopted is None and gone(fresh.pid)
    with pytest.raises(InfrastructureError):
        await spinning


async def test_of_ranks_all_are_adopted_or_none_and_a_stopped_process_is_not(
    held: AdoptableWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "ANSWER_S", 0.5)
    ranks = spec("rank-0"), spec("rank-1")
    former = await begun(held, 1, *ranks)
    await asyncio.to_thread(stop, former[1].pid)
    fresh = await begun(held, 2, *ranks)
    assert [one.adopted for one in fresh] == [None, None]
    assert all(gone(one.pid) for one in former)
    await held.close()
    assert all(gone(one.pid) for one in fresh)


async def test_a_start_that_nobody_awaits_any_more_ends_when_a_successor_starts_the_same(
    held: AdoptableWorkers,
) -> None:
    slow = replace(spec(), target="tests.unit.runners.hosted:SlowToBuild")
    waiting = asyncio.create_task(held.start("rollout", 1, [slow], CALL_S))
    await asyncio.sleep(0.05)
    (worker,) = await begun(held, 2)
    with pytest.raises(InfrastructureError, match="its start was ended"):
        await waiting
    assert not gone(worker.pid)


async def test_the_next_start_of_a_run_adopts_what_the_one_before_left_however_roles_are_counted(
    tmp_path: Path,
) -> None:
    workers = LocalWorkers(log_dir=tmp_path)
    held = AdoptableWorkers(workers)
    (engine,) = await begun(held, 3)
    (rank,) = await begun(held, 3, spec("actor-rank-0", adoptable=False))
    (child,) = await workers.start([spec("reward-0")], CALL_S)  # of a pool of the role itself
    kept = await held.keep_adoptable()
    await workers.close(kept)
    assert [worker.pid for worker in kept] == [engine.pid]
    assert gone(rank.pid) and gone(child.pid) and not gone(engine.pid)
    (again,) = await begun(held, 1)
    assert again.pid == engine.pid and again.adopted is not None
    (other,) = await begun(held, 1, spec("engine-1"))
    await workers.close()
    assert gone(engine.pid) and gone(other.pid)
