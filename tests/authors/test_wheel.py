# SPDX-License-Identifier: Apache-2.0
"""The wheels hold what the packages need when there is no checkout beside them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.authors.conftest import ROOT, Home, ended
from tests.graph.conftest import Relax

QUICKSTART = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["quickstart"]
PACKAGES = ("relax_core", "relax_contrib", *(name.replace("-", "_") for name in QUICKSTART if "plugin" in name))
WHERE = f"import importlib, json; print(json.dumps([importlib.import_module(n).__file__ for n in {PACKAGES!r}]))"
pytestmark = [pytest.mark.process, pytest.mark.one_process("author")]


def test_all_modules_are_imported_from_the_wheels(author: Home) -> None:
    done = ended([author.python, "-c", WHERE], author.path)
    assert done.code == 0, done.err
    site = author.environment / "lib"
    assert [file for file in json.loads(done.out) if not Path(file).is_relative_to(site)] == []


def test_every_template_is_in_the_wheel_of_its_plugin(wheels: Path) -> None:
    (wheel,) = wheels.glob("relax_plugin_authoring-*.whl")
    project = ROOT / "plugins/relax-plugin-authoring"
    wanted = {f"relax_plugin_authoring/{path.relative_to(project)}" for path in files(project / "templates")}
    assert len(wanted) > 50 and sorted(wanted - set(ZipFile(wheel).namelist())) == []


def test_every_file_of_the_packages_is_in_the_cores_wheel(wheels: Path) -> None:
    (wheel,) = wheels.glob("relax_core-*.whl")
    held = set(ZipFile(wheel).namelist())
    wanted = {str(path.relative_to(ROOT)) for name in ("relax_core", "relax_contrib") for path in files(ROOT / name)}
    assert {"relax_core/py.typed", "relax_core/registry/plugins.json"} <= wanted
    assert {name for name in wanted if name.endswith("recipe.toml")}
    assert sorted(wanted - held) == []
    assert [name for name in held if name.startswith(("tests/", "plugins/", "docs/"))] == []


def test_an_installed_core_bakes_and_knows_its_recipes(author: Home, relax_here: Relax, tmp_path: Path) -> None:
    author.must("new", "reward", "mine", "--out", tmp_path)
    assert (tmp_path / "relax-plugin-mine/.gitignore").is_file()
    assert author.must("config", "show", "guess-number").out
    refused = relax_here("train", "nowhere")
    assert refused.code == 2
    assert "guess-number, judged, mixed, motion, quickstart" in refused.err


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
