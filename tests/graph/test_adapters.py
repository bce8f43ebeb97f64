# SPDX-License-Identifier: Apache-2.0
"""Whole runs that train adapters: engines lay over their base what the trainer trains, or get it folded in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from tests.graph.conftest import Relax

pytestmark = pytest.mark.process

ALONE = ("placement.actor.ranks=2", "placement.rollout.engines=2", "trainer.sharding=fsdp", "algorithm.kl_coef=0.01")
FOLDED = ("model.lora.dora=true", "weights.payload=delta", 'model.freeze=["layers.0.mlp"]')


@pytest.mark.parametrize("overrides", [ALONE, FOLDED])
def test_engines_sample_from_what_the_adapters_make_of_the_base(
    relax: Relax, train_here: Relax, tiny: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    words = (tiny / "recipe.toml", "--run-dir", run, "steps=4", "eval.every=0", "rollout.groups_per_step=12",
             "model.lora.rank=4", "optimizer.lr=5e-3", "optimizer.warmup_steps=0", *overrides)  # fmt: skip
    ran = train_here(*words) if overrides == FOLDED else relax("train", *words, "--runner", "local")
    assert ran.code == 0, ran.err
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    apart = [step["train/rollout_log_prob_diff_lag0_max"] for step in steps if "reward/mean" in step]
    assert len(apart) == 4 and max(apart) < 1e-4
    kept = (run / "checkpoints" / "step-000004" / "trainer").glob("*.safetensors")
    names = {name for file in kept for name in load_file(file)}
    assert names and all(".lora_" in name for name in names)
    base, export = load_file(tiny / "model" / "model.safetensors"), load_file(run / "export" / "model.safetensors")
    moved = {name for name, array in export.items() if not np.array_equal(array, base[name])}
    assert moved == {name for name in base if name.endswith("_proj.weight")} - _frozen(base, overrides)
    assert (run / "export" / "adapter" / "adapter_config.json").is_file()


def _frozen(names: dict[str, np.ndarray], overrides: tuple[str, ...]) -> set[str]:
    return {name for name in names if "layers.0.mlp." in name} if overrides == FOLDED else set()
