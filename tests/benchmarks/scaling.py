# SPDX-License-Identifier: Apache-2.0
"""Scaling: the time until an engine serves or is gone, and a run that sizes itself beside runs of fixed sizes.

Part `times`: a run of the quickstart's model grows from one engine to two and shrinks again, `--repeats` times. Each request
comes while the run works, and its states are those of the operation. A bare start of the same engine process follows each.

Part `sizes`: the waits of `tool_waits.py` behind `metronome.py`, whose engines run few requests at once for a fixed time each,
so that engines count also on a machine with few cores. Each run lasts `--seconds`; the one with a policy begins with one
engine, and its growth counts. Engine seconds are those of all engines, also of those that join or leave.

With `--out`, each cell is written when it is measured, and is not measured again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from relax_core.api.run_commands import ScaleRequest
from relax_core.control.prepare import plan_run
from relax_core.control_api.run_control import RunControl
from relax_core.engines.scaling import ScalingOperation
from relax_core.views.run import open_run
from tests.benchmarks import report
from tests.benchmarks.recovery import bare_start
from tests.benchmarks.runs import HERE, built
from tests.graph.ray_run import Running

START_S, CHANGE_S, END_S = 300.0, 300.0, 120.0
WINDOW_S = 10.0
"""Seconds of one window of signals; a shorter run has no number of engines."""
ENDLESS = ("steps=1000000", "eval.every=0", "eval.at_start=false", "checkpoint.every=0")
TIMES = (*ENDLESS, "placement=hybrid", "rollout.groups_per_step=8", "optimizer.lr=1e-5", "max_staleness=1")
SIZES = (
    *ENDLESS, f'plugins=["{HERE / "tool_waits.py"}", "{HERE / "metronome.py"}"]', "environment=tool-waits",
    'engine={name="metronome-engine",generate_s=0.25}', 'trainer={name="metronome-trainer",train_s=0.5}',
    "weights=metronome-transport", "placement=async", "max_staleness=4", "rollout.groups_per_step=8",
    "rollout.group_size=8", "placement.rollout.requests_per_engine=8", "placement.rollout.min_engines=1",
)  # fmt: skip
"""A step needs 64 requests, 8 at once on an engine: 2 s of one engine, and half a second of the trainer."""


def durations(operation: ScalingOperation, asked: float) -> dict[str, float]:
    """Return the seconds that an operation spent in each state, and from the request to its end; `asked`: its time."""
    times = sorted(operation.times.items(), key=lambda entered: entered[1])
    found = {"until the run has the request": operation.requested_at - asked}
    found |= {state: end - begin for (state, begin), (_, end) in pairwise(times)}
    return found | {f"from the request to {times[-1][0]}": times[-1][1] - asked}


def changes(run: Path, target: int) -> dict[str, float]:
    """Ask a live run for a number of engines, wait, and return the durations."""
    control, key, asked = RunControl(open_run(run)), uuid.uuid4().hex, time.time()
    control.change(ScaleRequest(key, target=target), CHANGE_S)
    operation = control.facts().pools["rollout"].find(key)
    assert operation is not None and operation.times, f"the run remembers {key}"
    return durations(operation, asked)


def measure_times(recipe: Path, folder: Path, runner: str, options: argparse.Namespace) -> list[report.Row]:
    """Let one engine join and leave again and again; return a row for each state."""
    taken: defaultdict[str, list[float]] = defaultdict(list)
    config = plan_run([recipe], [*TIMES, f"run.runner={runner}"]).composed.config
    path = folder / f"times-{runner}"
    running = Running(path, "train", recipe, *TIMES, "--runner", runner, "--run-dir", path)
    try:
        running.until_steps(2, START_S)
        for number in range(options.repeats):
            for target in (2, 1):
                for what, seconds in changes(path, target).items():
                    taken[what].append(seconds)
                running.until_more_steps(1)
            taken["bare start of the engine"].append(bare_start("engine", config))
            report.say(
                f"{runner} {number + 1}: {', '.join(f'{name} {all_[-1]:.2f} s' for name, all_ in taken.items())}"
            )
        running.interrupt()
        running.end(END_S)
    finally:
        running.kill()
    return [row("times", runner, what, seconds=values) for what, values in taken.items()]


def measure_size(recipe: Path, folder: Path, case: str, settings: Sequence[str], seconds: float) -> report.Row:
    """Train for so long; return how fast the run was, and how many engines it had."""
    report.say(f"{case}: {seconds:.0f} s")
    path = folder / case.replace(" ", "-")
    running = Running(path, "train", recipe, *SIZES, *settings, "--runner", "local", "--run-dir", path)
    try:
        running.until_steps(1, START_S)
        time.sleep(seconds)
        running.interrupt()
        running.end(END_S)
    finally:
        running.kill()
    records = running.steps()
    began = records[0]["elapsed_s"]
    ends = [record["elapsed_s"] for record in records if record["elapsed_s"] <= began + seconds]
    step_s = (ends[-1] - began) / max(len(ends) - 1, 1)
    windows = [one["signals"] for one in open_run(path).events() if one["event"] == "engines measured"]
    return row("sizes", case, step_s=step_s, engines=mean_engines(windows))


def mean_engines(windows: Iterable[Mapping[str, float]]) -> float:
    """Return the mean number of engines in any state over windows of signals."""
    known = [one for one in windows if "serving" in one]
    if not known:
        raise SystemExit(f"--seconds: a run that is shorter than a window of {WINDOW_S:.0f} s has no number of engines")
    counted = [
        (sum(one.get(state, 0) for state in ("serving", "starting", "leaving")), one["window_s"]) for one in known
    ]
    return sum(number * length for number, length in counted) / sum(length for _, length in counted)


def row(
    part: str, case: str, what: str = "", *, seconds: Sequence[float] = (), step_s: float | None = None,
    engines: float | None = None,
) -> report.Row:  # fmt: skip
    """Return a line of the table, whose columns serve both parts."""
    far = sorted(seconds)[round(0.95 * (len(seconds) - 1))] if seconds else None
    return {
        "part": part, "case": case, "what": what, "times": len(seconds) or None,
        "p50 s": statistics.median(seconds) if seconds else None, "p95 s": far,
        "steps/h": step_s and 3600 / step_s, "engines": engines,
        "engine s per step": None if step_s is None or engines is None else step_s * engines,
        "% of the best fixed size": None, "% of its engine s": None,
    }  # fmt: skip


def compared(rows: Sequence[report.Row]) -> list[report.Row]:
    """Fill in the last columns: the speed and the engine seconds in an hour beside those of the fastest fixed size."""
    fixed = [one for one in rows if one["part"] == "sizes" and one["case"].startswith("fixed")]
    if not fixed:
        return list(rows)
    best = max(fixed, key=lambda one: float(one["steps/h"]))
    return [
        {**one, "% of the best fixed size": 100 * one["steps/h"] / best["steps/h"],
         "% of its engine s": 100 * one["engines"] / best["engines"]} if one["part"] == "sizes" else one
        for one in rows
    ]  # fmt: skip


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.set_defaults(repeats=20)
    parser.add_argument("--parts", nargs="+", choices=("times", "sizes"), default=["times", "sizes"])
    parser.add_argument("--runners", nargs="+", choices=("local", "ray"), default=["local"], help="of the part times")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 3, 4, 6], help="fixed numbers of engines")
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run of the part sizes")
    parser.add_argument(
        "--policies", nargs="+", default=["balance"], help="scaling policies, as [autoscale] names them"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the runs with a policy")
    options = parser.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = report.recorded("scaling", options)
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as name:
        folder = Path(name)
        for (part, case), measure in cells(folder, built(folder / "recipe", 0), options).items():
            if not any((one["part"], one["case"]) == (part, case) for one in rows):
                rows = compared([*rows, *measure()])
                if options.out:
                    report.finish("scaling", set_up, rows, options)
    if not options.out:
        report.finish("scaling", set_up, rows, options)


def cells(
    folder: Path, recipe: Path, options: argparse.Namespace
) -> dict[tuple[str, str], Callable[[], Sequence[report.Row]]]:
    """Return the cells to measure: part and case -> a function that returns its rows."""
    found: dict[tuple[str, str], Callable[[], Sequence[report.Row]]] = {}
    if "times" in options.parts:
        for runner in options.runners:
            found["times", runner] = lambda runner=runner: measure_times(recipe, folder, runner, options)  # type: ignore[misc]
    if "sizes" in options.parts:
        most = max(options.sizes)
        runs: dict[str, list[Any]] = {f"fixed {size}": [f"placement.rollout.engines={size}"] for size in options.sizes}
        for policy in options.policies:
            table = f'autoscale={{name="{policy}",max_engines={most}}}'
            runs[policy] = ["placement.rollout.engines=1", table, *options.set]
        for case, settings in runs.items():
            found["sizes", case] = lambda case=case, settings=settings: [  # type: ignore[misc]
                measure_size(recipe, folder, case, settings, options.seconds)
            ]
    return found
