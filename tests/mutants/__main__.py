# SPDX-License-Identifier: Apache-2.0
"""Make every mutant in a copy of the code, run its tests, and print which of them lived. Exit 1 where one did."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900


def copied(folder: Path) -> dict[str, str]:
    """Copy what the tests need; return the environment in which the copy is imported, and not what is installed."""
    for name in ("relax_core", "relax_contrib", "plugins", "tests", "templates", "conftest.py", "pyproject.toml"):
        source = ROOT / name
        skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=skipped, dirs_exist_ok=True)
        else:
            shutil.copy(source, folder / name)
    paths = [folder, *sorted(folder.glob("plugins/*/src"))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}


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


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in f"{mutant.name} {mutant.path}" for word in words)]
    lived = []
    with tempfile.TemporaryDirectory() as name:
        environment = copied(Path(name))
        for mutant in chosen:
            start = time.monotonic()
            dead = dies(mutant, Path(name), environment)
            lived += [] if dead else [mutant.name]
            print(
                f"{'died' if dead else 'LIVED':<6} {time.monotonic() - start:>5.0f} s  {mutant.path:<36} {mutant.name}",
                flush=True,
            )
    print(f"{len(chosen) - len(lived)} of {len(chosen)} mutants died")
    return 1 if lived or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
