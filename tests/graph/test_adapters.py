# SPDX-License-Identifier: Apache-2.0
"""Whole runs that train adapters: engines lay them over their base, or get them folded in as deltas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from relax_core.views.run import open_run
from tests.graph.conftest import SMALL, Relax

pytestmark = pytest.mark.process
ALONE = ("placement.actor.ranks=2", "trainer.sharding=fsdp")
"""Adapters travel alone from two ranks to the engine. These need processes, and so the local runner."""
FOLDED = ("model.lora.dora=true", "weights.payload=delta", 'model.freeze=["layers.0.mlp"]')


@pytest.mark.parametrize("overrides", [pytest.param(ALONE, marks=pytest.mark.faults), FOLDED])
def test_engines_sample_from_what_the_adapters_make_of_the_base(
    relax: Relax, train_here: Relax, tiny: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    words = (tiny / "recipe.toml", *SMALL, "--run-dir", run, "steps=3", "rollout.groups_per_step=12",
             "model.lora.rank=4", "optimizer.lr=5e-3", "optimizer.warmup_steps=0", *overrides)  # fmt: skip
    ran = train_here(*words) if overrides == FOLDED else relax("train", *words, "--runner", "local")
    assert ran.code == 0, ran.err
    apart = open_run(run).metrics().column("train/rollout_log_prob_diff_lag0_max")
    assert len(apart) == 3 and max(apart) < 1e-4
    kept = (run / "checkpoints" / "step-000003" / "trainer").glob("*.safetensors")
    names = {name for file in kept for name in load_file(file)}
    assert names and all(".lora_" in name for name in names)
    base, export = load_file(tiny / "model" / "model.safetensors"), load_file(run / "export" / "model.safetensors")
    moved = {name for name, array in export.items() if not np.array_equal(array, base[name])}
    frozen = {name for name in base if "layers.0.mlp." in name and overrides == FOLDED}
    assert moved == {name for name in base if name.endswith("_proj.weight")} - frozen
    assert (run / "export" / "adapter" / "adapter_config.json").is_file()
