# SPDX-License-Identifier: Apache-2.0
"""A run trains, says what it did, and leaves what it promised."""

from __future__ import annotations

import json
from pathlib import Path

from tests.graph.conftest import Relax

SHORT = ("steps=6", "eval.every=3", "checkpoint.every=3", "rollout.prompts_per_step=8", "eval.sets.0.size=32")


def test_a_short_run_trains_and_leaves_every_file_of_a_run(
    relax: Relax, tiny: Path, runner: str, tmp_path: Path
) -> None:
    ran = relax("train", tiny / "recipe.toml", *SHORT, "--runner", runner, "--run-dir", tmp_path / "run", "--json")
    assert ran.code == 0, ran.err
    summary = ran.json
    assert summary["status"] == "finished"
    assert summary["steps"] == 6
    run = tmp_path / "run"
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


def test_the_ledger_balances_at_every_step_and_lag_stays_in_bounds(
    relax: Relax, tiny: Path, runner: str, tmp_path: Path
) -> None:
    ran = relax("train", tiny / "recipe.toml", *SHORT, "--runner", runner, "--run-dir", tmp_path / "run", "--json")
    assert ran.code == 0, ran.err
    steps = [row for row in _metrics(tmp_path / "run") if "reward/mean" in row]
    assert len(steps) == 6
    for row in steps:
        assert row["samples/balanced"] == 1
        assert row["samples/issued"] == row["samples/trained"] + row["samples/dropped"] + row["samples/in_flight"]
        assert 0 <= row["lag/max"] <= 1
        assert row["train/rollout_log_prob_diff_lag0_max"] < 1e-4
    assert ran.json["samples_trained"] == 6 * 8 * 8


def test_the_exported_folder_loads_with_transformers(relax: Relax, tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ran = relax("train", tiny / "recipe.toml", *SHORT, "--runner", "local", "--run-dir", tmp_path / "run")
    assert ran.code == 0, ran.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/export")
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
