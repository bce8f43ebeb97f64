# SPDX-License-Identifier: Apache-2.0
"""Recipes: what each gains by reinforcement, from a partly warm start, over three seeds, as a user starts it.

Seconds are of the whole run, the warm start and the building of model and data included. With `--out`, curves are drawn
into the folder `images` beside it, and rows of other recipes that are there stay.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.runs import trained

RUN_S = 3600.0
STANDARD = re.compile(r"eval/[^/]+/mean")
"""The mean reward of a recipe's one evaluation set: of held-out tasks, where there are others than those that are trained."""


def train(recipe: str, seed: int, more: Sequence[str]) -> dict[str, Any]:
    """One run through the CLI: the evaluated rewards of its steps of reinforcement."""
    report.say(f"{recipe}, seed {seed}")
    began = time.monotonic()
    records, summary = trained(recipe, [f"seed={seed}", *more], RUN_S)
    seconds = time.monotonic() - began
    curve = [(one["step"], value) for one in records for key, value in one.items() if STANDARD.fullmatch(key)]
    return {"curve": curve, "s": seconds, "ok": summary["balanced"]}


def row(recipe: str, runs: Sequence[Mapping[str, Any]]) -> report.Row:
    """What the seeds of one recipe say together."""
    first, last = ([run["curve"][at][1] for run in runs] for at in (0, -1))
    changes = [after - before for before, after in zip(first, last, strict=True)]
    error = statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else float("nan")
    return {
        "recipe": recipe,
        "before": " ".join(f"{value:.3f}" for value in first),
        "after": " ".join(f"{value:.3f}" for value in last),
        "change": statistics.mean(changes),
        "standard errors": statistics.mean(changes) / error if error else float("inf"),
        "seconds": " ".join(f"{run['s']:.0f}" for run in runs),
        "balanced": all(run["ok"] for run in runs),
        "curves": [run["curve"] for run in runs],
    }


def draw(made: report.Row, seeds: Sequence[int], folder: Path) -> None:
    from relax_plugin_report.charts import reward_picture

    folder.mkdir(parents=True, exist_ok=True)
    curves = {f"seed {seed}": curve for seed, curve in zip(seeds, made["curves"], strict=True)}
    reward_picture(str(made["recipe"]), (), curves).write_png(folder / f"recipe-{made['recipe']}.png")


def main() -> None:
    arguments = report.parser(__doc__ or "")
    arguments.add_argument("recipes", nargs="+")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of these recipes' runs")
    arguments.add_argument("--at-once", type=int, default=1, help="runs side by side; what they learn is the same")
    options = arguments.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for recipe in options.recipes:
            runs = list(pool.map(lambda seed, recipe=recipe: train(recipe, seed, options.set), options.seeds))
            rows.append(row(recipe, runs))
            if options.out:
                draw(rows[-1], options.seeds, options.out.parent / "images")
    others = [row for row in report.recorded("recipes", options) if row["recipe"] not in options.recipes]
    report.finish("recipes", set_up, sorted([*others, *rows], key=lambda one: one["recipe"]), options)
