# SPDX-License-Identifier: Apache-2.0
"""Run everything that kills, floods or searches for a long time, and print one table: `tox -e faults`.

The parts are those of `PARTS`; name some to run only these. `--seed N` is where every random part begins: the seed that a
failed part prints replays it. `--scale 10` makes the random parts ten times longer. Exit 1 if a part failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

SCHEDULES, INPUTS, RUNS = 10_000, 2_000, 1
"""Simulated schedules, bad inputs, and real runs of each runner at scale 1."""


def real_runs(runner: str) -> Callable[[int, float], list[str]]:
    def command(seed: int, scale: float) -> list[str]:
        return ["tests.chaos.real_runs", "--runner", runner, "--seeds", f"{seed}:{seed + max(1, round(RUNS * scale))}"]

    return command


def search(seed: int) -> list[str]:
    """Return the options with which property tests try examples of this seed, not the same ones as in the suite."""
    return ["--hypothesis-profile=search", f"--hypothesis-seed={seed}"]


FOLDERS = ("tests", "plugins", "--ignore=tests/clients")
PARTS: dict[str, Callable[[int, float], list[str]]] = {
    "schedules": lambda seed, scale: [
        "tests.chaos", "--first", str(seed), "--count", str(round(SCHEDULES * scale)), "--processes", str(os.cpu_count() or 1)
    ],
    "crash-points": lambda seed, scale: ["tests.chaos.crash_checks"],
    "bad-inputs": lambda seed, scale: ["tests.fuzz", "--first", str(seed), "--count", str(round(INPUTS * scale))],
    "searches": lambda seed, scale: ["pytest", "-n", "2", *search(seed), "-m", "faults and not process", *FOLDERS],
    "properties": lambda seed, scale: [
        "pytest", "-n", "2", *search(seed), "-m", "hypothesis and not faults and not process", *FOLDERS
    ],
    "killed-runs": lambda seed, scale: ["pytest", "-n", "0", "-m", "faults and process", *FOLDERS],
    "local-runs": real_runs("local"),
    "ray-runs": real_runs("ray"),
}  # fmt: skip
"""Module and arguments of each part, given the first seed and the scale."""


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="parts to run; all where none is named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0)
    words = parser.parse_args()
    table, failed = [], False
    for name in words.parts or PARTS:
        command = PARTS[name](words.seed, words.scale)
        print(f"== {name}: python -m {' '.join(command)}", flush=True)
        began = time.monotonic()
        status = subprocess.run([sys.executable, "-m", *command], check=False, stdin=subprocess.DEVNULL).returncode
        failed |= status != 0
        verdict = "failed" if status else "passed"
        table.append((name, verdict, time.monotonic() - began, f"python -m tests.faults {name} --seed {words.seed}"))
    print(f"{'part':<14} {'result':<7} {'seconds':>8}  again with")
    for name, verdict, seconds, again in table:
        print(f"{name:<14} {verdict:<7} {seconds:>8.0f}  {again}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
