# SPDX-License-Identifier: Apache-2.0
"""Engines: tokens a second and the time of a finished step through Relax's engine pool, beside each engine's own offline call.

A step is so many requests at once, in groups of eight that share a prompt, and ends with its last token; lengths differ. The
engine behind the pool is a worker in its own interpreter, with seeds and log-probs; its peer (`engines_peer.py`) another
process of that interpreter, without. They take turns on the same prompts, new ones for each step. Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil

from relax_core.api import Chosen, EngineSpec, Manifest, Receipt, SystemClock, WorkerSpec
from relax_core.engines.pool import EnginePool
from relax_core.engines.requests import PendingRequest
from relax_core.engines.slot import EngineSlot
from relax_core.runners.local.workers import LocalWorkers
from tests.benchmarks import report
from tests.benchmarks.engines_peer import WORD
from tests.benchmarks.larger import shaped

ENGINES = ("transformers", "vllm", "sglang")
SIZES = {"200k": (64, 3, 4, 2, 32, 256), "10m": (384, 6, 6, 3, 64, 1024)}
GROUP, PROMPT, LONGEST, SHORTEST, CONTEXT = 8, 32, 64, 8, 128
VOCABULARY = 60
START_S, STEP_S = 300.0, 120.0


class Timed(NamedTuple):
    """Of one step, by the clock and by processor."""

    seconds: float
    cpu: float


@dataclass(frozen=True)
class Step:
    """Prompts, each for a group, and how long each answer becomes."""

    prompts: list[list[int]]
    new: list[int]

    @staticmethod
    def drawn(random: Random, at_once: int) -> Step:
        groups = [[random.randrange(4, VOCABULARY) for _ in range(PROMPT)] for _ in range(at_once // GROUP)]
        prompts = [prompt for prompt in groups for _ in range(GROUP)]
        return Step(prompts, [random.randint(SHORTEST, LONGEST) for _ in prompts])

    @property
    def tokens(self) -> int:
        return sum(self.new)


class Ours:
    """A pool of one engine in a worker."""

    def __init__(self, engine: str, python: str, folder: str) -> None:
        self._workers, chosen = LocalWorkers(), Chosen("engine", engine)
        worker = WorkerSpec("engine-0", chosen, python=python, env=_environment())
        slot = EngineSlot("engine-0", chosen, EngineSpec({"path": folder}, CONTEXT), worker, self._workers)
        self._pool, self._slot, self._numbers = EnginePool([slot], SystemClock(), _Feed(), _tell), slot, 0

    async def start(self) -> None:
        await self._pool.start()

    async def step(self, step: Step) -> Timed:
        groups = self._requests(step)
        begun, cpu = time.perf_counter(), self._cpu()
        await asyncio.gather(*map(self._pool.generate, groups))
        taken = Timed(time.perf_counter() - begun, self._cpu() - cpu)
        if (made := [len(one.tokens) for group in groups for one in group]) != step.new:
            raise RuntimeError(f"{sum(made)} tokens came of {step.tokens}")
        return taken

    def _requests(self, step: Step) -> list[list[PendingRequest]]:
        made = []
        for prompt, count in zip(step.prompts, step.new, strict=True):
            self._numbers += 1
            made.append(PendingRequest(tuple(prompt), count, seed=self._numbers))
        return [made[at : at + GROUP] for at in range(0, len(made), GROUP)]

    def _cpu(self) -> float:
        """Of this process and the engine's."""
        if self._slot.worker is None:
            raise RuntimeError("the engine was never started")
        times = psutil.Process(self._slot.worker.pid).cpu_times()
        return time.process_time() + times.user + times.system

    async def stop(self) -> None:
        await self._pool.close()
        await self._workers.close()


