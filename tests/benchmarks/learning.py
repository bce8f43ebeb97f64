# SPDX-License-Identifier: Apache-2.0
"""Learning: every algorithm by its own defaults, three seeds each: what a held-out set gains.

The task is the quickstart's, for GiGPO a game of several turns.

The change is judged by its standard error over the seeds. It says that an algorithm learns, not which one is best: the task
is tiny, and the learning rate is the recipe's for all of them. With `--out`, rows of other algorithms that are there stay.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.learning_measures import MEASURES, REWARD, SETTINGS, TASKS, Measure, setting
from tests.benchmarks.runs import built, trained

QUICKSTART = "quickstart"
RUN_S = 1200.0
STEPS = 100
POINTS = 12
"""Of a curve."""


def train(recipe: Path, algorithm: str, seed: int, steps: int, more: Sequence[str]) -> dict[str, Any]:
    """One run through the CLI: what it is judged by before and after, and the curve between."""
    report.say(f"{algorithm}, seed {seed}")
    settings = [
        f"algorithm={algorithm}", f"steps={steps}", f"seed={seed}", f"eval.every={steps}", "eval.samples=4",
        "checkpoint.every=0", "rollout.groups_per_step=16", *SETTINGS.get(algorithm, ()), *more,
    ]  # fmt: skip
    records, summary = trained(recipe, settings, RUN_S)
    measure = MEASURES.get(algorithm, REWARD)
    first, last = measure.ends(records)
    return {"first": first, "last": last, "curve": measure.curve(records), "balanced": summary["balanced"]}


def measured(
    algorithm: str, seeds: Sequence[tuple[int, Path]], options: argparse.Namespace, pool: Executor
) -> report.Row:
    """The runs of one algorithm, and what they say."""
    runs = pool.map(lambda one: train(one[1], algorithm, one[0], options.steps, options.set), seeds)
    return row(algorithm, setting(algorithm, options.steps, STEPS, options.set), list(runs))


def row(algorithm: str, setting: str, runs: Sequence[Mapping[str, Any]]) -> report.Row:
    """What the seeds of one algorithm say together; standard errors are positive where it got better."""
    measure = MEASURES.get(algorithm, REWARD)
    changes = [run["last"] - run["first"] for run in runs]
    error = statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else float("nan")
    better = statistics.mean(changes) * (-1 if measure.falls else 1)
    return {
        "algorithm": algorithm,
        "measure": measure.name,
        "setting": setting,
        "before": statistics.mean(run["first"] for run in runs),
        "after": " ".join(f"{run['last']:.3f}" for run in runs),
        "change": statistics.mean(changes),
        "standard errors": better / error if error else float("inf"),
        "curve": curve([run["curve"] for run in runs], measure),
        "balanced": all(run["balanced"] for run in runs),
    }


def curve(drawn: Sequence[Sequence[float]], measure: Measure = REWARD, marks: str = "▁▂▃▄▅▆▇█") -> str:
    """The mean over the seeds in equal parts of the run, from 0 (the lowest mark) to 1, or to the highest part."""
    means = [statistics.mean(values) for values in zip(*drawn, strict=False)]
    parts = [means[at * len(means) // POINTS : (at + 1) * len(means) // POINTS] for at in range(POINTS)]
    height = [statistics.mean(part) for part in parts if part]
    top = 1.0 if measure is REWARD else max(height)
    return "".join(marks[min(len(marks) - 1, max(0, int(value / top * len(marks))))] for value in height)


def recipes(name: str, folder: Path, options: argparse.Namespace) -> list[Path]:
    """One a seed."""
    teacher = "distillation" in options.algorithms
    return options.recipes or [built(folder / f"{name}-{seed}", seed, teacher, name) for seed in options.seeds]


def main() -> None:
    arguments = report.parser(__doc__ or "")
    arguments.add_argument(
        "--recipes",
        nargs="+",
        type=Path,
        help="of built tasks (the quickstart's mostly), one a seed; else they are built",
    )
    arguments.add_argument("algorithms", nargs="+")
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of these algorithms' runs")
    arguments.add_argument("--at-once", type=int, default=1, help="runs side by side; what they learn is the same")
    options = arguments.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        tasks = {TASKS.get(algorithm, QUICKSTART) for algorithm in options.algorithms}
        seeds = {name: list(zip(options.seeds, recipes(name, Path(folder), options), strict=True)) for name in tasks}
        with ThreadPoolExecutor(options.at_once) as pool:
            rows = [
                measured(algorithm, seeds[TASKS.get(algorithm, QUICKSTART)], options, pool)
                for algorithm in options.algorithms
            ]
    others = [row for row in report.recorded("learning", options) if row["algorithm"] not in options.algorithms]
    report.finish("learning", set_up, sorted([*others, *rows], key=lambda row: row["algorithm"]), options)
