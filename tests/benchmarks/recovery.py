# SPDX-License-Identifier: Apache-2.0
"""Recovery: how long a run is without a process that was killed at a random moment, beside a bare start of the same process.

One run of the quickstart's model on each runner. Its processes are killed in turns, each after a random pause; the run's own
log tells when the loss was noticed and when the process worked again. Between the kills the same process is started bare,
beside the run and with its load, by nothing but the code that every run starts it with.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import psutil

from relax_core.api.component import Chosen
from relax_core.api.role import WorkerSpec
from relax_core.api.trainer import OptimizerSpec, TrainerSpec
from relax_core.api.weights import Version
from relax_core.config.run_config import RunConfig
from relax_core.control.prepare import plan_run
from relax_core.engines.factories import engine_spec
from relax_core.roles.rank_group import ONE_ARENA
from relax_core.runners.local.workers import LocalWorkers
from tests.benchmarks import report
from tests.benchmarks.quickstart import built
from tests.graph.ray_run import Running, until

START_S, WAIT_S = 300.0, 120.0
CALM_S = 3.0
"""At most, between a recovery and the next kill."""
SETTINGS = (
    "steps=100000", "eval.every=0", "checkpoint.every=10", "checkpoint.keep=2", "rollout.prompts_per_step=8",
    'optimizer.lr=1e-5', "max_staleness=1",
)  # fmt: skip
PLUGINS = "import relax_core.registry.catalogue as c; c.Catalogue.load()"
SHELL = f"import relax_core.runners.ray.shell; {PLUGINS}"
REWARD = f"import relax_core.runners.local.child, relax_core.rewards.host; {PLUGINS}"
BARE = {"advantages shell": SHELL, "rollout shell": SHELL, "reward process": REWARD}
"""Processes whose start is an interpreter and its imports."""
MANY_STEPS = 12
"""Until there is a newer checkpoint: ranks that never get further are not restored for ever."""
Seconds = tuple[float, float, float]
"""Until the loss was noticed, until the process worked again, and of a bare start."""


class Log:
    """The run's own log, read as it grows."""

    def __init__(self, run: Path) -> None:
        self._path, self._read = run / "logs" / "controller.jsonl", 0

    def lines(self) -> list[dict[str, Any]]:
        """Lines since the last call."""
        with self._path.open() as file:
            file.seek(self._read)
            whole = [line for line in file.readlines() if line.endswith("\n")]
        self._read += sum(len(line.encode()) for line in whole)
        return [json.loads(line) for line in whole]

    def recovery(self, role: str) -> tuple[float, float]:
        """Wall-clock times at which its loss was noticed and at which it worked again, once both are there."""
        found: list[dict[str, Any]] = []

        def look() -> dict[str, Any] | bool:
            found.extend(self.lines())
            return next((line for line in found if line.get("recovered") == role), False)

        line = until(look, f"{role} works again", WAIT_S)
        ready = _time(line)
        noticed = (_time(line) for line in found if line.get("failed") == role)
        return next(noticed, ready - line["seconds"]), ready


