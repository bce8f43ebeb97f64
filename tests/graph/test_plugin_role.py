# SPDX-License-Identifier: Apache-2.0
"""A plugin's role that owns a model: its file and one placement entry are all that a run needs."""

from __future__ import annotations

import shutil
from pathlib import Path

from relax_core.views.run import open_run
from tests.graph.conftest import SMALL, Relax

PLUGIN = Path(__file__).with_name("scorer.py")


def test_a_role_of_a_plugin_scores_with_a_model_of_its_own(train_here: Relax, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "model", tmp_path / "second-model")
    overlay = tmp_path / "scorer.toml"
    overlay.write_text(
        f'plugins = ["{PLUGIN}"]\nalgorithm = "anchored"\n\n[placement.roles.scorer]\npath = "{tmp_path}/second-model"\n'
    )
    run = tmp_path / "run"
    ran = train_here(tiny / "recipe.toml", overlay, *SMALL, "steps=3", "max_staleness=0", "optimizer.lr=1e-3",
                     "--run-dir", run)  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json["steps"] == 3 and ran.json["balanced"]
    away = open_run(run).metrics().column("scorer/away")
    assert away[0] < 1e-4 < away[-1], "the policy moves away from where both began"


def test_a_placement_of_no_role_is_refused(relax_here: Relax, tiny: Path) -> None:
    refused = relax_here("plan", tiny / "recipe.toml", "placement.roles.scorer.ranks=1")
    assert refused.code == 2 and "placement.roles: got scorer" in refused.err + refused.out
