# SPDX-License-Identifier: Apache-2.0
"""Soak: thousands of optimizer steps on the video task; memory, descriptors, threads, processes and reward along the way.

Steps are small, so that many are done in minutes. Of every part of the run the medians are told: what grows shows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks import report
from tests.benchmarks.runs import command, records

LOOK_S = 10.0
PARTS = 5
STAGE = 1
"""Of reinforcement."""
SMALL = ("rollout.groups_per_step=4", "rollout.group_size=4", "optimizer.lr=1e-4")


def look(root: psutil.Process) -> dict[str, float]:
    """Of the run and all its children: memory that is theirs alone, and what the system keeps for them."""
    seen = {"memory_mb": 0.0, "descriptors": 0.0, "threads": 0.0, "processes": 0.0}
    for process in (root, *root.children(recursive=True)):
        try:
            with process.oneshot():
                seen["memory_mb"] += process.memory_full_info().uss / 1e6
                seen["descriptors"] += process.num_fds()
                seen["threads"] += process.num_threads()
                seen["processes"] += 1
        except psutil.Error:  # it ended meanwhile
            continue
    return seen


def watch(words: Sequence[str], run: Path) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Run to the end; (looks, each with its step, and the records of all steps)."""
    looks: list[dict[str, float]] = []
    with (run.parent / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as child:
        root = psutil.Process(child.pid)
        while child.poll() is None:
            time.sleep(LOOK_S)
            known = records(run)
            if child.poll() is None and known:
                looks.append({"step": known[-1]["step"], **look(root), "run_mb": _size(run) / 1e6})
                report.say(" ".join(f"{name} {value:,.0f}" for name, value in looks[-1].items()))
        if child.returncode:
            raise RuntimeError(f"the run ended with {child.returncode}: {(run.parent / 'log').read_text()[-2000:]}")
    return looks, [one for one in records(run) if one.get("stage") != "warm-start"]


def rows(looks: Sequence[dict[str, float]], steps: Sequence[dict[str, Any]]) -> list[report.Row]:
    """Medians of equal parts of the run; of rewards the means."""
    rewards = {int(one["step"]): one["reward/mean"] for one in steps if "reward/mean" in one}
    first, last = min(rewards), max(rewards)
    bounds = [first + (last + 1 - first) * at // PARTS for at in range(PARTS + 1)]
    made = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        own = [one for one in looks if begin <= one["step"] < end]
        names = [name for name in (own[0] if own else ()) if name != "step"]
        told = {name: statistics.median(one[name] for one in own) for name in names}
        reward = statistics.mean(value for step, value in rewards.items() if begin <= step < end)
        made.append({"steps": f"{begin}-{end - 1}", **told, "reward": reward, "looks": len(own)})
    return made


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    arguments = report.parser(__doc__ or "")
    arguments.add_argument("--recipe", default="motion")
    arguments.add_argument("--steps", type=int, default=2000)
    arguments.add_argument("--runner", default="local")
    options: argparse.Namespace = arguments.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        run = Path(folder) / "run"
        settings = [*(f"stages.{STAGE}.{one}" for one in (f"steps={options.steps}", *SMALL)), "eval.every=500"]
        looks, steps = watch(command(options.recipe, run, settings, options.runner), run)
    report.finish("soak", set_up, rows(looks, steps), options)
