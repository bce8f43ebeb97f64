# SPDX-License-Identifier: Apache-2.0
"""Run schedules of faults: `python -m tests.chaos`, as `tox -e faults -- schedules` does; `--seed N` replays one.

Exit 1 if a schedule failed; its seed and trace are printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter

from tests.chaos.schedule import run

SHOWN = 3
"""Failures that each process tells in full before it gives up."""
HASH_SEED = "0"
"""Sets of strings are walked in an order that depends on it."""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONHASHSEED": HASH_SEED}


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay the schedule of one seed and print what happened")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000, help="schedules in all")
    parser.add_argument("--every", type=int, default=1, help="from seed to seed: the other shards run those between")
    parser.add_argument("--again", action="store_true", help="run the first seed once more at the end; it must replay")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the seeds")
    told = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        return subprocess.run(
            [sys.executable, "-m", "tests.chaos", *sys.argv[1:]], env=environment(), check=False
        ).returncode
    if told.seed is not None:
        schedule = run(told.seed)
        print(schedule)
        return 1 if schedule.problems else 0
    if told.processes > 1:
        words = [sys.executable, "-m", "tests.chaos", "--processes", "1", "--every", str(told.processes)]
        shards = [
            subprocess.Popen([*words, "--first", str(told.first + at), "--count", str(told.count - at)])
            for at in range(told.processes)
        ]
        return max(shard.wait() for shard in shards)
    failed, variants, starts, first = 0, Counter[str](), 0, ""
    for seed in range(told.first, told.first + told.count, told.every):
        schedule = run(seed)
        first = first or str(schedule)
        variants[schedule.variant] += 1
        starts += schedule.starts
        if schedule.problems:
            failed += 1
            print(f"{schedule}\nreplay it: python -m tests.chaos --seed {seed}\n", flush=True)
            if failed == SHOWN:
                break
    if told.again:
        again = str(run(told.first))
        print(f"replayed {again}" if again == first else f"WRONG: {first}\nreplays as {again}")
        failed += again != first
    print(f"{sum(variants.values())} schedules of {len(variants)} kinds, {starts} starts of runs: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
