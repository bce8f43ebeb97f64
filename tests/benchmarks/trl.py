# SPDX-License-Identifier: Apache-2.0
"""The race with TRL: samples a second and time to a held-out reward, on the same model folder, tasks, batch and machine.

TRL runs in an interpreter of its own (`--trl-python`, with trl and datasets in it) through `trl_peer.py`, with one thread and
with two; Relax runs the recipe through the CLI, in every combination of runner, staleness and row skipping. Learning rate,
schedule, optimizer, loss and lengths are the recipe's for both. Steps in which an evaluation ran count as their neighbours'
median. `--size 10m` races a larger model that is warmed up on the same tasks, `--dtypes bfloat16` bf16 matmuls on both sides.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.runs import HERE, built, command, records
from tests.benchmarks.usage import Watched

BATCH = 256
FIRST = 5
"""Steps that count for nothing: caches fill, threads start."""
RUN_S = 3600.0
SIZES = {"200k": "", "10m": "384,6,6,3,64,1024"}


@dataclass(slots=True)
class Raced:
    """One run: when each step ended, and the held-out share at some of them."""

    name: str
    ended: dict[int, float]
    evals: list[tuple[int, float]]
    cpu_s: float = 0.0
    """Processor seconds a step, over all of its processes."""
    others: float = 0.0
    """Cores that something else kept busy meanwhile."""
    rewards: list[float] = field(default_factory=list)

    def durations(self) -> dict[int, float]:
        """Seconds of each step; one with an evaluation in it takes as long as those around it."""
        steps = sorted(self.ended)
        spent = {b: self.ended[b] - self.ended[a] for a, b in itertools.pairwise(steps)}
        evaluated = {at + after for at, _ in self.evals for after in (0, 1, 2)}
        plain = {step: spent[step] for step in spent if step not in evaluated}
        return {
            step: plain[step]
            if step in plain
            else statistics.median([plain[near] for near in sorted(plain, key=lambda near: abs(near - step))[:10]])
            for step in spent
        }

    @property
    def step_s(self) -> float:
        durations = self.durations()
        return statistics.mean(durations[step] for step in durations if step > FIRST)

    def reached(self, share: float) -> int | None:
        """The step at which the held-out share first passes this, between two evaluations by a straight line."""
        for (before, low), (after, high) in itertools.pairwise(sorted(self.evals)):
            if low < share <= high:
                return round(before + (after - before) * (share - low) / (high - low))
        return None

    def seconds_to(self, share: float) -> float | None:
        step, durations = self.reached(share), self.durations()
        if step is None:
            return None
        return self.step_s + sum(seconds for at, seconds in durations.items() if at <= step)


def trl(folder: Path, options: argparse.Namespace, seed: int, threads: int, dtype: str) -> Raced:
    report.say(f"TRL, {threads} threads, {dtype}, seed {seed}")
    words = [
        options.trl_python, "-I", str(HERE / "trl_peer.py"), str(folder), "--steps", str(options.steps),
        "--threads", str(threads),
        "--eval-every", str(options.eval_every), "--seed", str(seed), "--dtype", dtype, "--lr", str(options.lr),
    ]  # fmt: skip
    watched = Watched(words, {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}, RUN_S)
    found = json.loads(watched.run().strip().splitlines()[-1])
    steps = {int(step["step"]): step for step in found["steps"]}
    ended = {at: step["elapsed_s"] for at, step in steps.items()}
    first, last = steps[min(FIRST, len(steps) - 1)], steps[max(steps)]
    cpu_s = (last["cpu_s"] - first["cpu_s"]) / (last["step"] - first["step"])
    evals = [(int(at), float(share)) for at, share in found["evals"]]
    rewards = [step["reward"] for step in steps.values() if "reward" in step]
    return Raced(f"TRL {found['trl']}, {threads} threads", ended, evals, cpu_s, _others(watched), rewards)


def relax(
    folder: Path, options: argparse.Namespace, seed: int, runner: str, staleness: int, skips: bool, dtype: str
) -> Raced:
    name = f"Relax {runner}, staleness {staleness}{'' if skips else ', every row'}"
    report.say(f"{name}, {dtype}, seed {seed}")
    algorithm = [] if skips else [f'plugins=["{HERE / "every_row.py"}"]', "algorithm.name=every-row"]
    settings = [
        f"steps={options.steps}", f"seed={seed}", f"max_staleness={staleness}", f"model.dtype={dtype}",
        f"placement={'async' if staleness else options.placement}", "checkpoint.every=0", f"optimizer.lr={options.lr}",
        f"eval.every={options.eval_every}", f"eval.at_start={'true' if options.eval_every else 'false'}", *algorithm,
        *options.set,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as place:
        run = Path(place) / "run"
        watched = Watched(command(folder / "recipe.toml", run, settings, runner), dict(os.environ), RUN_S)
        watched.run()
        lines = records(run)
    steps = {line["step"]: line for line in lines if "time/step_s" in line}
    times = sorted((line["time"] for at, line in steps.items() if at > FIRST))
    own, others = watched.between(times[0], times[-1])
    evals = [(line["step"], line[key]) for line in lines for key in ("eval/held-out/mean",) if key in line]
    return Raced(
        name, {at: line["elapsed_s"] for at, line in steps.items()}, evals, own / max(1, len(times) - 1),
        others / max(1e-9, times[-1] - times[0]), [line["reward/mean"] for line in steps.values()],
    )  # fmt: skip


def _others(watched: Watched) -> float:
    """While the peer ran, its import and evaluations included."""
    start, end = watched.span
    return watched.between(start, end)[1] / max(1e-9, end - start)


def row(raced: Sequence[Raced], dtype: str, target: float, best_trl: float, soonest_trl: float | None) -> report.Row:
    """A line of the table, means over seeds."""
    step_s = statistics.mean(one.step_s for one in raced)
    reached = [one.seconds_to(target) for one in raced]
    known = [seconds for seconds in reached if seconds is not None]
    to_target = statistics.mean(known) if len(known) == len(reached) and known else None
    return {
        "runner": raced[0].name, "dtype": dtype, "step s": step_s, "samples/s": BATCH / step_s, "x TRL": best_trl / step_s,
        "cpu s a step": statistics.mean(one.cpu_s for one in raced),
        f"s to {target:.2f}": to_target,
        "x sooner": soonest_trl / to_target if soonest_trl and to_target else None,
        "step of it": " ".join(str(one.reached(target) or "-") for one in raced),
        "held-out at the end": " ".join(f"{one.evals[-1][1]:.3f}" for one in raced if one.evals),
        "reward of last 20": " ".join(f"{statistics.mean(one.rewards[-20:]):.3f}" for one in raced),
        "other cores": max(one.others for one in raced),
    }  # fmt: skip


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--trl-python", help="interpreter with trl and datasets; without it Relax is measured alone")
    parser.add_argument(
        "--recipes", nargs="+", type=Path, help="folders of built quickstarts, one a seed; else they are built"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--eval-every", type=int, default=20, help="0: speed alone")
    parser.add_argument("--target", type=float, default=0.80, help="held-out share that is raced to")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="of TRL")
    parser.add_argument("--runners", nargs="+", default=["local", "ray"])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--skipping", nargs="+", choices=("on", "off"), default=["on", "off"])
    parser.add_argument("--placement", default="hybrid", help="at staleness 0")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--size", choices=tuple(SIZES), default="200k")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of Relax, KEY=VALUE")
    options = parser.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as place:
        folders = options.recipes or [_built(Path(place) / str(s), s, options.size) for s in options.seeds]
        rows = [line for dtype in options.dtypes for line in _race(options, folders, dtype, set_up)]
    report.finish("trl", set_up, rows, options)


def _race(options: argparse.Namespace, folders: Sequence[Path], dtype: str, set_up: dict[str, Any]) -> list[report.Row]:
    seeds = list(zip(options.seeds, folders, strict=True))
    peers = [
        [trl(folder, options, seed, threads, dtype) for seed, folder in seeds]
        for threads in (options.threads if options.trl_python else ())
    ]
    own = [
        [relax(folder, options, seed, runner, staleness, skips == "on", dtype) for seed, folder in seeds]
        for runner, staleness, skips in itertools.product(options.runners, options.staleness, options.skipping)
    ]
    best = min((statistics.mean(one.step_s for one in peer) for peer in peers), default=float("nan"))
    times = [[one.seconds_to(options.target) for one in peer] for peer in peers]
    soonest = min((statistics.mean(some) for some in times if None not in some), default=None)
    set_up.setdefault("curves", {}).update(
        {
            f"{some[0].name}, {dtype}": [{"held_out": one.evals, "reward": one.rewards} for one in some]
            for some in peers + own
        }
    )
    return [row(some, dtype, options.target, best, soonest) for some in peers + own]


def _built(folder: Path, seed: int, size: str) -> Path:
    """The quickstart's tasks and model, or a larger one that is warmed up on the same tasks."""
    if size == "200k":
        return built(folder, seed).parent
    report.say(f"building a model of {size} parameters and its data, seed {seed}")
    folder.mkdir(parents=True)
    shape = ["--seed", str(seed), "--shape", SIZES[size]]
    subprocess.run([sys.executable, "-m", "tests.benchmarks.larger", str(folder), *shape], check=True, timeout=RUN_S)
    return folder
