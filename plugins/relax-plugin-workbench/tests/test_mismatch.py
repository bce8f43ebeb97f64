# SPDX-License-Identifier: Apache-2.0
"""The bench with the real engine and trainer in one process: of one pair of formats, of several, and what it refuses."""

import asyncio
import json
import os

import pytest
from relax_plugin_workbench.mismatch import Setting, mismatch
from typer.testing import CliRunner

from relax_core.api.errors import ConfigError
from relax_core.cli.main import app
from relax_core.config.run_config import to_toml


def source(folder):
    return {
        "steps": 1, "algorithm": {"name": "grpo"}, "rewards": [{"name": "exact"}], "eval": {"every": 0},
        "model": {"path": str(folder / "model")}, "data": {"train": str(folder / "train.jsonl")},
        "rollout": {"groups_per_step": 4, "group_size": 2, "max_new_tokens": 12}, "run": {"runner": "inline"},
    }  # fmt: skip


def measured(folder, *overrides, samples=16, formats=()):
    return asyncio.run(mismatch([source(folder)], overrides, samples, formats))


def test_one_pair_is_measured_as_the_configuration_has_it(folder):
    (one,) = measured(folder)
    assert one.setting == Setting("float32", "float32", False)
    assert 0 < one.found.tokens <= 16 * 12 and one.found.max < 1e-4 and one.rerouted is None


def test_every_pair_of_formats_with_and_without_replay(folder):
    found = {one.setting: one for one in measured(folder, samples=32, formats=("float32", "bfloat16"))}
    assert len(found) == 8 and all(not one.refused for one in found.values())
    exact, rounded = (found[Setting("float32", engine)] for engine in ("float32", "bfloat16"))
    assert exact.found.max < 1e-4 and exact.rerouted == 0.0
    assert rounded.found.mean > 10 * exact.found.mean
    assert found[Setting("float32", "bfloat16", True)].found.mean < rounded.found.mean
    assert rounded.rerouted > 0


def test_an_impossible_pair_of_formats_is_reported_with_the_others(folder):
    apart = ("algorithm.correction=truncate", "placement=async", "batch.updates_per_step=2")
    found = {one.setting: one for one in measured(folder, *apart, samples=2, formats=("float32", "bfloat16"))}
    assert "actor-fwd" in found[Setting("float32", "bfloat16")].refused
    assert found[Setting("bfloat16", "float32")].found is not None


def test_an_algorithm_without_samples_is_refused(folder):
    with pytest.raises(ConfigError, match=r"algorithm\.name: got sft"):
        measured(folder, "algorithm=sft", "rewards=[]")


def test_the_workers_have_the_variables_of_the_run(folder, monkeypatch):
    monkeypatch.delenv("RELAX_TEST_BENCH", raising=False)
    measured(folder, 'run.env.RELAX_TEST_BENCH="1"', samples=1)
    assert os.environ.pop("RELAX_TEST_BENCH") == "1"


def test_the_command_reports_the_difference_of_two_formats(folder, tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(source(folder)))
    command = f"bench mismatch {tmp_path / 'run.toml'} rollout.dtype=float16 --samples 8 --json"
    said = CliRunner().invoke(app, command.split())
    assert said.exit_code == 0, said.output
    (one,) = json.loads(said.stdout)["settings"]
    assert (one["trainer"], one["engine"], one["replay"]) == ("float32", "float16", False)
    assert 0 < one["mean"] <= one["p99"] <= one["max"] < 0.1 and one["k3_kl"] > 0
