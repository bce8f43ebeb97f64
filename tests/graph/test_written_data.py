# SPDX-License-Identifier: Apache-2.0
"""Learning from what somebody wrote, through the command line: pairs, and stages that are broken off."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.graph.conftest import Relax

STAGES = """
[rollout]
groups_per_step = 4
group_size = 4

[[stages]]
name = "warm-start"
algorithm = "sft"
steps = 2
rollout = { groups_per_step = 16 }

[[stages]]
name = "rl"
algorithm = { name = "grpo", aggregation = "token" }
steps = 2
checkpoint = { every = 1 }
"""


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_pairs_raise_their_margin(train_here: Relax, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ran = train_here(tiny / "recipe.toml", "algorithm=dpo", "steps=4", "optimizer.lr=1e-3", "eval.every=4",
                     "eval.sets.0.size=32", "--run-dir", run)  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json["balanced"] and ran.json["samples_trained"] == 4 * 32 * 2 and ran.json["max_lag"] == 0
    margins = [line["eval/held-out/margin"] for line in lines(run) if "eval/held-out/margin" in line]
    assert margins[0] == 0.0 < margins[-1]
    assert ran.json["eval_last"]["loss"] < ran.json["eval_first"]["loss"]
    assert ran.json["weight_publishes"] == 0 and (run / "export" / "model.safetensors").is_file()


def test_stages_continue_with_what_was_exported_and_resume_where_they_were(
    train_here: Relax, relax_here: Relax, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "stages.toml").write_text(STAGES)
    run = tmp_path / "run"
    ran = train_here(tiny / "recipe.toml", tmp_path / "stages.toml", "eval.every=0", "--run-dir", run)
    assert ran.code == 0, ran.err
    assert ran.json["steps"] == 4 and ran.json["samples_trained"] == 2 * 16 + 2 * 16 and ran.json["balanced"]
    steps = [(line["step"], line["stage"]) for line in lines(run) if "train/loss" in line]
    assert steps == [(1, "warm-start"), (2, "warm-start"), (3, "rl"), (4, "rl")]
    warm, rl = run / "stages" / "0-warm-start", run / "stages" / "1-rl"
    assert (run / "export").resolve() == (rl / "export").resolve()
    assert str(warm / "export") in (rl / "config.toml").read_text()

    for left in (rl / "stage.json", run / "export", run / "summary.json"):
        left.unlink()
    shutil.rmtree(rl / "checkpoints" / "step-000002")
    again = relax_here("resume", run, "--json")
    assert again.code == 0, again.err
    assert again.json["steps"] == 4 and again.json["balanced"]
    steps = [(line["step"], line["stage"]) for line in lines(run) if "train/loss" in line]
    assert [step for step, _ in steps] == [1, 2, 3, 4] and steps[-1] == (4, "rl")
    assert relax_here("resume", run).code == 2
