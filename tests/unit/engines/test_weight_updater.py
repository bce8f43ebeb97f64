# SPDX-License-Identifier: Apache-2.0
"""Engines that hang, lie or lag on the way to the newest weights: dropped alone, while the others serve at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from relax_core.api import Manifest, Receipt, SystemClock, Version
from relax_core.api.errors import DeadlineExceeded, InfrastructureError
from relax_core.api.weights import Canary, TensorInfo, combined_fingerprint
from relax_core.engines.pool import EnginePool
from relax_core.engines.supervisor import WeightUpdater, difference
from relax_core.runners.local.workers import LocalWorkers
from relax_core.weights.registry import WeightRegistry
from tests.unit.engines.pool_fixtures import NONE, ask, call, slot_of, until


def at(step: int) -> Version:
    return Version("actor", 0, step)


def manifest(step: int, **changes: object) -> Manifest:
    infos = (TensorInfo("weight", (1,), "F32", str(step), 4),)
    made = Manifest(at(step), "full", infos, "", fingerprint=combined_fingerprint(infos))
    return replace(made, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def pool_of(
    *kinds: str, proof: str = "wire", timeout_s: float = 60.0
) -> AsyncIterator[tuple[EnginePool, WeightRegistry, list[str]]]:
    workers, service, told = LocalWorkers(), WeightRegistry(SystemClock()), list[str]()

    async def report(what: str, detail: str, seconds: float) -> None:
        told.append(f"{what} {detail}")

    updates = WeightUpdater(service, SystemClock(), proof, 0.1, timeout_s)
    slots = [slot_of(f"engine-{number}", kind, workers) for number, kind in enumerate(kinds)]
    pool = EnginePool(slots, SystemClock(), updates, report)
    await pool.start()
    try:
        yield pool, service, told
    finally:
        await pool.close()
        await workers.close()


async def test_a_hung_engine_is_dropped_at_its_deadline_and_the_others_serve_at_once() -> None:
    async with pool_of("ScriptedEngine", "HangingEngine", timeout_s=5.0) as (pool, service, told):
        await service.announce(manifest(1), NONE)
        served = asyncio.Event()

        async def arrived(receipt: Receipt) -> None:
            assert (receipt.receiver, receipt.version) == ("engine-0", at(1))
            assert (pool.supervisor.newest(), told) == (at(1), [])
            served.set()

        update = asyncio.create_task(pool.supervisor.update(manifest(1), NONE, arrived))
        await served.wait()
        assert not update.done()
        (completion,) = await ask(pool, [call(0, 3, floor=1)])
        assert completion.versions == (1, 1, 1)
        assert await update == ("engine-0",)
        assert told and told[0].startswith("failed engine-1: ") and "update_weights" in told[0]
        assert await service.receivers("actor") == {"engine-0": at(1)}


async def test_an_engine_with_a_wrong_receipt_is_replaced_and_does_not_serve() -> None:
    async with pool_of("ScriptedEngine", "LyingEngine") as (pool, service, told):
        await service.announce(manifest(1), NONE)
        assert await pool.supervisor.update(manifest(1), NONE) == ("engine-0",)
        assert "engine-1: actor@0.1 differs on arrival" in told[0]
        assert pool.facts()["engine-1"]["serving"] is False
        assert await service.receivers("actor") == {"engine-0": at(1)}


async def test_a_replaced_engine_serves_only_after_its_receipt_for_the_newest_version() -> None:
    async with pool_of("ScriptedEngine") as (pool, service, told):
        await service.announce(manifest(1), NONE)
        await pool.supervisor.update(manifest(1), NONE)
        await service.announce(manifest(2), NONE)
        os.kill(pool.facts()["engine-0"]["pid"], 9)
        asked = asyncio.create_task(ask(pool, [call(0, 2)]))
        await until(lambda: any(line.startswith("recovered") for line in told))
        assert (await asked)[0].versions == (2, 2)
        assert await service.receivers("actor") == {"engine-0": at(2)}


async def test_an_engine_that_joins_with_a_wrong_receipt_never_serves_and_one_that_leaves_is_forgotten() -> None:
    async with pool_of("ScriptedEngine", "ScriptedEngine") as (pool, service, told):
        await service.announce(manifest(1), NONE)
        await pool.supervisor.update(manifest(1), NONE)
        ended: asyncio.Queue[tuple[str, str, str]] = asyncio.Queue()

        def on_step(engine: str, step: str, why: str) -> None:
            if step in ("active", "failed", "completed"):
                ended.put_nowait((engine, step, why))

        pool.grow(slot_of("engine-2", "LyingEngine", pool._slots["engine-0"]._workers), on_step)
        engine, step, why = await ended.get()
        assert (engine, step) == ("engine-2", "failed") and "engine-2: actor@0.1 differs on arrival" in why
        assert await service.receivers("actor") == {"engine-0": at(1), "engine-1": at(1)}
        pool.drain("engine-1", on_step)
        assert await ended.get() == ("engine-1", "completed", "")
        assert await service.receivers("actor") == {"engine-0": at(1)} and told == []


async def test_receipts_of_a_replaced_engine_do_not_count_for_its_successor() -> None:
    """Its receipt is accepted after the next one was started, with the weights of the model folder."""
    async with pool_of("ScriptedEngine") as (pool, service, _):
        await service.announce(manifest(1), NONE)
        await pool.supervisor.update(manifest(1), NONE)
        receipt, slot = service.receipt, pool._slots["engine-0"]
        taken, asked = list[Version](), list[asyncio.Task[object]]()

        async def after_a_death(late: Receipt) -> bool:
            taken.append(late.version)
            if taken == [at(2)]:
                os.kill(pool.facts()["engine-0"]["pid"], 9)
                asked.append(asyncio.create_task(ask(pool, [call(0, 2)])))
                await until(lambda: slot.starts == 2)
            return await receipt(late)

        service.receipt = after_a_death  # type: ignore[method-assign]
        await service.announce(manifest(2), NONE)
        await pool.supervisor.update(manifest(2), NONE)
        ((completion,),) = await asyncio.gather(*asked)  # type: ignore[misc]
        assert completion.versions == (2, 2) and taken == [at(2), at(2)]
        assert slot.starts == 2, "the next one served with weights that it did not have"
        assert await service.receivers("actor") == {"engine-0": at(2)}


async def test_an_engine_whose_version_is_abandoned_during_the_load_loads_the_next() -> None:
    """The rollback is no fault of the engine, which is neither replaced nor left behind."""
    async with pool_of("ScriptedEngine") as (pool, service, told):
        await service.announce(manifest(5), NONE)
        receipt, successor = service.receipt, manifest(3, version=Version("actor", 1, 3))

        async def after_a_rollback(late: Receipt) -> bool:
            if late.version == at(5):
                await service.announce(successor, NONE)
            return await receipt(late)

        service.receipt = after_a_rollback  # type: ignore[method-assign]
        pid = pool.facts()["engine-0"]["pid"]
        await pool.supervisor.update(manifest(5), NONE)
        assert await service.receivers("actor") == {"engine-0": successor.version}
        assert told == [] and pool.facts()["engine-0"]["pid"] == pid


async def test_a_live_version_whose_transfer_is_over_is_wanted_until_it_is_announced_again() -> None:
    async with pool_of("ScriptedEngine") as (pool, service, told):
        live = manifest(1, live=True)
        await service.announce(live, NONE)
        await service.handed_out(at(1))
        update = asyncio.create_task(pool.supervisor.update(live, NONE))
        async with asyncio.timeout(60):
            while await service.wanted("actor") != ("engine-0",):
                await asyncio.sleep(0.01)
        await service.announce(live, NONE)
        assert await update == ("engine-0",)
        assert told == []


async def test_a_live_version_that_is_never_announced_again_ends_at_the_deadline() -> None:
    async with pool_of("ScriptedEngine", timeout_s=0.5) as (pool, service, _):
        live = manifest(1, live=True)
        await service.announce(live, NONE)
        await service.handed_out(at(1))
        slot = pool._slots["engine-0"]
        updates = WeightUpdater(service, SystemClock(), "wire", 0.1, 0.5)
        with pytest.raises(DeadlineExceeded, match="engine-0"):
            await updates.update(slot, live, NONE)


async def test_a_receipt_below_the_required_level_does_not_count() -> None:
    async with pool_of("ScriptedEngine", proof="resident") as (pool, service, told):
        await service.announce(manifest(1), NONE)
        assert await pool.supervisor.update(manifest(1), NONE) == ()
        assert "proved at level wire, want resident" in told[0]


async def test_behaviour_needs_a_canary_in_the_manifest() -> None:
    async with pool_of("ScriptedEngine", proof="behaviour") as (pool, service, _):
        await service.announce(manifest(1), NONE)
        updates = WeightUpdater(service, SystemClock(), "behaviour", 0.1, 30.0)
        with pytest.raises(InfrastructureError, match="without a canary"):
            await updates.update(pool._slots["engine-0"], manifest(1), NONE)


def test_a_canary_compares_every_token_but_the_first() -> None:
    canary = Canary((1, 2, 3), (0.0, -1.0, -2.0))
    assert difference(canary, (5.0, -1.0, -2.25)) == 0.25
    for wrong in ((0.0, -1.0), (0.0, float("nan"), -2.0), (0.0, float("-inf"), -2.0)):
        assert difference(canary, wrong) == float("inf")
