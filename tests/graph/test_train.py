# SPDX-License-Identifier: Apache-2.0
"""Each runner makes one run, which loses an engine, a reward process and a rank at named points; all tests read these runs.

Engines, actor and reference share one device.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relax_core.views.run import open_run
from tests.graph.conftest import Relax, relax_in
from tests.graph.exact import EXACT, STEPS, assert_ends_like
from tests.graph.failing import failing

pytestmark = pytest.mark.process

RUNNERS = [
    pytest.param("local", marks=pytest.mark.one_process("test_train")), pytest.param("ray", marks=pytest.mark.ray),
]  # fmt: skip


@dataclass(frozen=True)
class FinishedRun:
    """A run directory, the document that `relax train --json` wrote on stdout, and stderr."""

    path: Path
    summary: dict[str, Any]
    err: str


@pytest.fixture(scope="module", params=RUNNERS)
def finished_run(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    directory, marks = tmp_path_factory.mktemp(f"train-{request.param}"), tmp_path_factory.mktemp("failing") / "marks"
    with relax_in(directory) as relax:
        ran = relax("train", tiny / "recipe.toml", *EXACT, *failing(marks), "--runner", request.param,
                    "--run-dir", directory / "run", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert {path.stem for path in marks.glob("*.died")} == {"engine", "reward", "rank"}
    return FinishedRun(directory / "run", ran.json, ran.err)


def test_an_interrupted_run_ends_with_the_weights_and_samples_of_an_undisturbed_run(
    finished_run: FinishedRun, whole: Path
) -> None:
    restarts = {"engine": 1, "actor": 1, "reward-failing-reward-0": 1}
    assert finished_run.summary["restarts"] == restarts, finished_run.err
    assert_ends_like(whole, finished_run.path, finished_run.summary)
    evaluated = [open_run(run).evaluations() for run in (finished_run.path, whole)]
    assert [(one["step"], len(one["tasks"])) for one in evaluated[0]] == [(0, 8), (4, 8), (STEPS, 8)]
    assert evaluated[0] == evaluated[1], "the same weights and draws give the same rewards, task by task"


def test_a_run_leaves_all_its_files(finished_run: FinishedRun) -> None:
    assert finished_run.summary["status"] == "finished"
    run = finished_run.path
    files = (
        "config.toml", "plugins.json", "provenance.json", "events.jsonl", "metrics.jsonl", "evaluations.jsonl", "ledger.db",
        "trace.json",
        "report.html", "reward.png", "summary.json", "export/config.json", "export/model.safetensors", "export/tokenizer.json",
    )  # fmt: skip
    assert [name for name in files if not (run / name).is_file()] == []
    assert list((run / "samples").glob("step-*.jsonl.zst"))
    checkpoints = [f"step-{step:06d}" for step in range(2, STEPS + 1, 2)]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == checkpoints


def test_at_every_step_the_ledger_balances_and_colocated_roles_wait_for_each_other_and_free_memory(
    finished_run: FinishedRun, relax_here: Relax, tiny: Path
) -> None:
    steps = _steps(finished_run.path)
    assert len(steps) == STEPS
    for row in steps:
        assert row["samples/balanced"] == 1
        assert row["samples/issued"] == row["samples/trained"] + row["samples/dropped"] + row["samples/in_flight"]
        assert row["lag/max"] == 0
        assert row["train/rollout_log_prob_diff_lag0_max"] < 1e-4
        assert row["time/wait_turn_s"] >= 0 and "memory/freed_bytes" in row
    assert "take turns on cpu:0" in relax_here("graph", tiny / "recipe.toml", *EXACT).out


def test_every_check_of_the_first_step_passes(finished_run: FinishedRun) -> None:
    (checks,) = open_run(finished_run.path).first_steps().values()
    assert len(checks) > 10
    others = {check.name: check.state for check in checks if check.state != "ok"}
    assert others == {"tokenizer and model agree": "not applicable"}, "the model's own tokenizer is the only one"


def test_the_exported_folder_loads_with_transformers(finished_run: FinishedRun, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished_run.path / "export")
    tokenizer = AutoTokenizer.from_pretrained(finished_run.path / "export")
    before = AutoModelForCausalLM.from_pretrained(tiny / "model")
    assert len(tokenizer.encode("s21=")) == 4
    assert [name for name, value in model.state_dict().items() if not value.equal(before.state_dict()[name])]


def _steps(run: Path) -> list[dict[str, float]]:
    """Return the records of finished steps, each with all metrics of its step."""
    rows: dict[int, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows) if "reward/mean" in rows[step]]
