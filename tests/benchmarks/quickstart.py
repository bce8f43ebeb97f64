# SPDX-License-Identifier: Apache-2.0
"""A recipe's model and data, the quickstart's if none is named, built for a benchmark."""

from __future__ import annotations

from pathlib import Path

from relax_core.control.prepare import find_recipe
from tests.benchmarks import report


def built(folder: Path, seed: int, teacher: bool = False, name: str = "quickstart") -> Path:
    """The recipe in a new folder, with what it names beside it."""
    report.say(f"building the {name}'s model and data, seed {seed}")
    folder.mkdir(parents=True)
    find_recipe(name).build(folder, seed, teacher)
    return folder / "recipe.toml"
