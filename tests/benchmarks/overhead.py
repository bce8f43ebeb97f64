# SPDX-License-Identifier: Apache-2.0
"""Overhead: a step through the whole graph minus the sum of its compute, as rows and roles grow.

Engine and trainer are `metronome.py`'s: a step's compute is one second of generating and one of training, in turn
(`placement = "colocate"`, staleness 0). What else a step takes is Relax's own: bus, ledger, turns, publish, records.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.benchmarks import report
from tests.benchmarks.runs import HERE, built, trained

COMPUTE_S = 2.0
RUN_S = 150.0
FIRST = 3
"""Steps that count for nothing: caches fill and first connections are made."""
ROLES = {"few": [], "with reference": ["algorithm.kl_coef=0.01"]}
"""Further settings by name; the reference is one role more, one pass and one column more."""


def one(recipe: Path, runner: str, rows: int, roles: str, steps: int) -> report.Row:
    """A run's median step."""
    report.say(f"{runner}: {rows} rows a step, {roles} roles")
    settings = [
        f"steps={steps + FIRST}", "placement=colocate", "max_staleness=0", f'plugins=["{HERE / "metronome.py"}"]',
        "engine=metronome-engine", "trainer=metronome-trainer", "weights=metronome-transport",
        f"rollout.groups_per_step={rows // 8}", "rollout.group_size=8",
        "eval.every=0", "eval.at_start=false", "checkpoint.every=1000000", *ROLES[roles],
    ]  # fmt: skip
    lines, _ = trained(recipe, settings, RUN_S, runner)
    found = [line for line in lines if "time/step_s" in line][FIRST:]
    steps_s = sorted(line["time/step_s"] for line in found)
    step_s = steps_s[len(steps_s) // 2]
    return {
        "runner": runner, "roles": roles, "rows": rows, "steps": len(found), "step s": step_s, "compute s": COMPUTE_S,
        "overhead ms": (step_s - COMPUTE_S) * 1e3, "overhead %": (step_s - COMPUTE_S) / COMPUTE_S * 100,
    }  # fmt: skip


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--runners", nargs="+", choices=("local", "ray"), default=["ray"])
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--roles", nargs="+", choices=tuple(ROLES), default=list(ROLES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--recipe", type=Path, help="of a built quickstart; else one is built, which takes a minute")
    options = parser.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        recipe = options.recipe or built(Path(folder) / "recipe", 0)
        rows = [
            one(recipe, r, n, roles, options.steps)
            for r in options.runners
            for roles in options.roles
            for n in options.rows
        ]
    report.finish("overhead", set_up, rows, options)
