# SPDX-License-Identifier: Apache-2.0
"""Whole runs that ask other models: a judge whose engine is killed, and a teacher and judges that share devices."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from relax_core.views.run import open_run
from tests.graph.conftest import SMALL, Relax, started_runs
from tests.graph.gated import gated, open_gate, shut
from tests.graph.ray_run import Running, kill

pytestmark = pytest.mark.process

JUDGE = (
    '{name = "judge", read = "log-probs", chat = false, truncated = true, template = "{prompt}", '
    'choices = {"0" = 0.0, "9" = 1.0}}'
)

PAIRS = (
    '{name = "judge-pairs", read = "log-probs", chat = false, opponents = 1, truncated = true, '
    'template = "{first} or {second}", choices = {"0" = 0.0, "9" = 1.0}}'
)


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def run_with_teacher_and_judge(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Running:
    """A run whose teacher is the policy itself, whose judge is scored by a pool, and whose pool's engine was killed."""
    pool = f'[{{name = "judge", path = "{tiny / "model"}"}}]'
    settings = (*SMALL, f"run.runner={request.param}", "algorithm=distillation", "steps=8", "optimizer.lr=1e-6",
                f"teachers={tiny / 'model'}", f"engines={pool}", f"rewards=[{JUDGE}]")  # fmt: skip
    with started_runs(tmp_path_factory.mktemp("pools")) as start:
        path = start.directory / "run"
        shut(path, 2)  # most of the steps are judged after the kill
        run = start.train(path, tiny / "recipe.toml", *settings, *gated(path))
        run.until_steps(1)
        kill(run.fact("rollout", "pools")["judge"]["engines"]["judge-engine-0"]["pid"])
        open_gate(path)
        assert run.end() == 0, run.err
    return run


@pytest.mark.faults
def test_a_judges_engine_dies_and_no_sample_is_lost_or_scored_zero(run_with_teacher_and_judge: Running) -> None:
    summary = run_with_teacher_and_judge.summary()
    assert (summary["status"], summary["samples_trained"], summary["restarts"]) == ("finished", 128, {"engine": 1})
    assert summary["balanced"] and not summary["samples_dropped"]
    assert all(0 < step["reward/judge"] < 1 for step in run_with_teacher_and_judge.steps())


@pytest.mark.faults
def test_a_teacher_that_is_the_policy_has_nothing_to_teach_at_first(run_with_teacher_and_judge: Running) -> None:
    """Rewards are measured all the same; what it learns from is 0 until its own rounding moves it."""
    metrics = open_run(run_with_teacher_and_judge.path).metrics()
    assert metrics.column("distill/kl")[:2] == pytest.approx([0.0, 0.0], abs=1e-4)
    assert metrics.column("distill/agreement")[:2] == pytest.approx([1.0, 1.0], abs=1e-3)
    assert all(0 <= reward <= 1 for reward in metrics.column("reward/mean"))


def test_a_judge_and_a_teacher_take_turns_with_colocated_engines(train_here: Relax, tiny: Path, tmp_path: Path) -> None:
    """Judges are asked at the end of each wave, also by the evaluation, and the trainer has its lease as ever."""
    pools = ", ".join(
        f'{{name = "{name}", path = "{tiny / "model"}", devices = "deferred"}}' for name in ("same", "judge")
    )
    ran = train_here(
        tiny / "recipe.toml", *SMALL[:2], "algorithm=distillation", "steps=2", "checkpoint.every=0", "optimizer.lr=1e-6",
        "eval={every = 2, size = 4, at_start = false}", "placement=colocate", f"engines=[{pools}]",
        'teachers=[{engine = "same"}]', f"rewards=[{JUDGE}, {PAIRS}]", "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert (ran.json["status"], ran.json["samples_trained"], ran.json["balanced"]) == ("finished", 32, True)
    metrics = open_run(tmp_path / "run").metrics()
    assert metrics.column("distill/kl") == pytest.approx([0.0, 0.0], abs=1e-4)
    assert all(0 < reward < 1 for reward in metrics.column("reward/judge"))
    assert metrics.column("reward/judge-pairs") == pytest.approx([0.5, 0.5]), "what one wins, its opponent loses"
    assert all(0 < abs(bias) < 1 for bias in metrics.column("reward/judge-pairs/verdicts/position_bias"))
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    tracks = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    at_work = [
        (one["ts"], one["ts"] + one["dur"], track) for one in events
        if one["ph"] == "X" and one["name"] in ("generating", "scoring") and "engine" in (track := tracks[one["tid"]])
    ]  # fmt: skip
    assert {track for *_, track in at_work} == {"engine-0", "judge-engine-0", "same-engine-0"}
    at_work.sort()
    for (_, end, one), (start, _, other) in pairwise(at_work):
        assert end <= start, f"{one} and {other} were at work at the same time"
