# SPDX-License-Identifier: Apache-2.0
"""`relax bench engines` with real engines: what it measures, what it refuses, and what it prints."""

import asyncio
import json

import pytest
from relax_plugin_workbench.engine_speed import EngineSpeed, Round, engine_speeds
from typer.testing import CliRunner

from relax_core.api.errors import ConfigError
from relax_core.cli.main import app
from relax_core.config.run_config import to_toml

pytestmark = pytest.mark.one_process("engines")  # whose fork server loads torch once
TWICE = "rollout.group_size=4"
ABSENT = "engine=not-there"


@pytest.fixture
def config(folder):
    return {
        "steps": 1, "algorithm": {"name": "grpo"}, "rewards": [{"name": "exact"}], "eval": {"every": 0},
        "model": {"path": str(folder / "model")}, "data": {"train": str(folder / "train.jsonl")},
        "rollout": {"groups_per_step": 4, "group_size": 2, "max_new_tokens": 12},
    }  # fmt: skip


def test_settings_are_measured_with_the_tasks_of_the_configuration(config):
    found = asyncio.run(engine_speeds([config], ["run.runner=inline"], ["", TWICE, ABSENT], 2))
    own, twice, absent = (next(one for one in found if one.setting == setting) for setting in ("", TWICE, ABSENT))
    assert found[-1] is absent and "not-there" in absent.refused and absent.tokens_per_s == 0.0
    assert found[0].tokens_per_s >= found[1].tokens_per_s > 0
    for one, samples in ((own, 8), (twice, 16)):
        assert len(one.rounds) == 2 and one.failed == 0 and one.start_s > 0
        assert all(samples <= part.tokens <= 12 * samples for part in one.rounds)


def test_the_rate_is_of_all_rounds(config):
    one = EngineSpeed("", rounds=(Round(1.0, 30, 0), Round(3.0, 10, 2), Round(1.0, 20, 1)))
    assert (one.tokens_per_s, one.round_s, one.failed) == (12.0, 1.0, 3)


def test_no_setting_and_no_samples_are_refused(config):
    with pytest.raises(ConfigError, match="no setting can run"):
        asyncio.run(engine_speeds([config], [], [ABSENT], 1))
    with pytest.raises(ConfigError, match="the algorithm samples nothing"):
        asyncio.run(engine_speeds([config], ["algorithm=sft", "rewards=[]"], [""], 1))


def test_the_command_measures_installed_engines_in_processes_and_names_the_fastest(config, tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(config))
    inline = ["bench", "engines", str(tmp_path / "run.toml"), "run.runner=inline", "--rounds", "1"]
    said = CliRunner().invoke(app, inline)
    assert said.exit_code == 0, said.output
    head, row, *lines = said.stdout.splitlines()
    assert " ".join(head.split()) == "setting tokens/s s per step start s MB prefix hits failed"
    assert row.startswith("as configured") and lines[-1].startswith("fastest: as configured with ")
    assert any(line.startswith("engine=vllm can't run: ") for line in lines)
    command = f"bench engines {tmp_path / 'run.toml'} --json --rounds 1 --try {TWICE} --try {ABSENT}"
    both = CliRunner().invoke(app, command.split())
    able, absent = json.loads(both.stdout)["settings"]
    assert able["setting"] == TWICE and able["memory_bytes"] > 0 and able["failed"] == 0 and able["tokens_per_s"] > 0
    assert absent.keys() == {"setting", "refused"}
