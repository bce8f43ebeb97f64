# SPDX-License-Identifier: Apache-2.0
"""Recipes that are built and trained for a benchmark, through the command line as a user trains them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_core.control.prepare import find_recipe
from tests.benchmarks import report

HERE = Path(__file__).parent


def built(folder: Path, seed: int, teacher: bool = False, name: str = "quickstart") -> Path:
    """Build a recipe's model and data in a new folder; return the recipe."""
    report.say(f"building the {name}'s model and data, seed {seed}")
    folder.mkdir(parents=True)
    find_recipe(name).build(folder, seed, teacher)
    return folder / "recipe.toml"


def command(recipe: Path | str, run: Path, settings: Sequence[str], runner: str = "local") -> list[str]:
    """Return the words that train a recipe in a run directory."""
    words = [sys.executable, "-m", "relax_core", "train", str(recipe), "--run-dir", str(run), "--runner", runner]
    return [*words, "--json", *settings]


def trained(
    recipe: Path | str, settings: Sequence[str], limit_s: float, runner: str = "local"
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train a recipe to its end in a folder that is then removed; return the records of its steps and its summary."""
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        run = Path(folder) / "run"
        words = command(recipe, run, settings, runner)
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
        if done.returncode:
            raise RuntimeError(f"the run of {recipe} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        return records(run), json.loads((run / "summary.json").read_text())


def records(run: Path) -> list[dict[str, Any]]:
    """Return the whole records that a run has written so far."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
