# SPDX-License-Identifier: Apache-2.0
"""The import contracts name every plugin, and the contracts' package stays light when it is really imported."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from relax_core import launch, runs

PUBLIC = (
    "Plugins import only the public rooms: "
    "api, learn, trainer_kit, engine_kit, media, tensor_files, runs, launch and cli.terminal"
)
OTHERS = "No plugin imports another that its dependencies do not name"
ROOT = Path(__file__).parents[2]
LIGHT = """
import importlib, pkgutil, sys
import relax_core.api, relax_core.launch, relax_core.runs
for module in pkgutil.iter_modules(relax_core.api.__path__):
    importlib.import_module(f"relax_core.api.{module.name}")
print(*sorted({"torch", "ray", "transformers", "aiohttp", "structlog"} & set(sys.modules)))
"""


def test_every_plugin_folder_is_in_the_import_contracts() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    plugins = {folder.name.replace("-", "_") for folder in (ROOT / "plugins").iterdir() if folder.is_dir()}
    contracts = {contract["name"]: contract for contract in linter["contracts"]}
    assert plugins <= set(linter["root_packages"])
    assert plugins <= set(contracts["The core imports no plugin"]["forbidden_modules"])
    assert plugins <= set(contracts[PUBLIC]["source_modules"])
    assert plugins <= set(contracts[OTHERS]["modules"])


def test_a_plugin_that_imports_another_requires_the_other() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (contract for contract in linter["contracts"] if contract["name"] == OTHERS)
    for arrow in contract["ignore_imports"]:
        plugin, other = (module.partition(".")[0].replace("_", "-") for module in arrow.split(" -> "))
        project = tomllib.loads((ROOT / "plugins" / plugin / "pyproject.toml").read_text())["project"]
        assert any(re.match(rf"{other}\b", name) for name in project["dependencies"]), f"{plugin} must require {other}"


def test_the_plugin_page_lists_the_packages_that_plugins_may_import() -> None:
    """The list in docs/plugins.md is what the import contract leaves; roles may import `relax_core.roles` as well."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = {contract["name"]: contract for contract in linter["contracts"]}
    forbidden = {module.removeprefix("relax_core.") for module in contracts[PUBLIC]["forbidden_modules"]}
    allowed = set(contracts["Imports only go down"]["layers"]) - {"__main__"} - forbidden
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `relax_core\.(\w+)` \|", page, re.MULTILINE))
    assert listed == allowed | {"roles"}


def test_the_plugin_page_explains_every_name_of_the_rooms_for_commands() -> None:
    explained = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8").partition("### Runs and their files")[2]
    for room in (runs, launch):
        assert {name for name in room.__all__ if f"`{name}`" not in explained} == set()
        assert all(getattr(room, name) is not None for name in room.__all__)


def test_no_module_of_the_api_brings_torch_or_ray() -> None:
    found = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=600, check=True)
    assert found.stdout.split() == []
