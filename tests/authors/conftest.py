# SPDX-License-Identifier: Apache-2.0
"""A machine of a plugin's author: Relax and a baked project of each kind, installed from wheels in a fresh environment.

Third-party packages are lent to that environment by a folder of links that leaves out all of Relax, so that whatever is
imported of Relax comes from its wheels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from relax_core.api.component import KINDS
from relax_core.cli.main import app
from tests.docs.test_pages import ROOT, write_files
from tests.graph.conftest import game, relax_here
from tests.shared_folder import shared_folder

__all__ = ["game", "relax_here"]

DEADLINE_S = 600
PROJECTS = {kind: f"my-{kind}" for kind in (*KINDS, "command")} | {"algorithm": "lite-ppo"}
"""By kind, the name of its project. The algorithm moves in from a single file; the others are their template's code."""
FROM = {"algorithm": "lite_ppo.py"}
"""Single files that `docs/plugins.md` shows."""
BUILD = """
import importlib, os, sys, tomllib
out, *projects = sys.argv[1:]
for project in projects:
    os.chdir(project)
    with open("pyproject.toml", "rb") as file:
        backend = tomllib.load(file)["build-system"]["build-backend"]
    importlib.import_module(backend).build_wheel(out)
"""
"""Call the build backend that each project names, as pip does, in one process for all projects."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.out))


@dataclass(frozen=True)
class Home:
    """An author's directory with its projects, and the virtual environment that its commands run in."""

    path: Path

    @property
    def environment(self) -> Path:
        return self.path / "venv"

    @property
    def python(self) -> Path:
        return self.environment / "bin/python"

    def project(self, kind: str) -> Path:
        return self.path / f"relax-plugin-{PROJECTS[kind]}"

    def must(self, *arguments: str | Path) -> Ended:
        """Run `relax`, which has to succeed."""
        done = ended([self.environment / "bin/relax", *arguments], self.path)
        assert done.code == 0, done.out + done.err
        return done


def ended(command: Iterable[str | Path], directory: Path) -> Ended:
    """Run to its end; nothing of this process's environment says where Relax is."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    environ |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=directory, env=environ, capture_output=True, text=True, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def build(out: Path, projects: Iterable[Path]) -> None:
    done = ended([sys.executable, "-c", BUILD, out, *projects], out)
    assert done.code == 0, done.out + done.err


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core's wheel and every plugin's."""
    projects = (ROOT, *sorted((ROOT / "plugins").glob("relax-plugin-*")))
    return shared_folder(tmp_path_factory, "wheels", lambda folder: build(folder, projects))


@pytest.fixture(scope="session")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the third-party packages of the environment that runs the tests."""

    def link(folder: Path) -> None:
        for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(place).iterdir():
                if "relax" not in entry.name and entry.suffix != ".pth":
                    (folder / entry.name).symlink_to(entry)

    return shared_folder(tmp_path_factory, "lent", link)


@pytest.fixture(scope="session")
def author(wheels: Path, lent: Path, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """An author who has made, built and installed a project of each kind. Tests read the directory only."""

    def make(folder: Path) -> None:
        write_files(ROOT / "docs/plugins.md", folder)
        for kind, name in PROJECTS.items():
            moved = ["--from", str(folder / FROM[kind])] if kind in FROM else []
            made = CliRunner().invoke(app, ["new", kind, name, "--out", str(folder), *moved])
            assert made.exit_code == 0, made.output
        dist = folder / "dist"
        dist.mkdir()
        build(dist, folder.glob("relax-plugin-*"))
        venv.create(folder / "venv", symlinks=True)
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        (site / "lent.pth").write_text(f"{lent}\n")
        relax = required(wheels, "relax-core[quickstart,testing]")
        pip("install", "--no-deps", "--no-compile", *relax, *dist.iterdir(), python=folder / "venv/bin/python")

    return Home(shared_folder(tmp_path_factory, "author", make))


def pip(*arguments: str | Path, python: Path) -> None:
    """Run pip for the environment of this interpreter; nothing is downloaded."""
    options = ("--disable-pip-version-check", "--quiet", "--no-input", "--python")
    done = ended([sys.executable, "-m", "pip", *options, python, *arguments, "--no-index"], ROOT)
    assert done.code == 0, done.out + done.err


def required(wheels: Path, requirement: str) -> list[Path]:
    """Return the wheels of Relax that a requirement asks for, itself or through other wheels of Relax.

    pip would also look up every third-party package that the environment is lent, which takes five times as long.
    """
    seen: dict[tuple[str, str], Path] = {}
    left = [Requirement(requirement)]
    while left:
        asked = left.pop()
        for extra in asked.extras | {""}:
            if (asked.name, extra) in seen:
                continue
            (wheel,) = wheels.glob(f"{asked.name.replace('-', '_')}-*.whl")
            seen[asked.name, extra] = wheel
            (distribution,) = Distribution.discover(path=[str(wheel)])
            for needed in map(Requirement, distribution.requires or ()):
                if needed.name.startswith("relax-") and (not needed.marker or needed.marker.evaluate({"extra": extra})):
                    left.append(needed)
    return sorted(set(seen.values()))
