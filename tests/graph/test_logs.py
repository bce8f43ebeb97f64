# SPDX-License-Identifier: Apache-2.0
"""A run whose plugin logs: each record has the role, the step, the group and the sample of the work."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.graph.conftest import SMALL, Relax

LOGGING = """
import logging
import structlog
from relax_core.api import Environment, Observation, Reward, Step
from relax_plugin_policy_gradient.grpo import GRPO

log = logging.getLogger("mine")

class Even(Reward):
    '''An even length.'''
    def score(self, task, trajectory):
        log.info("judged %s", task.id)
        return float(len(trajectory.response) % 2 == 0)

class Asks(Environment):
    '''One answer.'''
    async def reset(self, task, seed):
        log.info("reset", extra={"api_key": "hush", "seed": seed})
        return None
    async def step(self, action):
        return Step(Observation(""), done=True)

class Loud(GRPO):
    '''GRPO that logs.'''
    def loss(self, batch, policy):
        structlog.get_logger("mine").warning("trained", loss="grpo")
        return super().loss(batch, policy)
"""


def test_records_of_a_plugin_have_the_fields_of_their_work(
    tiny: Path, tmp_path: Path, relax_here: Relax, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # a process of its own has none of pytest's
    (tmp_path / "loud.py").write_text(LOGGING)
    done = relax_here(
        "train", tiny / "recipe.toml", *SMALL, "steps=1", "max_staleness=0", "checkpoint.every=0", 'plugins=["./loud.py"]',
        'rewards=["even"]', 'environment="asks"', 'algorithm="loud"', "--runner", "inline", "--run-dir", "run",
    )  # fmt: skip
    assert done.code == 0 and "trained" in done.err, "a warning is printed, too"
    lines = relax_here("logs", "run", "--json", "--role", "driver").out.splitlines()
    records = [record for record in map(json.loads, lines) if record.get("logger") == "mine"]

    def of(message: str) -> list[dict[str, Any]]:
        return [record for record in records if record["message"].startswith(message)]

    played = of("reset")
    assert {record["role"] for record in played} == {"rollout"} and "hush" not in "".join(lines)
    trained = [record for record in played if record["group"] < 4]
    assert {(record["group"], record["sample"]) for record in trained} == {(g, s) for g in range(4) for s in range(4)}
    assert all(record["fields"].keys() == {"api_key", "seed"} for record in played)
    assert {record["sample"] for record in of("judged") if "sample" in record} == set(range(4))
    assert all(record["message"] == f"judged {record['task']}" for record in of("judged") if "sample" in record)
    trained_by = {(record["role"], record["step"], record["fields"]["loss"]) for record in of("trained")}
    assert trained_by == {("actor", 1, "grpo")}, "by structlog"
