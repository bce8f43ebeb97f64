# SPDX-License-Identifier: Apache-2.0
"""A run whose tools come from a server: they are told beforehand and held fast by their digest."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from relax_core.views.run import open_run
from tests.graph.conftest import Relax

pytestmark = pytest.mark.process

SERVERS = Path(__file__).parents[2] / "plugins" / "relax-plugin-mcp" / "tests" / "servers.py"
SHORT = (
    "steps=2", "rollout.groups_per_step=2", "rollout.group_size=4", "eval.every=0", 'rewards=["exact"]',
    "model.tool_calls=hermes",
)  # fmt: skip


def test_tools_are_listed_before_a_run_and_a_run_with_other_tools_is_refused(
    train_here: Relax, relax_here: Relax, game: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f'name="acting", per="worker", command=["{sys.executable}", "{SERVERS}", "plain"]'

    def environment(more: str = "") -> str:
        return f'environment={{name="mcp", servers=[{{{table}{more}}}]}}'

    monkeypatch.setattr("relax_core.control.dry_run.check_starts", lambda *_: ())  # imports torch
    told = relax_here("train", game / "recipe.toml", *SHORT, environment(), "--dry-run")
    assert told.code == 0, told.err
    (digest,) = re.findall(r"^environment mcp, acting: act; digest (sha256:[0-9a-f]{64})$", told.out, re.MULTILINE)

    command = (game / "recipe.toml", *SHORT, environment(f', digest="{digest}"'), "--run-dir", "run")
    ran = train_here(*command)
    assert ran.code == 0, ran.err
    assert (ran.json["status"], ran.json["samples_trained"], ran.json["balanced"]) == ("finished", 2 * 2 * 4, True)
    run = open_run(tmp_path / "run")
    outcomes = {sample["outcome"] for step in run.sample_steps() for sample in run.samples(step)}
    assert outcomes <= {"finished", "truncated"}

    wrong = f"sha256:{'0' * 64}"
    refused = train_here(*command[:-2], "--run-dir", "other", environment(f', digest="{wrong}"'))
    assert refused.code == 2, "before anything was trained"
    assert wrong in refused.err and digest in refused.err
