# SPDX-License-Identifier: Apache-2.0
"""A pool over scripted engines in real child processes, and what its tests say and wait for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from relax_core.api import Chosen, EngineSpec, Manifest, Receipt, SystemClock, Version, WorkerSpec
from relax_core.api.engine import Capabilities
from relax_core.api.plan import OffloadPart
from relax_core.engines.pool import NO_LIMITS, EnginePool
from relax_core.engines.requests import PendingRequest
from relax_core.engines.router import RequestLimits
from relax_core.engines.slot import EngineSlot
from relax_core.runners.local.workers import LocalWorkers
from tests.unit.engines.scripted_engine import GATE, HELD_BACK
from tests.unit.sampling.toy_policy import Completion, completion_of

ENGINE = Chosen("engine", "scripted")
NONE = Chosen("weight-transport", "none")
FORKED = ("tests.unit.engines.scripted_engine",)
"""Modules that the fork server imports once, so that an engine starts in milliseconds."""
KINDS = {"ScriptedEngine": Capabilities(in_flight_updates=True), "AbortingEngine": Capabilities(),
         "DrainingEngine": Capabilities()}  # fmt: skip


class Gate:
    """Keeps the engines that are started while it is there from ending what is long or slow, until it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> None:
        self.path.touch()


def slot_of(name: str, kind: str, workers: Any, silence_s: float = 60.0) -> EngineSlot:
    """Make the slot of a scripted engine, which starts in a child."""
    env = {"PYTHONPATH": os.getcwd(), **({GATE: os.environ[GATE]} if GATE in os.environ else {})}
    target = f"tests.unit.engines.scripted_engine:{kind}"
    worker = WorkerSpec(name, ENGINE, env=env, target=target, preload=FORKED)
    capabilities = KINDS.get(kind, KINDS["ScriptedEngine"])
    return EngineSlot(name, ENGINE, EngineSpec({}, 64), worker, workers, capabilities, silence_s=silence_s)


@asynccontextmanager
async def engines(
    count: int, serve: bool = True, kind: str = "ScriptedEngine", deterministic: bool = False, silence_s: float = 60.0,
    limits: RequestLimits = NO_LIMITS, offload_parts: Sequence[OffloadPart] = (), workers: Any = None,
) -> AsyncIterator[tuple[EnginePool, list[Receipt], list[str]]]:  # fmt: skip
    workers, receipts, told = workers or LocalWorkers(), [], []
    slots = [slot_of(f"engine-{number}", kind, workers, silence_s) for number in range(count)]

    class DirectUpdates:
        """Give engines what the pool was told of, and believe them."""

        async def update(self, slot: EngineSlot, manifest: Manifest, transport: Chosen) -> Receipt:
            receipts.append(await slot.update(manifest, transport))
            slot.state.loaded = manifest.version
            return receipts[-1]

        async def forget(self, slot: EngineSlot) -> None:
            """Nobody remembers."""

    async def report(what: str, detail: str, seconds: float) -> None:
        told.append(what)

    pool = EnginePool(
        slots,
        SystemClock(),
        DirectUpdates(),
        report,
        serve_at_start=serve,
        deterministic=deterministic,
        limits=limits,
        offload_parts=offload_parts,
    )
    try:
        await pool.start()
        yield pool, receipts, told
    finally:
        await pool.close()
        await workers.close()


def manifest(step: int, incarnation: int = 0) -> Manifest:
    return Manifest(Version("actor", incarnation, step), "full", (), "", fingerprint=f"print-{incarnation}.{step}")


def left(pool: EnginePool) -> int:
    """Tokens that the engines still have to sample for what they hold."""
    return sum(int(facts["tokens_left"]) for facts in pool.facts().values())


def running(pool: EnginePool) -> int:
    return sum(int(facts["running"]) for facts in pool.facts().values())


async def under_way(pool: EnginePool, requests: int) -> None:
    """Wait until so many long requests are in the middle, where a shut gate keeps them."""
    await until(lambda: running(pool) == requests and left(pool) == requests * HELD_BACK)


async def until(ready: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not ready():
            await asyncio.sleep(0.01)


def call(first: int, count: int, floor: int = -1) -> PendingRequest:
    return PendingRequest((first,), count, group_floor=floor)


async def ask(pool: EnginePool, calls: list[PendingRequest]) -> list[Completion]:
    """Send each request as a batch of one."""
    await asyncio.gather(*(pool.generate([one]) for one in calls))
    return [completion_of(one) for one in calls]
