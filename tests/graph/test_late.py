# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose environment is slow with a few samples: the late rule lets their groups go, and the steps go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.graph.conftest import Relax

SLOW = """
import asyncio
from pathlib import Path

from relax_core.api import Environment, Step

STEPS = Path("run/metrics.jsonl")


def steps():
    return STEPS.read_text().count('"reward/mean"') if STEPS.exists() else 0


class SlowEnvironment(Environment):
    in_process = True

    async def reset(self, task, seed):
        if seed % 50 == 0:
            begun = steps()
            while steps() < min(begun + 3, 7):
                await asyncio.sleep(0.2)

    async def step(self, action):
        return Step("", done=True)
"""
SHORT = ("steps=8", "rollout.groups_per_step=8", "eval.every=0", "max_staleness=1", "placement=async")
REASONS = {"drop": "stale", "regenerate": "regenerated"}


@pytest.mark.parametrize("late", REASONS)
def test_late_groups_are_let_go_and_the_bound_and_the_account_hold(
    train_here: Relax, tiny: Path, tmp_path: Path, late: str
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    ran = train_here(
        tiny / "recipe.toml", *SHORT, f"rollout.late={late}", f"plugins=['{tmp_path / 'slow.py'}']",
        "environment={name='slow', timeout_s=600}", "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    summary = ran.json
    dropped = summary["samples_dropped"]
    assert (summary["status"], summary["steps"], summary["balanced"]) == ("finished", 8, True)
    assert set(dropped) == {REASONS[late]} and dropped[REASONS[late]] % 8 == 0, "whole groups, by the rule"
    assert summary["max_lag"] <= 1
    trained, issued = summary["samples_trained"], summary["samples_issued"]
    assert issued == trained + sum(dropped.values()) + summary["samples_in_flight"]
    assert trained == 8 * 8 * 8, "their places were taken by others"
