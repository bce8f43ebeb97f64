# SPDX-License-Identifier: Apache-2.0
"""A run trains, says what it did, and leaves what it promised. Each runner makes one run, which the tests read.

Engines, actor and reference share one device in it: what is half generated at the trainer's turn goes on after it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.graph.conftest import Relax, relax_in

pytestmark = pytest.mark.process

SHORT = (
    "steps=6", "eval.every=3", "checkpoint.every=3", "rollout.prompts_per_step=8", "eval.sets.0.size=32",
    "placement=colocate", "max_staleness=1", "algorithm.kl_coef=0.1",
)  # fmt: skip
RUNNERS = [
    pytest.param("local", marks=pytest.mark.xdist_group("test_train")), pytest.param("ray", marks=pytest.mark.ray),
]  # fmt: skip


@dataclass(frozen=True)
class FinishedRun:
    """A run directory, and the document that `relax train --json` wrote on stdout."""

    path: Path
    summary: dict[str, Any]


@pytest.fixture(scope="module", params=RUNNERS)
def finished_run(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    directory = tmp_path_factory.mktemp(f"train-{request.param}")
    run = directory / "run"
    with relax_in(directory) as relax:
        ran = relax("train", tiny / "recipe.toml", *SHORT, "--runner", request.param, "--run-dir", run, "--json")
    assert ran.code == 0, ran.err
    return FinishedRun(run, ran.json)


def test_a_short_run_trains_and_leaves_every_file_of_a_run(finished_run: FinishedRun) -> None:
    assert finished_run.summary["status"] == "finished"
    assert finished_run.summary["steps"] == 6
    run = finished_run.path
    files = (
        "config.toml",
        "plugins.json",
        "provenance.json",
        "metrics.jsonl",
        "ledger.db",
        "trace.json",
        "report.html",
        "reward.png",
        "summary.json",
        "export/config.json",
        "export/model.safetensors",
        "export/tokenizer.json",
    )
    assert [name for name in files if not (run / name).is_file()] == []
    assert list((run / "samples").glob("step-*.jsonl.zst"))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000003", "step-000006"]


def test_the_ledger_balances_at_every_step_and_lag_stays_in_bounds(finished_run: FinishedRun) -> None:
    steps = [row for row in _metrics(finished_run.path) if "reward/mean" in row]
    assert len(steps) == 6
    for row in steps:
        assert row["samples/balanced"] == 1
        assert row["samples/issued"] == row["samples/trained"] + row["samples/dropped"] + row["samples/in_flight"]
        assert 0 <= row["lag/max"] <= 1
        assert row["train/rollout_log_prob_diff_lag0_max"] < 1e-4
    assert finished_run.summary["samples_trained"] == 6 * 8 * 8


def test_colocated_roles_wait_for_each_other_and_free_memory(
    finished_run: FinishedRun, relax_here: Relax, tiny: Path
) -> None:
    steps = [row for row in _metrics(finished_run.path) if "reward/mean" in row]
    assert all(row["time/wait_turn_s"] >= 0 and "memory/freed_bytes" in row for row in steps)
    assert "take turns on cpu:0" in relax_here("graph", tiny / "recipe.toml", *SHORT).out


def test_the_exported_folder_loads_with_transformers(finished_run: FinishedRun, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished_run.path / "export")
    tokenizer = AutoTokenizer.from_pretrained(finished_run.path / "export")
    before = AutoModelForCausalLM.from_pretrained(tiny / "model")
    assert tokenizer.encode("s21=") == [55, 6, 5, 17] or len(tokenizer.encode("s21=")) == 4
    moved = [name for name, value in model.state_dict().items() if not value.equal(before.state_dict()[name])]
    assert moved


def _metrics(run: Path) -> list[dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]