class Peer:
    """The engine's own call, in a process of its interpreter."""

    def __init__(self, engine: str, python: str, folder: str) -> None:
        self._command = [python, str(Path(__file__).parent / "engines_peer.py"), engine, folder, str(CONTEXT)]
        self._log = Path(folder) / f"{engine}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        pipe, environ = asyncio.subprocess.PIPE, {**os.environ, **_environment()}
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=log, env=environ, limit=1 << 20
            )
        await self._said(START_S)

    async def step(self, step: Step) -> Timed:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": step.prompts, "new": step.new}).encode() + b"\n")
        await self._process.stdin.drain()
        return Timed(*json.loads(await self._said(STEP_S)))

    async def _said(self, within_s: float) -> str:
        assert self._process is not None and self._process.stdout is not None
        async with asyncio.timeout(within_s):
            async for line in self._process.stdout:
                if line.decode(errors="replace").startswith(WORD):
                    return line.decode().removeprefix(WORD).strip()
        raise RuntimeError(f"{self._command} ended:\n{self._log.read_text()[-2000:]}")

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class _Feed:
    """Nobody publishes here."""

    async def update(self, slot: EngineSlot, manifest: Manifest, transport: Chosen) -> Receipt:
        raise NotImplementedError

    async def forget(self, slot: EngineSlot) -> None:
        """Nobody remembers."""


async def _tell(what: str, detail: str, seconds: float) -> None:
    report.say(f"{what}: {detail}")


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


async def measured(engine: str, python: str, folder: str, at_once: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each number of requests at once."""
    ours, peer = Ours(engine, python, folder), Peer(engine, python, folder)
    try:
        await asyncio.gather(ours.start(), peer.start())
        return [await _row(ours, peer, count, repeats) for count in at_once]
    finally:
        await peer.stop()
        await ours.stop()


async def _row(ours: Ours, peer: Peer, at_once: int, repeats: int) -> dict[str, Any]:
    random, took = Random(at_once), list[tuple[Step, Timed, Timed]]()
    for turn in range(repeats + 1):
        step = Step.drawn(random, at_once)
        first, second = (ours, peer) if turn % 2 else (peer, ours)
        timed = {id(one): await one.step(step) for one in (first, second)}
        took.append((step, timed[id(ours)], timed[id(peer)]))
    counted = took[1:]
    return {
        "at once": at_once,
        "tokens/s": statistics.median(step.tokens / mine.seconds for step, mine, _ in counted),
        "step s": statistics.median(mine.seconds for _, mine, _ in counted),
        "its own tokens/s": statistics.median(step.tokens / own.seconds for step, _, own in counted),
        "its own step s": statistics.median(own.seconds for _, _, own in counted),
        "of its own": statistics.median(own.seconds / mine.seconds for _, mine, own in counted),
        "of its own, by processor": statistics.median(own.cpu / mine.cpu for _, mine, own in counted),
    }


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--vllm-python", default="", help="an interpreter as `scripts/engine vllm` makes it")
    parser.add_argument("--sglang-python", default="", help="an interpreter as `scripts/engine sglang` makes it")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--at-once", nargs="+", type=int, default=[16, 128], help="requests, in groups of eight")
    options = parser.parse_args()
    pythons = {"transformers": "", "vllm": options.vllm_python, "sglang": options.sglang_python}
    if missing := [name for name in options.engines if name != "transformers" and not pythons[name]]:
        parser.error(f"--{missing[0]}-python: names no interpreter; scripts/engine {missing[0]} makes one")
    if wrong := [count for count in options.at_once if count < GROUP or count % GROUP]:
        parser.error(f"--at-once {wrong[0]}: give a multiple of {GROUP}")
    set_up = report.begin(options)
    report.finish("engines", set_up, _rows(options, pythons), options)


def _rows(options: argparse.Namespace, pythons: dict[str, str]) -> list[report.Row]:
    rows: list[report.Row] = []
    for size in options.sizes:
        with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
            shaped(SIZES[size], 0).save_pretrained(folder)
            for engine in options.engines:
                report.say(f"{size}: {engine}")
                found = asyncio.run(
                    measured(engine, pythons[engine] or sys.executable, folder, options.at_once, options.repeats)
                )
                rows += [{"model": size, "engine": engine, **row} for row in found]
    return rows
