# SPDX-License-Identifier: Apache-2.0
"""An environment of verifiers plays in an interpreter of its own: its rewards and errors are the sample's, its end no zero."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
from relax_plugin_agents.verifiers_environment import Verifiers, VerifiersOptions

from relax_core.api import ConfigError, Outcome, Task, Trajectory
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.episode import Limits
from tests.unit.sampling.environment_pool import environment_pool
from tests.unit.sampling.toy_policy import Script, play

PACKAGES = str(Path(__file__).with_name("verifiers_for_tests"))
OPTIONS: dict[str, Any] = {"python": sys.executable, "taskset": "sums", "env": {"PYTHONPATH": PACKAGES}}


def data(prompt: str = "What is 1 + 1?") -> dict[str, Any]:
    return {"idx": 1, "id": None, "name": None, "prompt": prompt, "answer": "2"}


def pooled(timeout_s: float = 120.0, **more: Any) -> AbstractAsyncContextManager[EnvironmentPool]:
    return environment_pool("verifiers", {**OPTIONS, **more}, timeout_s)


async def played(pool: EnvironmentPool, said: str, task: dict[str, Any] | None = None) -> Trajectory:
    row = Task("one", "go", None, {"verifiers": task or data()})
    return await pool.play(lambda environment: play(environment, Script(said), row, Limits(200, 8)))


async def test_rewards_of_verifiers_score_the_sample_and_its_answers_are_trained() -> None:
    async with pooled() as pool:
        right, wrong = await asyncio.gather(played(pool, "It is 2."), played(pool, "It is 3."))
    assert [sample.outcome for sample in (right, wrong)] == [Outcome.FINISHED] * 2
    assert [sample.environment_reward for sample in (right, wrong)] == [1.25, 0.25]
    told = {"rewards": {"right": 1.0, "style": 0.25}, "metrics": {"length": 8.0}, "stop": "agent_completed"}
    assert right.info["verifiers"] == told
    (row,) = right.rows()
    assert sum(row.loss_mask) == len("It is 2.") + 1


async def test_failed_and_unjudged_samples_are_outcomes_and_not_zeros() -> None:
    async with pooled() as pool:
        raised, unjudged, both = [await played(pool, said) for said in ("raise", "unjudged", "both")]
    assert [sample.outcome for sample in (raised, unjudged, both)] == [Outcome.ENVIRONMENT_ERROR] * 3
    assert "verifiers: TaskError: task SumTask scoring: RuntimeError: scoring broke" in raised.info["error"]
    assert "was not judged; its rewards are {'right': None, 'style': 0.25}" in unjudged.info["error"]
    assert "2 agents have played" in both.info["error"]


async def test_rewards_of_the_run_may_judge_instead() -> None:
    async with pooled(reward="rewards") as pool:
        sample = await played(pool, "unjudged")
    assert (sample.outcome, sample.environment_reward) == (Outcome.FINISHED, 0.0)  # nothing of it


async def test_a_task_of_another_kind_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    index = {"PIP_INDEX_URL": "https://index.example/simple", "UV_NO_CACHE": "1", "CURL_CA_BUNDLE": "bundle.pem"}
    for name, value in {**index, "OPENAI_API_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)
    environment = Verifiers(VerifiersOptions(**OPTIONS))
    environment.shared = await Verifiers.open(environment.options)
    inherited = psutil.Process(environment.shared.host._program.pid).environ()
    assert index.items() <= inherited.items() and "OPENAI_API_KEY" not in inherited
    with pytest.raises(ValueError, match="column verifiers is None.*relax-verifiers-tasks"):
        await environment.run(Task("one", "go"), 7, None)  # type: ignore[arg-type]
    await environment.shared.host.stop()
    await environment.shared.gateway.stop()


async def test_an_interpreter_that_dies_is_the_outcome_of_its_samples_and_is_replaced() -> None:
    async with pooled() as pool:
        dead = await played(pool, "2", data("die"))
        assert dead.outcome is Outcome.ENVIRONMENT_ERROR and "out of everything" in dead.info["error"]
        assert (await played(pool, "It is 2.")).environment_reward == 1.25


async def test_a_hanging_environment_is_an_outcome_and_its_processes_end() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    async with pooled(timeout_s=5.0) as pool:
        hung = await played(pool, "2", data("hang"))
        assert hung.outcome is Outcome.ENVIRONMENT_TIMEOUT
    async with asyncio.timeout(30):
        while left := [one for one in psutil.process_iter(["cmdline"]) if is_ours(one, before)]:
            await asyncio.sleep(0.1)
    assert not left


def is_ours(process: psutil.Process, before: set[int]) -> bool:
    """A process that the interpreter started, or itself."""
    try:
        return PACKAGES in process.environ().get("PYTHONPATH", "") and process.pid not in before
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"python": "/no/such/python"}, r"environment\.python: .*No such file.*virtual environment with verifiers"),
        ({"taskset": "absent"}, r"environment\.taskset: .*taskset 'absent' not found.*install verifiers==0.4.0"),
        ({"env": {}}, r"environment\.taskset: .*ModuleNotFoundError: No module named 'verifiers"),
    ],
)
async def test_an_unloadable_environment_stops_the_run_at_its_start(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        await Verifiers.open(VerifiersOptions(**{**OPTIONS, **options}))


def test_the_tasks_of_a_taskset_are_rows_of_a_task_file() -> None:
    program = "from relax_plugin_agents.verifiers_environment import write_tasks; write_tasks()"
    command = [sys.executable, "-c", program, sys.executable, "sums"]
    env = {**os.environ, "PYTHONPATH": PACKAGES}
    rows = [
        json.loads(line)
        for line in subprocess.run(command, env=env, check=True, capture_output=True).stdout.splitlines()
    ]
    assert [row["id"] for row in rows] == ["0", "1", "2"]
    assert rows[1] == {"id": "1", "prompt": "What is 1 + 1?", "verifiers": data()}
