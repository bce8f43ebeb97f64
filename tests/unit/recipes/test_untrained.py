# SPDX-License-Identifier: Apache-2.0
"""`relax plan` reads a recipe's sizes, so no warm start runs for it."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
from relax_plugin_workbench.estimate import estimate_run
from relax_plugin_workbench.layouts import Machine, compare_layouts

from relax_contrib.recipes.calculator import build as calculator
from relax_contrib.recipes.guess_number import build as guess_number
from relax_contrib.recipes.quickstart import build as quickstart, model as tiny
from relax_core.control.prepare import UNTRAINED, Recipe


class NoModel:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")


@pytest.mark.parametrize("recipe", [calculator, guess_number, quickstart], ids=lambda module: module.__name__)
def test_a_builder_leaves_out_its_warm_start_if_only_sizes_matter(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "build_model", lambda seed: NoModel())
    monkeypatch.setattr(recipe, "warm_up", lambda *_: 1 / 0)
    monkeypatch.setenv(UNTRAINED, "1")
    assert math.isnan(recipe.build(tmp_path / "sizes", 0))
    assert {"config.json", "tokenizer.json"} <= {file.name for file in (tmp_path / "sizes" / "model").iterdir()}
    monkeypatch.setenv(UNTRAINED, "")  # as `relax train` sets it
    with pytest.raises(ZeroDivisionError):
        recipe.build(tmp_path / "trained", 0)


def test_plans_build_a_recipe_without_training(monkeypatch: pytest.MonkeyPatch) -> None:
    class BuiltError(Exception):
        pass

    def build(recipe: Recipe, folder: Path, seed: int, teacher: bool = False, *, untrained: bool = False) -> Path:
        raise BuiltError(untrained)

    monkeypatch.setattr(Recipe, "build", build)
    with pytest.raises(BuiltError, match="True"):
        estimate_run(["quickstart"], [])
    with pytest.raises(BuiltError, match="True"):
        compare_layouts(["quickstart"], [], Machine(0, False, 0, 0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize("untrained", [True, False])
def test_the_modules_of_a_recipe_read_whether_to_train(
    untrained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_recipe"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "recipe.toml").touch()
    (package / "build.py").write_text(
        f"import os, sys\nopen(sys.argv[1] + '/seen', 'w').write(os.environ['{UNTRAINED}'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(UNTRAINED, "left over from a parent")
    Recipe("own", "own_recipe").build(tmp_path / "out", 0, untrained=untrained)
    assert (tmp_path / "out" / "seen").read_text() == ("1" if untrained else "")
