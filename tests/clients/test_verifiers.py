# SPDX-License-Identifier: Apache-2.0
"""A taskset of the real verifiers plays here: what the policy was asked and said is trained, and paid as its rewards say."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_core.api import Outcome, Task, Trajectory
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.episode import Limits
from tests.clients.conftest import VERIFIERS
from tests.unit.sampling.environment_pool import environment_pool
from tests.unit.sampling.toy_policy import Script, play, texts

TASKSETS = {"PYTHONPATH": str(Path(__file__).with_name("tasksets"))}
START_S = 600.0
"""Its imports take half a minute on a busy machine."""
AGENT = {"harness": {"id": "relax-asks"}, "runtime": {"type": "subprocess"}}
WRITE = "from relax_plugin_agents.verifiers_environment import write_tasks; write_tasks()"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """The taskset as rows of a task file."""
    command = [sys.executable, "-c", WRITE, VERIFIERS, "relax-sums"]
    written = subprocess.run(command, env={**os.environ, **TASKSETS}, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in written.stdout.splitlines()]


def test_tasks_of_verifiers_are_written(rows: list[dict[str, Any]]) -> None:
    asked = [(row["prompt"], row["verifiers"]["answer"]) for row in rows]
    assert asked == [(f"What is {n} + 1?", str(n + 1)) for n in range(3)]


async def test_tasks_of_verifiers_are_played_and_failures_do_not_score_zero(rows: list[dict[str, Any]]) -> None:
    options = {
        "python": VERIFIERS, "taskset": "relax-sums", "settings": {"agent": AGENT}, "env": TASKSETS, "start_s": START_S
    }  # fmt: skip

    async def played(pool: EnvironmentPool, said: str) -> Trajectory:
        task = Task("one", rows[1]["prompt"], None, {"verifiers": rows[1]["verifiers"]})
        return await pool.play(lambda environment: play(environment, Script(said), task, Limits(200, 8)))

    async with environment_pool("verifiers", options, START_S) as pool:
        right, wrong, failed = await asyncio.gather(*(played(pool, said) for said in ("It is 2.", "it is 3", "raise")))
    assert [sample.outcome for sample in (right, wrong)] == [Outcome.FINISHED] * 2, (right.info, wrong.info)
    assert [sample.environment_reward for sample in (right, wrong)] == [1.25, 0.0]
    assert right.info["verifiers"]["metrics"] == {"length": 8.0}
    assert texts(right) == ["[user:what is 1 + 1?][a:IT IS 2.$"]
    (row,) = right.rows()
    assert sum(row.loss_mask) == len("It is 2.") + 1
    assert failed.outcome is Outcome.ENVIRONMENT_ERROR and "scoring broke" in failed.info["error"]
