# SPDX-License-Identifier: Apache-2.0
"""Sandbox: what a box and a program in it cost, beside the same program without one, and through a run's pool of boxes.

`open` is the time until a program may run in a new box, the others are of programs in it; `added` is what a new box and a
program in it take beyond the program alone. `pool` asks as a run does, in the process of the sandbox, and `at once` opens many
boxes of one program each side by side. `code` is the time that the reward `code` takes for each of many programs, as a run
scores them; its last rows divide by the time without isolation. `worker` is the start of a process: of authors' code with its
keeper, and of trusted code.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable

from relax_core.api import Chosen, Message, Sandbox, SandboxLimits, SystemClock, Task, Trajectory
from relax_core.api.role import WorkerSpec
from relax_core.config.run_config import DEFAULT_SANDBOX, RewardChoice, SandboxChoice
from relax_core.registry import Catalogue
from relax_core.rewards.scorer import RewardScorer
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sandboxes.pool import SandboxPool
from tests.benchmarks import report

LIMITS = SandboxLimits()
PYTHON = ("-I", "-S", "-c", "pass")
PLAIN = "process"
"""The sandbox that isolates nothing."""
SANDBOXES = (PLAIN, "landlock", "bubblewrap")
CASES = [{"input": "1 2\n", "output": "3"}, {"input": "3 4\n", "output": "7"}]
PROGRAM = "```python\nprint(sum(map(int, input().split())))\n```"
SAMPLE = Trajectory((Message("user", "?"), Message("assistant", PROGRAM)), PROGRAM, ())


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
    pool = SandboxPool(None, ProcessStarter(workers))
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
    opened, inside, alone = (statistics.median(took[name]) for name in ("open", "true in a box", "true without"))
    return [
        *rows,
        {"what": "added by a box and true in it", "p50 ms": opened + inside - alone, "p95 ms": None},
        {"what": f"pool: {boxes} at once, each", "p50 ms": each, "p95 ms": None},
    ]


async def code_ms(sandbox: str, programs: int) -> float:
    """Milliseconds for each right program of two cases that the reward `code` scores in a sandbox."""
    workers = LocalWorkers()
    pool = SandboxPool(SandboxChoice(chosen=Chosen("sandbox", sandbox)), ProcessStarter(workers))
    scorer = RewardScorer(
        [RewardChoice(chosen=Chosen("reward", "code"))], ProcessStarter(workers), SystemClock(), sandboxes=pool
    )
    try:
        await pool.start()
        await scorer.start()
        samples = [(Task(f"{number}", "?", None, {"cases": CASES}), [SAMPLE]) for number in range(programs)]
        began = time.perf_counter()
        scored = await scorer.score(samples)
        took = time.perf_counter() - began
    finally:
        await scorer.stop()
        await pool.close()
        await workers.close()
    if wrong := [one.error for (one,) in scored if one.value != 1.0]:
        raise RuntimeError(f"{len(wrong)} of {programs} right programs did not score 1, the first with {wrong[0]!r}")
    return took * 1e3 / programs


async def measure_code(programs: int) -> list[report.Row]:
    each = {sandbox: await code_ms(sandbox, programs) for sandbox in SANDBOXES}
    rows: list[report.Row] = [
        {"what": f"code: {programs} programs in {sandbox}, each", "p50 ms": ms, "p95 ms": None}
        for sandbox, ms in each.items()
    ]
    return rows + [
        {"what": f"code: {sandbox}, times that of {PLAIN}", "p50 ms": ms / each[PLAIN], "p95 ms": None}
        for sandbox, ms in each.items()
        if sandbox != PLAIN
    ]


async def measure_workers(repeats: int) -> list[report.Row]:
    """The starts of processes with and without a keeper, by turns."""
    took: dict[bool, list[float]] = {True: [], False: []}
    workers, target = LocalWorkers(), "relax_core.sandboxes.host:SandboxHost"
    for _ in range(repeats):
        for untrusted, times in took.items():
            spec = WorkerSpec("w", Chosen("sandbox", PLAIN), target=target, untrusted=untrusted)
            began = time.perf_counter()
            (worker,) = await workers.start([spec])
            times.append((time.perf_counter() - began) * 1e3)
            await worker.kill()
    kinds = {True: "authors'", False: "trusted"}
    return [
        {"what": f"worker of {kinds[untrusted]} code", "p50 ms": statistics.median(times), "p95 ms": max(times)}
        for untrusted, times in took.items()
    ]


async def measure_all(options: Namespace) -> list[report.Row]:
    return [
        *await measure(options.repeats, options.boxes),
        *await measure_code(options.programs),
        *await measure_workers(options.workers),
    ]


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--boxes", type=int, default=200, help="open at once")
    parser.add_argument("--programs", type=int, default=1000, help="programs that the reward `code` scores")
    parser.add_argument("--workers", type=int, default=20, help="starts of a worker of each kind")
    parser.set_defaults(repeats=200)
    options = parser.parse_args()
    set_up = report.begin(options)
    report.finish("sandbox", set_up, asyncio.run(measure_all(options)), options)
