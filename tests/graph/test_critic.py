# SPDX-License-Identifier: Apache-2.0
"""A whole run with a critic: it goes on with the actor from a checkpoint, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.graph.conftest import SMALL, Relax

EXACT = (
    *SMALL, "algorithm=ppo", "optimizer.schedule=constant", "deterministic=true", "max_staleness=0", "placement=colocate"
)  # fmt: skip


def critics(run: Path) -> list[dict[str, Any]]:
    """The lines that the critic told, in order."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "critic/loss", "critic/grad_norm", "critic/value_mean", "critic/explained_variance")
    return [{key: record[key] for key in keys} for record in records if "critic/loss" in record]


def test_actor_and_critic_continue_together_from_a_checkpoint(
    train_here: Relax, relax_here: Relax, tiny: Path, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = (tiny / "recipe.toml", *EXACT)
    assert train_here(*words, "steps=4", "--run-dir", whole).code == 0
    assert train_here(*words, "steps=2", "--run-dir", parts).code == 0
    assert [line["step"] for line in critics(parts)] == [1, 2]
    resumed = relax_here("resume", parts, "steps=4", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["balanced"] and resumed.json["samples_trained"] == 4 * 16
    assert critics(parts) == critics(whole)
    export = "export/model.safetensors"
    assert (parts / export).read_bytes() == (whole / export).read_bytes()
    files = [file.relative_to(whole) for file in (whole / "checkpoints/step-000004/critic").glob("*.safetensors")]
    for file in files:
        one, other = load_file(whole / file), load_file(parts / file)
        assert one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one), file
    assert files
