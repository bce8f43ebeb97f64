# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz`: 2,000 bad inputs; `--count N`, `--first N`, `target` for some; `target:number` for one again."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.harness import Fault, made_smaller, run_target
from tests.fuzz.targets import TARGETS

COUNT = 2_000


def shares(names: list[str], count: int) -> dict[str, int]:
    """How many inputs of each target make `count` in all."""
    whole = sum(TARGETS[name].share for name in names)
    return {name: max(1, round(count * TARGETS[name].share / whole)) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(TARGETS)}; or one input, target:number")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--first", type=int, default=0, help="number of the first input of each target")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="where failing inputs are kept")
    parser.add_argument("--as-they-are", action="store_true", help="keep failing inputs without making them smaller")
    words = parser.parse_args()
    if single := [name.split(":") for name in words.names if ":" in name]:
        wanted = {name: range(int(number), int(number) + 1) for name, number in single}
    else:
        counts = shares(words.names or list(TARGETS), words.count)
        wanted = {name: range(words.first, words.first + count) for name, count in counts.items()}
    known: dict[str, int] = {}
    for name, numbers in wanted.items():
        start, faults = time.perf_counter(), 0
        for fault in run_target(name, numbers):
            faults += 1
            kind = f"{name} {fault.said.partition(':')[0]}"
            known[kind] = known.get(kind, 0) + 1
            if known[kind] == 1:
                _report(fault if words.as_they_are else made_smaller(fault), words.failures)
        print(f"{name}: {len(numbers)} inputs, {faults} faults, {time.perf_counter() - start:.1f} s", flush=True)
    for kind, count in known.items():
        print(f"{count:6d}  {kind}")
    return 1 if known else 0


def _report(fault: Fault, folder: Path) -> None:
    kept = fault.save(folder)
    print(f"{fault.name}: {fault.said}\n  kept in {kept}; again: python -m tests.fuzz {fault.name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
