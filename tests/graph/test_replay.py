# SPDX-License-Identifier: Apache-2.0
"""`relax replay`: a step of a deterministic run is trained again bit for bit; a change shows in what it changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.graph.conftest import Relax

pytestmark = pytest.mark.process


def test_a_step_of_a_deterministic_run_repeats_bit_for_bit(relax_here: Relax, whole: Path, tmp_path: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*"))
    ran = relax_here("replay", whole, "--step", "4", "--out", tmp_path / "copy", "--json")
    assert ran.code == 0, ran.err
    found = ran.json
    assert found["identical"] and found["weights"] is True and found["start"] == 2 and found["num_samples"] == 16
    assert found["changed_samples"] == []
    metrics = {one["key"]: (one["recorded"], one["replayed"]) for one in found["metrics"]}
    assert {"train/loss", "reward/mean", "policy/entropy", "tokens/trained"} <= metrics.keys()
    assert all(recorded == replayed for recorded, replayed in metrics.values())
    assert (tmp_path / "copy/checkpoints/step-000004/state.json").is_file()
    assert before == sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*")), "a run is only read"


def test_a_difference_of_a_deterministic_run_is_an_error(relax_here: Relax, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"  # as if its record said something else
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("export*", "step-000004"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (record,) = [line for line in lines if line["step"] == 3 and "train/loss" in line]
    record["train/loss"] += 1.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    differs = relax_here("replay", run, "--step", "3")
    assert differs.code == 1 and "metrics: " in differs.out and ", 1 differ" in differs.out
    assert "train/loss" in differs.out and "weights: not compared, the run has no checkpoint of step 3" in differs.out


def test_a_changed_option_shows_in_what_it_changes(relax_here: Relax, whole: Path) -> None:
    changed = relax_here("replay", whole, "--step", "3", "optimizer.lr=0.5", "--json")
    assert changed.code == 0, changed.err
    keys = [one["key"] for one in changed.json["metrics"] if one["recorded"] != one["replayed"]]
    assert keys == ["train/lr"] and changed.json["changed_samples"] == [], "the update comes after what is measured"


def test_what_cannot_be_replayed_is_refused(relax_here: Relax, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    staged = tmp_path / "staged"
    (staged / "stages/0-first").mkdir(parents=True)
    shutil.copyfile(whole / "config.toml", staged / "config.toml")
    for run, words, said in (
        (whole, ("--step", "9"), "--step: got 9; the record has the steps 1 to 6"),
        (whole, ("--step", "3", "--out", tmp_path / "full"), "which exists; name a folder that is new or empty"),
        (whole, ("--step", "3", "algorithm.clip=1"), "algorithm.clip"),
        (whole, ("--step", "3", "steps=2"), "steps: got 2; step 3 needs at least 3"),
        (staged, ("--step", "3"), "a run with stages"),
    ):
        refused = relax_here("replay", run, *words, "--json")
        assert refused.code == 2 and said in refused.json["error"], refused.json