def _time(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def _reward_process(run: Running) -> tuple[str, int]:
    """The process of the recipe's reward, which the log knows by the name of the first one."""
    name = "reward-exact-0"
    found = (child for child in psutil.Process(run.pid("rollout")).children(recursive=True) if name in child.name())
    return name, next(child.pid for child in found)


def victims(runner: str) -> dict[str, Callable[[Running], tuple[str, int]]]:
    """Kinds of processes: how the name that the log has for one is found, and its process number."""
    found: dict[str, Callable[[Running], tuple[str, int]]] = {
        "engine": lambda run: ("engine", run.fact("rollout", "engines")["engine-0"]["pid"]),
        "actor rank": lambda run: ("actor", run.fact("actor", "ranks")["actor-rank-0"]),
        "reward process": _reward_process,
    }
    if runner == "ray":
        for role in ("advantages", "rollout"):
            found[f"{role} shell"] = lambda run, role=role: (role, run.pid(role))  # type: ignore[misc]
    return found


def bare_start(kind: str, config: RunConfig) -> float:
    """Start such a process with nothing around it; seconds until it could work."""
    began = time.monotonic()
    if kind in BARE:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", BARE[kind]], check=True, timeout=START_S, env=environment)
    else:
        asyncio.run(_start_worker(kind, config))
    return time.monotonic() - began


async def _start_worker(kind: str, config: RunConfig) -> None:
    own: Any
    if kind == "engine":
        chosen, own = config.engine.chosen, engine_spec(config, Version("actor", 0, 0))
    else:
        chosen, model = config.trainer.chosen, config.model.model_dump(mode="json")
        own = TrainerSpec(model, config.learner, OptimizerSpec(1e-5), role="actor", seed=config.seed)
    workers = LocalWorkers()
    try:
        (worker,) = await workers.start(
            [WorkerSpec("bare", Chosen(chosen.kind, chosen.name, chosen.options), env=ONE_ARENA)]
        )
        await worker.call("start", own, timeout_s=START_S)
    finally:
        await workers.close()


def measure(runner: str, recipe: Path, folder: Path, kills: int, seed: int) -> list[report.Row]:
    """Kill every kind so often; a row for each."""
    config = plan_run([recipe], [*SETTINGS, f"run.runner={runner}"]).composed.config
    run = Running(folder / runner, "train", recipe, *SETTINGS, "--runner", runner, "--run-dir", folder / runner)
    random, kinds, taken = Random(seed), victims(runner), defaultdict[str, list[Seconds]](list)
    try:
        run.until_steps(12)
        log = Log(run.path)
        for number in range(kills):
            for kind in random.sample(list(kinds), len(kinds)):
                bare = bare_start(kind, config)
                time.sleep(random.uniform(0, CALM_S))
                detected, ready = _kill(run, log, kinds[kind])
                taken[kind].append((detected, ready, bare))
                report.say(
                    f"{runner} {kind} {number}: noticed {detected:.2f} s, ready {ready:.2f} s, bare {bare:.2f} s"
                )
                run.until_more_steps(MANY_STEPS if kind == "actor rank" else 1)
        run.interrupt()
        run.end(WAIT_S)
        summary = run.summary()
    finally:
        run.kill()
    lost = summary["samples_issued"] - summary["samples_trained"] - summary["samples_in_flight"]  # dropped ones too
    return [_row(runner, kind, taken[kind], lost) for kind in kinds]


def _kill(run: Running, log: Log, find: Callable[[Running], tuple[str, int]]) -> tuple[float, float]:
    """Kill one; seconds until that was noticed, and until it worked again."""
    log.lines()
    role, pid = find(run)
    until(lambda: psutil.pid_exists(pid), f"{role} lives")
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    noticed, ready = log.recovery(role)
    return noticed - killed, ready - killed


def _row(runner: str, kind: str, taken: Sequence[Seconds], lost: int) -> report.Row:
    detected, ready, bare = ([one[at] for one in taken] for at in range(3))
    row: dict[str, Any] = {"runner": runner, "killed": kind, "kills": len(taken)}
    for name, values in (("noticed", detected), ("ready", ready), ("bare start", bare)):
        row |= {
            f"{name} p50 s": statistics.median(values),
            f"{name} p95 s": sorted(values)[round(0.95 * (len(values) - 1))],
        }
    beyond = statistics.median(one[1] - one[2] for one in taken)
    return {**row, "beyond a bare start p50 s": beyond, "samples lost": lost}


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--runners", nargs="+", default=["local", "ray"])
    parser.add_argument("--kills", type=int, default=20, help="of each kind of process")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    set_up = report.begin(options)
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        recipe = built(Path(folder) / "recipe", 0)
        rows = [
            row
            for runner in options.runners
            for row in measure(runner, recipe, Path(folder), options.kills, options.seed)
        ]
    report.finish("recovery", set_up, rows, options)


if __name__ == "__main__":
    main()
