# SPDX-License-Identifier: Apache-2.0
"""Samples: CPU of the driver's process for a delivery of single-turn samples, from issue to rows and records, by part.

Engine (`metronome.py`) and reward are children as in a run, so that the way to them counts; there is no bus.
Process time, not wall: other work on the machine changes little.
"""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from relax_core.api import AttemptId, Issue, SystemClock, Version
from relax_core.bus.service import open_bus
from relax_core.bus.store import InProcessBus
from relax_core.config.compose import compose
from relax_core.control.planner import plan
from relax_core.observe.run_directory import RunDirectory
from relax_core.registry.catalogue import Catalogue
from relax_core.runners.context import RoleContext, collected_seldom
from relax_core.runners.launch import Launch, bus_settings
from relax_core.runners.local.workers import LocalWorkers
from relax_core.runners.run_status import RunStatusService
from relax_core.sampling.rollout_worker import RolloutWorker
from relax_core.sampling.rows import completion_values, measures, records, row_batch
from relax_core.weights.registry import WeightRegistry
from tests.benchmarks import report
from tests.benchmarks.runs import HERE, built

GROUP = 8
FIRST = 3
"""Deliveries that count for nothing."""


class Parts:
    """Seconds of process time by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._at = time.process_time()

    def begin(self) -> None:
        self._at = time.process_time()

    def end(self, part: str) -> None:
        now = time.process_time()
        self.seconds[part].append(now - self._at)
        self._at = now


def launched(recipe: Path, run: Path) -> tuple[Launch, Catalogue]:
    plugins = (str(HERE / "metronome.py"),)
    catalogue = Catalogue.load(plugins)
    own = {
        "plugins": list(plugins), "trainer": "metronome-trainer", "weights": "metronome-transport",
        "engine": {"name": "metronome-engine", "generate_s": 0.05, "parts": 2}, "eval": {"every": 0},
        "model": {"path": str(recipe.parent / "model")}, "data": {"train": str(recipe.parent / "train.jsonl")},
        "algorithm": "grpo", "rewards": ["exact"], "rollout": {"max_new_tokens": 8, "group_size": GROUP},
    }  # fmt: skip
    config = compose([own], (), catalogue, on_disk=False).config
    return Launch("samples", str(run), config.dump(), plan(config, catalogue), plugins), catalogue


async def deliver(worker: RolloutWorker, folder: RunDirectory, first: int, count: int, parts: Parts) -> None:
    """What the role does with `count` samples, without the bus."""
    version = Version("actor", 0, 0)
    issues = [
        Issue(group, tuple(AttemptId(group, sample, 0) for sample in range(GROUP)))
        for group in range(first, first + count // GROUP)
    ]  # fmt: skip
    parts.begin()
    made = await asyncio.gather(*(asyncio.create_task(worker.make(issue, version)) for issue in issues))
    parts.end("make")
    judged = await worker.score(made)
    parts.end("judge")
    row_batch([sample for one in judged for sample in one.samples])
    parts.end("rows")
    found = records(judged)
    measures(judged)
    completion_values([trajectory for one in judged for trajectory in one.trajectories])
    parts.end("records")
    folder.append_samples(first, found)
    parts.end("write")


async def measure(recipe: Path, count: int, deliveries: int, profile: cProfile.Profile | None) -> Parts:
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as temporary:
        run = Path(temporary) / "run"
        folder = RunDirectory.create(run, "samples", datetime.now(UTC), Random(0))
        launch, catalogue = launched(recipe, run)
        clock = SystemClock()
        workers = LocalWorkers(launch.plugin_files, clock=clock)
        bus = await open_bus(InProcessBus(), bus_settings(launch), launch.run_dir, Version("actor", 0, 0), clock)
        context = RoleContext("rollout", launch, catalogue, bus, WeightRegistry(clock), RunStatusService(clock), workers,
                              workers, clock, 0)  # fmt: skip

        async def tell(what: str, detail: str, seconds: float) -> None:
            report.say(f"{what}: {detail}")

        worker = await RolloutWorker.open(context, tell)
        parts = Parts()
        try:
            with collected_seldom():
                for number in range(FIRST + deliveries):
                    if number == FIRST:
                        parts = Parts()
                        if profile is not None:
                            profile.enable()
                    await deliver(worker, folder, number * count // GROUP, count, parts)
        finally:
            if profile is not None:
                profile.disable()
            await worker.close()
            await workers.close()
            await bus.close()
        return parts


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--samples", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--deliveries", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="show where the time of the first size goes")
    parser.add_argument("--recipe", type=Path, help="of a built quickstart; else one is built, which takes a minute")
    options = parser.parse_args()
    set_up = report.begin(options)
    profile = cProfile.Profile(time.process_time) if options.profile else None
    rows = []
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        recipe = options.recipe or built(Path(folder) / "recipe", 0)
        for count in options.samples:
            parts = asyncio.run(measure(recipe, count, options.deliveries, profile))
            median = {part: sorted(found)[len(found) // 2] * 1e3 for part, found in parts.seconds.items()}
            rows.append({"samples": count, **{f"{part} ms": ms for part, ms in median.items()},
                         "all ms": sum(median.values())})  # fmt: skip
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(50)
                profile = None
    report.finish("samples", set_up, rows, options)
