# SPDX-License-Identifier: Apache-2.0
"""Learning: every algorithm on the quickstart's task by its own defaults, three seeds each: what a held-out set gains.

The rise is judged by its standard error over the seeds. It says that an algorithm learns, not which one is best: the task
is tiny, and the learning rate is the recipe's for all of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.quickstart import built

RUN_S = 1200.0
POINTS = 12
"""Of a curve."""
SETTINGS: Mapping[str, Sequence[str]] = {"grpo": ("algorithm.aggregation=sequence",)}
"""What an algorithm needs beside its name; the recipe's own setting of GRPO is not its default."""


def train(recipe: Path, algorithm: str, seed: int, steps: int) -> dict[str, Any]:
    """One run through the CLI: the held-out reward before and after, and the rewards between."""
    report.say(f"{algorithm}, seed {seed}")
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "relax_core", "train", str(recipe), "--run-dir", str(run), "--json"]
        settings = [
            f"algorithm={algorithm}", f"steps={steps}", f"seed={seed}", f"eval.every={steps}", "eval.samples=4",
            "checkpoint.every=0", "rollout.prompts_per_step=16", *SETTINGS.get(algorithm, ()),
        ]  # fmt: skip
        done = subprocess.run(
            [*command, "--runner", "local", *settings], capture_output=True, text=True, timeout=RUN_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{algorithm} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((run / "summary.json").read_text())
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    first, last = summary["eval_first"]["mean"], summary["eval_last"]["mean"]
    return {"first": first, "last": last, "rewards": rewards, "balanced": summary["balanced"]}


def row(algorithm: str, runs: Sequence[Mapping[str, Any]]) -> report.Row:
    """What the seeds of one algorithm say together."""
    rises = [run["last"] - run["first"] for run in runs]
    error = statistics.stdev(rises) / len(rises) ** 0.5 if len(rises) > 1 else float("nan")
    return {
        "algorithm": algorithm,
        "before": statistics.mean(run["first"] for run in runs),
        "after": " ".join(f"{run['last']:.3f}" for run in runs),
        "rise": statistics.mean(rises),
        "standard errors": statistics.mean(rises) / error if error else float("inf"),
        "curve": curve([run["rewards"] for run in runs]),
        "balanced": all(run["balanced"] for run in runs),
    }


def curve(rewards: Sequence[Sequence[float]], marks: str = "▁▂▃▄▅▆▇█") -> str:
    """The mean reward in equal parts of the run, from 0 (the lowest mark) to 1."""
    means = [statistics.mean(values) for values in zip(*rewards, strict=False)]
    parts = [means[at * len(means) // POINTS : (at + 1) * len(means) // POINTS] for at in range(POINTS)]
    height = [statistics.mean(part) for part in parts if part]
    return "".join(marks[min(len(marks) - 1, max(0, int(value * len(marks))))] for value in height)


def main() -> None:
    arguments = report.parser(__doc__ or "")
    arguments.add_argument(
        "--recipes", nargs="+", type=Path, help="of built quickstarts, one a seed; else they are built"
    )
    arguments.add_argument("algorithms", nargs="+")
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = arguments.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        recipes = options.recipes or [built(Path(folder) / str(seed), seed) for seed in options.seeds]
        seeds = list(zip(options.seeds, recipes, strict=True))
        rows = [
            row(algorithm, [train(recipe, algorithm, seed, options.steps) for seed, recipe in seeds])
            for algorithm in options.algorithms
        ]
    report.finish("learning", set_up, rows, options)
