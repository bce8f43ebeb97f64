# SPDX-License-Identifier: Apache-2.0
"""Sandbox: what a box and a program in it cost, beside the same program without one, and through a run's pool of boxes.

`open` is the time until a program may run in a new box, the others are of programs in it; `pool` asks as a run does, in the
process of the sandbox, and `at once` opens many boxes of one program each side by side.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

from relax_core.api import Chosen, Sandbox, SandboxLimits
from relax_core.config.run_config import DEFAULT_SANDBOX
from relax_core.registry import Catalogue
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sandboxes.pool import SandboxPool
from tests.benchmarks import report

LIMITS = SandboxLimits()
PYTHON = ("-I", "-S", "-c", "pass")


async def timed(into: list[float], work: Callable[[], Awaitable[object]]) -> None:
    began = time.perf_counter()
    await work()
    into.append((time.perf_counter() - began) * 1e3)


async def plainly(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command)
    await process.wait()


async def measure(repeats: int, boxes: int) -> list[report.Row]:
    sandbox: Sandbox = Catalogue.load().build(Chosen("sandbox", DEFAULT_SANDBOX), Sandbox)
    took: dict[str, list[float]] = {}
    for _ in range(repeats):
        began = time.perf_counter()
        box = await sandbox.open(LIMITS)
        took.setdefault("open", []).append((time.perf_counter() - began) * 1e3)
        for name, words in (("true", ["/bin/true"]), ("python", [box.python, *PYTHON])):
            await timed(
                took.setdefault(f"{name} in a box", []), lambda words=words: box.run(words, b"", {}, 0.0, False)
            )
            await timed(took.setdefault(f"{name} without", []), lambda words=words: plainly(*words))
        await box.close()
    workers = LocalWorkers()
    pool = SandboxPool(None, workers)
    pool.handlers(LIMITS)
    await pool.start()

    async def one() -> None:
        async with pool.box(LIMITS) as lent:
            await lent.do("run", ("/bin/true",), b"", {}, 0.0, False)

    for _ in range(repeats):
        await timed(took.setdefault("pool: a box, true in it, and its end", []), one)
    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(boxes)))
    each = (time.perf_counter() - began) * 1e3 / boxes
    await pool.close()
    await workers.close()
    rows: list[report.Row] = [
        {"what": what, "p50 ms": statistics.median(times), "p95 ms": sorted(times)[int(0.95 * len(times))]}
        for what, times in took.items()
    ]
    return [*rows, {"what": f"pool: {boxes} at once, each", "p50 ms": each, "p95 ms": None}]


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--boxes", type=int, default=200, help="open at once")
    parser.set_defaults(repeats=200)
    options = parser.parse_args()
    set_up = report.begin(options)
    report.finish("sandbox", set_up, asyncio.run(measure(options.repeats, options.boxes)), options)
