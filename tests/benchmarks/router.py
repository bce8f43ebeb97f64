# SPDX-License-Identifier: Apache-2.0
"""Router: what a request costs between who asks and its engine, and how many of many are lost or wrong when engines die.

Engines are real processes (`tests/unit/engines/scripted_engine.py`) whose next token is the last one plus one, so that a
token that is missing, doubled or of another request is seen. Overhead is of a request that is alone: the time until its
answer, less that of the same words said to the engine without a pool.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from random import Random

from relax_core.api.engine import GenerateRequest
from relax_core.engines.pool import EnginePool
from relax_core.engines.requests import PendingRequest
from relax_core.engines.router import RequestLimits
from tests.benchmarks import report
from tests.unit.engines.pool_fixtures import NONE, engines, manifest, until

LIMITS = RequestLimits(per_engine=256, backlog=512)


COLUMNS = ("what", "requests", "p50 ms", "cpu ms", "lost or wrong", "kills", "publishes", "replaced", "s")


async def overhead(requests: int) -> report.Row:
    """One request after another, each of a token, with and without the pool."""
    async with engines(1, limits=LIMITS) as (pool, _, _told):
        slot = pool._slots["engine-0"]
        routed: list[float] = []
        direct: list[float] = []
        cpu = 0.0
        for number in range(requests):
            began, cpu_began = time.perf_counter(), time.process_time()
            await pool.generate([PendingRequest((number % 500,), 1)])
            routed.append(time.perf_counter() - began)
            cpu += time.process_time() - cpu_began
            began = time.perf_counter()
            async for _ in slot.generate((GenerateRequest(f"direct-{number}", (number % 500,), 1),)):
                pass
            direct.append(time.perf_counter() - began)
        p50 = statistics.median(routed) - statistics.median(direct)
        return {"what": "overhead", "requests": requests, "p50 ms": p50 * 1e3,
                "cpu ms": cpu / requests * 1e3}  # fmt: skip


async def losses(requests: int, kill_s: float, publish_s: float) -> report.Row:
    """Many at once, on three engines, of which one is killed and all get new weights again and again."""
    random, began = Random(0), time.perf_counter()
    async with engines(3, limits=LIMITS) as (pool, _, told):
        asked = [PendingRequest((n % 500,), random.randint(1, 12), seed=n) for n in range(requests)]
        counts = {"kills": 0, "publishes": 0}
        trouble = [asyncio.create_task(_kill(pool, kill_s, random, counts)),
                   asyncio.create_task(_publish(pool, publish_s, counts))]  # fmt: skip
        await asyncio.gather(*(pool.generate([one]) for one in asked), return_exceptions=True)
        for task in trouble:
            task.cancel()
        await asyncio.gather(*trouble, return_exceptions=True)
        wrong = sum(not _right(one) for one in asked)
        return {"what": "losses", "requests": requests, "lost or wrong": wrong, **counts,
                "replaced": told.count("recovered"), "s": time.perf_counter() - began}  # fmt: skip


def _right(one: PendingRequest) -> bool:
    first = one.prompt[-1] + 1
    return (
        one.finish == "length"
        and one.tokens == list(range(first, first + one.max_new_tokens))
        and len(one.log_probs) == len(one.versions) == len(one.tokens)
    )


async def _kill(pool: EnginePool, every_s: float, random: Random, counts: dict[str, int]) -> None:
    """Of an engine that serves, never the last one that does."""
    while True:
        await asyncio.sleep(every_s)
        await until(lambda: sum(facts["serving"] for facts in pool.facts().values()) > 1, 300.0)
        serving = [facts["pid"] for facts in pool.facts().values() if facts["serving"]]
        os.kill(random.choice(serving), signal.SIGKILL)
        counts["kills"] += 1


async def _publish(pool: EnginePool, every_s: float, counts: dict[str, int]) -> None:
    while True:
        await asyncio.sleep(every_s)
        counts["publishes"] += 1
        await pool.supervisor.update(manifest(counts["publishes"]), NONE)


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--alone", type=int, default=500, help="requests of the overhead's measure")
    parser.add_argument("--kill-s", type=float, default=1.5)
    parser.add_argument("--publish-s", type=float, default=0.7)
    options = parser.parse_args()
    set_up = report.begin(options)
    rows = [asyncio.run(overhead(options.alone)),
            asyncio.run(losses(options.requests, options.kill_s, options.publish_s))]  # fmt: skip
    report.finish("router", set_up, [{name: row.get(name) for name in COLUMNS} for row in rows], options)
