# SPDX-License-Identifier: Apache-2.0
"""Whole runs that ask other models: a judge on Ray whose engine is killed, and a teacher and a judge on the local runner."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.views.run import open_run
from tests.graph.conftest import Relax
from tests.graph.ray_run import Start, kill

pytestmark = pytest.mark.timeout(300)
JUDGE = (
    '{name = "judge", read = "log-probs", chat = false, truncated = true, template = "{prompt}", '
    'choices = {"0" = 0.0, "9" = 1.0}}'
)


@pytest.mark.ray
def test_a_judges_engine_dies_and_no_sample_is_lost_or_scored_zero(start: Start, tiny: Path, tmp_path: Path) -> None:
    pool = f'[{{name = "judge", path = "{tiny / "model"}"}}]'
    short = ("steps=4", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.every=0", "run.runner=ray")
    run = start.train(tmp_path / "run", tiny / "recipe.toml", *short, f"engines={pool}", f"rewards=[{JUDGE}]")
    run.until_steps(1)
    kill(run.fact("rollout", "pools")["judge"]["engines"]["judge-engine-0"]["pid"])
    assert run.end() == 0, run.err
    summary = run.summary()
    assert (summary["status"], summary["samples_trained"], summary["restarts"]) == ("finished", 64, {"engine": 1})
    assert summary["balanced"] and not summary["samples_dropped"]
    assert all(0 < step["reward/judge"] < 1 for step in run.steps())


def test_a_teacher_behind_a_pool_thinks_as_the_policy_that_it_is(relax: Relax, tiny: Path, tmp_path: Path) -> None:
    """And a judge beside it, with a pool of its own over the same folder."""
    pools = ", ".join(f'{{name = "{name}", path = "{tiny / "model"}"}}' for name in ("same", "judge"))
    ran = relax(
        "train", tiny / "recipe.toml", "algorithm=distillation", "steps=2", "rollout.prompts_per_step=4",
        "rollout.group_size=4", "eval.every=0", "checkpoint.every=0", "optimizer.lr=1e-6", f"engines=[{pools}]",
        'teachers=[{engine = "same"}]', f"rewards=[{JUDGE}]", "--runner", "local", "--run-dir", tmp_path / "run", "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert (ran.json["status"], ran.json["samples_trained"]) == ("finished", 32)
    metrics = open_run(tmp_path / "run").metrics()
    assert metrics.column("distill/kl") == pytest.approx([0.0, 0.0], abs=1e-4)
    assert all(0 < reward < 1 for reward in metrics.column("reward/judge"))
