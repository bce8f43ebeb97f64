# SPDX-License-Identifier: Apache-2.0
"""Code of authors that tries what it must not: read credentials, write to the run directory, reach the trainer's process."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relax_core.api import Chosen, Message, SystemClock, Task, Trajectory
from relax_core.api.role import PROGRAM_ENV, visible_environment
from relax_core.config.run_config import EnvironmentChoice, RewardChoice
from relax_core.registry.catalogue import Catalogue
from relax_core.rewards.scorer import RewardScorer
from relax_core.rpc.isolated_pool import INHERITED_ENV, ProcessStarter
from relax_core.runners.local.landlock import MIN_VERSION, landlock_version
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.environments import EnvironmentPool

THIEVES = """
import json, os, signal, sys
from pathlib import Path
from relax_core.api import Environment, Reward, Score, Step


def attempt(action):
    try:
        action()
        return "done"
    except OSError as error:
        return type(error).__name__


def tried(run, parent):
    run = Path(run)
    Path("notes.txt").write_text("mine")
    return {
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "writes": [attempt(lambda: (run / "new").write_text("x")),
                   attempt(lambda: (run / "config.toml").write_text("x")),
                   attempt(lambda: (run / "config.toml").unlink()),
                   attempt(lambda: run.rename(run.parent / "other"))],
        "beside": attempt(lambda: (run.parent / "cache" / "new").write_text("x")),
        "environ": attempt(lambda: Path(f"/proc/{parent}/environ").read_bytes()),
        "signal": attempt(lambda: os.kill(parent, 0)),
        "arguments": sys.argv + [os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)],
    }


class Thief(Reward):
    def score(self, task, trajectory):
        Path(task.answer).write_text(json.dumps(tried(task.metadata["run"], task.metadata["parent"])))
        return 1.0


class Burglar(Environment):
    gives_reward = True

    async def reset(self, task, seed):
        return json.dumps(tried(task.metadata["run"], task.metadata["parent"]))

    def format_observation(self, observation):
        from relax_core.api import Message
        return (Message("user", observation),)
"""
SECRETS = {
    "RELAX_TOKEN": "t-1", "HF_TOKEN": "t-2", "WANDB_API_KEY": "t-3", "AWS_SECRET_ACCESS_KEY": "t-4", "PYTHON_AUTH_TOKEN": "t-5",
    "DATABASE_URL": "postgres://me:t-6@host",
}  # fmt: skip

REFUSED = {"PermissionError", "FileNotFoundError", "ProcessLookupError"}
"""By Landlock; the others by a process namespace."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for folder in ("run/logs", "cache"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text("steps = 1")
    return tmp_path / "run"


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "thieves.py"
    path.write_text(THIEVES)
    return str(path)


@pytest.fixture
async def workers(run: Path, plugin: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalWorkers]:
    for name, value in {**SECRETS, "NAMED_KEY": "n", "LC_ALL": "C.UTF-8"}.items():
        monkeypatch.setenv(name, value)
    children = LocalWorkers([plugin], log_dir=run / "logs", protected=run, run_env={"OF_THE_RUN": "r"})
    yield children
    await children.close()


def task(run: Path) -> Task:
    return Task("t", "?", str(run.parent / "cache" / "told.json"), {"run": str(run), "parent": os.getpid()})


def check(told: dict[str, Any], run: Path) -> None:
    seen = told["variables"]
    assert not any(secret in value for secret in SECRETS.values() for value in seen.values())
    assert (seen["OF_THE_RUN"], seen["NAMED_KEY"], seen["LC_ALL"]) == ("r", "n", "C.UTF-8")
    assert seen["HOME"] == seen["TMPDIR"] == told["folder"] != os.getcwd()
    assert not Path(told["folder"]).exists(), "the scratch folder goes with its process"
    assert not any(str(run) in word for word in told["arguments"])
    if landlock_version() >= MIN_VERSION:
        assert set(told["writes"]) <= {"OSError", "PermissionError"}, "read-only mounts and Landlock refuse differently"
        assert told["environ"] in REFUSED and told["beside"] == "done"
        assert told["signal"] in REFUSED or landlock_version() < 6
        assert (run / "config.toml").read_text() == "steps = 1" and not (run / "new").exists()


async def test_a_reward_sees_no_credential_and_cannot_touch_the_run(run: Path, workers: LocalWorkers) -> None:
    scorer = RewardScorer(
        [RewardChoice(chosen=Chosen("reward", "thief"), inherit_env=("NAMED_KEY",))],
        ProcessStarter(workers),
        SystemClock(),
    )
    try:
        await scorer.start()
        own = task(run)
        ((scored,),) = await scorer.score([(own, [Trajectory((Message("user", "?"),), "x", ())])])
    finally:
        await scorer.stop()
    assert scored.value == 1.0, scored.error
    check(json.loads((run.parent / "cache" / "told.json").read_text()), run)


async def test_an_environment_sees_no_credential_and_cannot_touch_the_run(
    run: Path, workers: LocalWorkers, plugin: str
) -> None:
    choice = EnvironmentChoice(chosen=Chosen("environment", "burglar"), inherit_env=("NAMED_KEY",))
    pool = EnvironmentPool(choice, ProcessStarter(workers), build=Catalogue.load([plugin]).build)
    try:
        await pool.start()
        async with pool.instance() as environment:
            (message,), _ = await environment.reset(task(run), 0)
    finally:
        await pool.stop()
    check(json.loads(message.text), run)


def test_a_pattern_names_no_credential_and_a_name_does() -> None:
    there = {"PYTHONPATH": "a", "PYTHON_API_KEY": "b", "PATH": "c", "HF_TOKEN": "d"}
    assert visible_environment(there, ("PYTHON*", "PATH")) == {"PYTHONPATH": "a", "PATH": "c"}
    assert visible_environment(there, ("HF_TOKEN",)) == {"HF_TOKEN": "d"}
    assert visible_environment(there, None) == there


def test_programs_inherit_certificates_and_indexes_without_their_passwords() -> None:
    trusted = {"SSL_CERT_FILE": "a.pem", "CURL_CA_BUNDLE": "b.pem", "REQUESTS_CA_BUNDLE": "c.pem", "SSL_CERT_DIR": "d",
               "PIP_INDEX_URL": "https://index.example/simple", "UV_DEFAULT_INDEX": "https://index.example/simple"}  # fmt: skip
    secret = {"PIP_EXTRA_INDEX_URL": "https://me:word@index.example", "UV_INDEX_X_PASSWORD": "word",
              "UV_INDEX": "https://a.example https://token@index.example"}  # fmt: skip
    for allowed in (INHERITED_ENV, PROGRAM_ENV):
        assert visible_environment({**trusted, **secret, "OTHER": "x"}, allowed) == trusted
    assert visible_environment(secret, tuple(secret)) == secret, "a configuration may name them"
