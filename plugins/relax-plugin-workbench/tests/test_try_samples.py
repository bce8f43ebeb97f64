# SPDX-License-Identifier: Apache-2.0
"""The output of `relax try`."""

import json

from typer.testing import CliRunner

from relax_core.api.checks import CheckFinding
from relax_core.cli.main import app


def test_try_prints_the_checks_that_need_no_trainer(monkeypatch):
    sample = {"task_id": "t1", "group_id": 0, "reward": 1.0, "outcome": "finished", "response": "12"}
    checks = (
        CheckFinding("rewards differ", "not applicable", "no rewards"),
        CheckFinding("tokens are trained", "failed", "0", "group 0, sample 1", "tokens are masked"),
        CheckFinding("the template round trip is exact", "ok", "0 of 1 prompts"),
    )

    async def tried(*_):
        return (sample,), checks, ("8 tasks remain",)

    monkeypatch.setattr("relax_plugin_workbench.try_run.try_tasks", tried)
    *_, passed, fault = CliRunner().invoke(app, ["try", "my.toml"]).stdout.split("\n\n")
    assert passed == "step 1: the template round trip is exact (0 of 1 prompts)"
    assert fault == "step 1: check failed: tokens are trained: 0; group 0, sample 1; tokens are masked\n"
    as_json = CliRunner().invoke(app, ["try", "my.toml", "--json"])
    assert json.loads(as_json.stdout) == [sample] and as_json.stderr == f"relax: warning: 8 tasks remain\n{fault}"
