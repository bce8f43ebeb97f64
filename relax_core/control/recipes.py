# SPDX-License-Identifier: Apache-2.0
"""Recipes by name: `relax train quickstart` builds model and data locally, in a child process, then trains on them.

A recipe is a package with `recipe.toml` and a `build` module, registered under the entry-point group `relax.recipes`. One
with `[[teachers]]` has a `teacher` module too, which is run only where a run learns from one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path

from relax_core.api.errors import ConfigError, RelaxError

GROUP = "relax.recipes"
BUILD_S = 1800.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """A configuration that makes its own model and data."""

    name: str
    package: str

    def toml(self) -> str:
        return resources.files(self.package).joinpath("recipe.toml").read_text()

    def build(self, folder: Path, seed: int, teacher: bool = False) -> Path:
        """Make model and data in `folder`, and the teacher; returns the configuration beside them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.toml").write_text(self.toml())
        for module in ("build", "teacher") if teacher and "teachers" in tomllib.loads(self.toml()) else ("build",):
            status = _run(f"{self.package}.{module}", str(folder), "--seed", str(seed))
            if status:
                shutil.rmtree(folder, ignore_errors=True)
                raise RelaxError(f"recipe {self.name}: its {module} ended with status {status}; see the lines above")
        return folder / "recipe.toml"


def _run(module: str, *arguments: str) -> int:
    """A module in a process of its own that ends with this one; its output goes to stderr. Returns its exit status."""
    command = [sys.executable, "-m", "relax_core.runners.local.parent_death", module, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True) as child:
        try:
            return child.wait(BUILD_S)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise


def recipes() -> dict[str, Recipe]:
    return {entry.name: Recipe(entry.name, entry.value) for entry in entry_points(group=GROUP)}


def find(name: str) -> Recipe:
    """Raises ConfigError that lists what there is."""
    known = recipes()
    if name not in known:
        raise ConfigError(
            "configuration", repr(name), f"name a .toml file that exists, or a recipe: {', '.join(sorted(known))}"
        )
    return known[name]
