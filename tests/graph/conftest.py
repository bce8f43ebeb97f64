# SPDX-License-Identifier: Apache-2.0
"""Whole runs through the command line, on both runners, over one tiny model that is built once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.shared_folder import shared_folder

if TYPE_CHECKING:
    from tests.graph.ray_run import Start

RUNNERS = [pytest.param("local"), pytest.param("ray", marks=pytest.mark.ray)]
BUILD_S, RUN_S = 300, 240


@dataclass(frozen=True)
class Ran:
    """One finished `relax` process."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.out))


Relax = Callable[..., Ran]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model and data; its recipe is `recipe.toml`."""
    from relax_core.control.recipes import find

    return shared_folder(tmp_path_factory, "quickstart", lambda folder: find("quickstart").build(folder, 0))


@pytest.fixture(scope="session")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows just the form of an answer to `?`, a task for each letter, and `recipe.toml`."""
    from relax_contrib.recipes.guess_number.build import build
    from relax_core.control.recipes import find

    def build_game(folder: Path) -> None:
        build(folder, 0, steps=60)
        (folder / "recipe.toml").write_text(find("guess-number").toml())

    return shared_folder(tmp_path_factory, "guess-number", build_game)


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def relax(tmp_path: Path) -> Iterator[Relax]:
    """Run `relax` in a directory of its own."""
    with relax_in(tmp_path) as relax:
        yield relax


@contextmanager
def relax_in(directory: Path) -> Iterator[Relax]:
    """Run `relax` in this directory; everything that it started must be gone when it ends."""

    def call(*arguments: str | Path, timeout_s: float = RUN_S, **env: str) -> Ran:
        done = subprocess.run(
            command(*arguments), cwd=directory, env=environment(**env), capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
        return Ran(done.returncode, done.stdout, done.stderr)

    yield call
    assert survivors(directory) == []


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "relax_core", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **more}


def survivors(directory: Path) -> list[str]:
    """Command lines of processes that still work in this directory."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts runs that a test watches. What they leave behind is an error, also where it fails and they are killed."""
    from tests.graph.ray_run import Start, until

    starter = Start()
    yield starter
    for run in starter.started:
        run.kill()
    until(lambda: survivors(tmp_path) == [], lambda: f"processes are gone: {survivors(tmp_path)}", 20)
