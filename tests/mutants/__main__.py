# SPDX-License-Identifier: Apache-2.0
"""Make every mutant in a copy of the code, run its tests, and print which of them lived. Exit 1 where one did.

Words choose among the mutants. `--jobs 2` works on two at a time, each in a copy of its own.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900


def copied(folder: Path) -> dict[str, str]:
    """Copy what the tests need; return the environment in which the copy is imported, and not what is installed."""
    for name in ("relax_core", "relax_contrib", "plugins", "tests", "conftest.py", "pyproject.toml"):
        source = ROOT / name
        skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=skipped, dirs_exist_ok=True)
        else:
            shutil.copy(source, folder / name)
    paths = [folder, *sorted(folder.glob("plugins/*/src"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def dies(mutant: Mutant, folder: Path, environment: dict[str, str]) -> bool:
    """Whether its tests fail; one that cannot be collected proves nothing."""
    path = folder / mutant.path
    text = path.read_text()
    if text.count(mutant.line) != 1:
        raise SystemExit(
            f"mutant {mutant.name!r}: its line stands {text.count(mutant.line)} times in {mutant.path}; mend the list"
        )
    path.write_text(text.replace(mutant.line, mutant.changed))
    try:
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-n",
            "0",
            "-m",
            "not ray and not faults",
            *mutant.tests.split(),
        ]
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if done.returncode not in (0, 1):
            raise SystemExit(f"mutant {mutant.name!r}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
        return done.returncode == 1
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of a mutant's name or path; all must fit")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    asked = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if all(word in f"{mutant.name} {mutant.path}" for word in asked.words)]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(asked.jobs) as pool:
        free: queue.SimpleQueue[tuple[Path, dict[str, str]]] = queue.SimpleQueue()
        for folder in (Path(name, str(job)) for job in range(asked.jobs)):
            folder.mkdir()
            free.put((folder, copied(folder)))

        def lives(mutant: Mutant) -> bool:
            copy = free.get()
            start = time.monotonic()
            try:
                dead = dies(mutant, *copy)
            finally:
                free.put(copy)
            took = f"{'died' if dead else 'LIVED':<6} {time.monotonic() - start:>5.0f} s"
            print(f"{took}  {mutant.path:<36} {mutant.name}", flush=True)
            return not dead

        lived = sum(pool.map(lives, chosen))
    print(f"{len(chosen) - lived} of {len(chosen)} mutants died")
    return 1 if lived or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
