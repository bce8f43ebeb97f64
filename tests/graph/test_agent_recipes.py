# SPDX-License-Identifier: Apache-2.0
"""Recipes of agents start: both stages run, and the environment answers as the recipe says. The gate runs one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.views.run import open_run
from tests.graph.conftest import Relax

SHORT = (
    "stages.0.steps=1", "stages.0.rollout.groups_per_step=4", "stages.1.steps=1", "stages.1.rollout.groups_per_step=2",
    "stages.1.rollout.group_size=4", "eval.every=0",
)  # fmt: skip


OTHERS = ("code", "reasoning", "repair", "signalling", "zoom")


@pytest.mark.process
@pytest.mark.parametrize("recipe", ["search", *(pytest.param(name, marks=pytest.mark.faults) for name in OTHERS)])
def test_a_recipe_of_an_agent_starts(relax_here: Relax, recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ran = relax_here("train", recipe, *SHORT, "--runner", "local" if recipe == "repair" else "inline", "--run-dir", run)
    assert ran.code == 0, ran.err
    done = json.loads((run / "summary.json").read_text())
    assert (done["status"], done["steps"], done["balanced"]) == ("finished", 2, True)
    assert done["samples_dropped"] == {} and done["samples_trained"] == 4 + 8
    assert list((run / "export").glob("*.safetensors"))
    assert {sample["outcome"] for sample in open_run(run).samples(2)} <= {"finished", "truncated"}
