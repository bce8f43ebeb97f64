# SPDX-License-Identifier: Apache-2.0
"""What a plugin's author starts from: wheels of the core and of the plugins in the box, installed in fresh environments.

Third-party packages are lent to such an environment by a folder of links that leaves out everything of ours, so that
whatever is imported of Relax comes from its wheels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.graph.conftest import game
from tests.shared_folder import shared_folder

__all__ = ["game"]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 280


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
    """An author's directory, and the virtual environment that its commands run in."""

    path: Path
    environment: Path
    wheels: Path

    @property
    def python(self) -> Path:
        return self.environment / "bin/python"

    def relax(self, *arguments: str | Path) -> Ended:
        return ended([self.environment / "bin/relax", *arguments], self.path)

    def must(self, *arguments: str | Path) -> Ended:
        """`relax` that has to succeed."""
        done = self.relax(*arguments)
        assert done.code == 0, done.out + done.err
        return done

    def install(self, *what: str | Path) -> None:
        """From wheels on this disk only; what is required must be there or be had already."""
        pip("--python", self.python, "install", "--quiet", "--no-index", "--find-links", self.wheels, *what)

    def build(self, project: Path) -> Path:
        """The project's wheel."""
        made = self.path / "dist" / project.name
        command = [self.python, "-m", "build", "--wheel", "--no-isolation", "--outdir", made, project]
        done = ended(command, self.path)
        assert done.code == 0, done.out + done.err
        (wheel,) = made.glob("*.whl")
        return wheel


def ended(command: list[str | Path], directory: Path) -> Ended:
    """Run to its end; nothing of this process's environment says where Relax is."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=directory, env=environ, capture_output=True, text=True, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = ended(command, ROOT)
    assert done.code == 0, done.out + done.err


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core's and every plugin's."""
    projects = (ROOT, *sorted((ROOT / "plugins").glob("relax-plugin-*")))
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index")
    return shared_folder(
        tmp_path_factory, "wheels", lambda folder: pip("wheel", *options, "--wheel-dir", folder, *projects)
    )


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
def installed(wheels: Path, lent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with Relax as its users install it, from wheels. Tests read it and install nothing into it."""
    return shared_folder(tmp_path_factory, "installed", lambda folder: install_relax(folder, wheels, lent))


def install_relax(environment: Path, wheels: Path, lent: Path) -> None:
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(f"{lent}\n")
    Home(environment, environment, wheels).install("relax-core[quickstart,testing]")


@pytest.fixture
def home(installed: Path, wheels: Path, tmp_path: Path) -> Home:
    """An author's directory that shares its virtual environment with other tests."""
    return Home(tmp_path, installed, wheels)


@pytest.fixture(scope="module")
def own_home(wheels: Path, lent: Path, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """An author's directory with a virtual environment of its own, to install into."""
    path = tmp_path_factory.mktemp("author")
    install_relax(path / "venv", wheels, lent)
    return Home(path, path / "venv", wheels)
