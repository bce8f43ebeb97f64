# SPDX-License-Identifier: Apache-2.0
"""Modes: one workload under colocate, then async at several staleness bounds: steps an hour, and what was learnt.

The workload is the quickstart's task behind `tool_waits.py`: samples wait for tools whose times have a heavy tail. Colocate
is tuned first, by how many requests decode together. The bound is computed from colocate's measured parts:
`max(train + publish, (rollout with its tail + last chunk + publish) / (staleness + 1))`, since a group admitted at version
v is trained by the step that starts at v + staleness.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.runs import HERE, built, trained

RUN_S = 900.0
FIRST, LAST = 5, 5
"""Steps at either end that are not steady: caches fill, and nothing new is begun for steps that will not be."""
CHUNKS = 8
"""Parts of a step that are trained while the rest is generated (`roles/step_trainer.py`): only the last one is waited for."""
TUNING_STEPS = 25


def train(recipe: Path, seed: int, steps: int, settings: Sequence[str]) -> dict[str, Any]:
    """One run through the CLI: its steady step time, the parts of it, and what it reached."""
    report.say(f"seed {seed}: {' '.join(settings)}")
    workload = [
        f'plugins=["{HERE / "tool_waits.py"}"]', "environment=tool-waits", f"steps={steps}", f"seed={seed}",
        f"eval.every={steps}", "eval.at_start=false", "checkpoint.every=0",
    ]  # fmt: skip
    lines, summary = trained(recipe, [*workload, *settings], RUN_S)
    found = {line["step"]: line for line in lines if "time/step_s" in line}
    steady = [found[step] for step in sorted(found)][FIRST : -LAST or None]
    return {
        "step_s": (steady[-1]["elapsed_s"] - steady[0]["elapsed_s"]) / (len(steady) - 1),
        "rollout_s": _median(steady, "time/wait_rows_s"),
        "train_s": _median(steady, "time/train_s"),
        "publish_s": _median(steady, "time/publish_s"),
        "rewards": [found[step]["reward/mean"] for step in sorted(found)],
        "held_out": (summary["eval_last"] or {}).get("mean"),
        "max_lag": summary["max_lag"],
        "balanced": summary["balanced"],
    }


def _median(lines: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(line[key] for line in lines)


def tune(recipe: Path, sweep: Sequence[int]) -> tuple[list[report.Row], int]:
    """Colocate at several widths of the engine's batch; the fastest."""
    rows: list[report.Row] = []
    for width in sweep:
        found = train(
            recipe, 0, TUNING_STEPS, ["placement=colocate", "max_staleness=0", f"engine.max_batch_rows={width}"]
        )
        rows.append({"mode": "colocate", "requests at once": width, "step s": found["step_s"]})
    return rows, int(min(rows, key=lambda row: row["step s"])["requests at once"])


def bound_s(colocate: Sequence[dict[str, Any]], staleness: int) -> float:
    """The least time of a step that its measured parts allow."""
    rollout, work, publish = (
        statistics.mean(run[part] for run in colocate) for part in ("rollout_s", "train_s", "publish_s")
    )
    return max(work + publish, (rollout + work / CHUNKS + publish) / (staleness + 1))


def row(mode: str, runs: Sequence[dict[str, Any]], colocate: Sequence[dict[str, Any]], staleness: int) -> report.Row:
    """A line of the table, means over seeds."""
    step_s, base_s = (statistics.mean(run["step_s"] for run in some) for some in (runs, colocate))
    final = [statistics.mean(run["rewards"][-20:]) for run in runs]
    bound = None if mode == "colocate" else bound_s(colocate, staleness)
    return {
        "mode": mode, "staleness": staleness, "step s": step_s, "steps/h": 3600 / step_s, "x colocate": base_s / step_s,
        "bound s": bound, "% of bound": bound and 100 * bound / step_s,
        "rollout s": statistics.mean(run["rollout_s"] for run in runs),
        "train s": statistics.mean(run["train_s"] for run in runs),
        "publish s": statistics.mean(run["publish_s"] for run in runs),
        "max lag": max(run["max_lag"] for run in runs),
        "reward of last 20": " ".join(f"{value:.3f}" for value in final),
        "held-out": " ".join(f"{run['held_out']:.3f}" for run in runs),
    }  # fmt: skip


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--recipes", nargs="+", type=Path, help="of built quickstarts, one a seed; else they are built")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--sweep", nargs="+", type=int, default=[32, 96, 256], help="requests that decode together")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        recipes = options.recipes or [built(Path(folder) / str(seed), seed) for seed in options.seeds]
        rows, width = tune(recipes[0], options.sweep)
        runs = _runs(options, recipes, [f"engine.max_batch_rows={width}"])
    colocate = runs["colocate", 0]
    found = [row(mode, some, colocate, staleness) for (mode, staleness), some in runs.items()]
    set_up["tuning"] = rows
    set_up["curves"] = {
        f"{mode} {staleness}": [run["rewards"] for run in some] for (mode, staleness), some in runs.items()
    }
    print(report.table(rows), file=sys.stderr)
    report.finish("modes", set_up, found, options)


def _runs(
    options: argparse.Namespace, recipes: Sequence[Path], settings: Sequence[str]
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    kinds = [("colocate", 0), *(("async", staleness) for staleness in options.staleness)]
    return {
        (mode, staleness): [
            train(recipe, seed, options.steps, [f"placement={mode}", f"max_staleness={staleness}", *settings])
            for seed, recipe in zip(options.seeds, recipes, strict=True)
        ]
        for mode, staleness in kinds
    }
