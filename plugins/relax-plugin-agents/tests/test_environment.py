# SPDX-License-Identifier: Apache-2.0
"""Functions and programs play samples in a real process of the pool; however they end, it is an outcome."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
from relax_plugin_agents.environment import Agent, AgentOptions, _unhidden
from relax_plugin_agents.gateway import AgentSession

from relax_core.api import Chosen, ConfigError, DeadlineExceeded, Message, Outcome, Task, Trajectory, load_function
from relax_core.config.run_config import EnvironmentChoice
from relax_core.engines.requests import PendingRequest
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.inline import DebuggerLoop, InlineWorkers
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.episode import Limits
from tests.unit.sampling.environment_pool import environment_pool
from tests.unit.sampling.toy_policy import END, Completion, Letters, completion, play, texts

AGENTS = Path(__file__).with_name("agents_for_tests.py")


shared_loop = pytest.mark.asyncio(loop_scope="module")


def pooled(timeout_s: float = 60.0, **options: Any) -> AbstractAsyncContextManager[EnvironmentPool]:
    return environment_pool("agent", options, timeout_s)


@pytest.fixture(scope="module")
async def guessing() -> AsyncIterator[EnvironmentPool]:
    """The environment of a function that blocks its thread."""
    async with pooled(**function("guesses")) as pool:
        yield pool


@pytest.fixture(scope="module")
async def functions() -> AsyncIterator[EnvironmentPool]:
    """The environment of the function that each task names."""
    async with pooled(**function("chosen")) as pool:
        yield pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs write; their command lines have its name."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
async def programs(folder: Path) -> AsyncIterator[EnvironmentPool]:
    """The environment of a program that does what each task names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "of the run")
        async with pooled(env={"MINE": "1"}, **program("chosen", folder)) as pool:
            yield pool


@pytest.fixture
def pools(request: pytest.FixtureRequest) -> EnvironmentPool:
    """The pool of the fixture that the parameter names."""
    pool: EnvironmentPool = request.getfixturevalue(request.param)
    return pool


def function(name: str) -> dict[str, Any]:
    return {"function": f"{AGENTS}:{name}"}


def program(*words: str | Path) -> dict[str, Any]:
    return {"command": [sys.executable, str(AGENTS), *map(str, words)]}


def says(*lines: str) -> Any:
    """A policy that says its lines in order, by the turns that a conversation has had."""

    async def generate(call: PendingRequest) -> Completion:
        await asyncio.sleep(0)
        return completion(lines[call.prompt.count(END)])

    return generate


async def played(pool: EnvironmentPool, *lines: str, answer: str = "yes", does: str = "guess") -> Trajectory:
    task = Task("t", "go", answer, {"does": does})
    async with asyncio.timeout(300):
        return await pool.play(lambda environment: play(environment, says(*lines), task, Limits(200, 8), 7))


@shared_loop
@pytest.mark.parametrize("pools", ["guessing", "programs"], indirect=True)
async def test_an_agent_plays_and_is_paid_what_it_reports(pools: EnvironmentPool) -> None:
    right, wrong = await asyncio.gather(played(pools, "yes", "no"), played(pools, "no", "no"))
    for trajectory, reward in ((right, 1.0), (wrong, 0.0)):
        assert trajectory.outcome is Outcome.FINISHED, trajectory.info
        assert trajectory.environment_reward == reward
        assert len(trajectory.rows()) == 1
    assert texts(right)[0].startswith("[user:t: guess][a:YES$")


@shared_loop
async def test_messages_that_the_model_does_not_take_are_refused_and_the_sample_continues(
    functions: EnvironmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(family: Letters, messages: Sequence[Message]) -> str:
        if messages[0].role == "system":
            raise ConfigError("model.chat_template", "a template that knows no such role", "change the messages")
        return own(family, messages)

    own = Letters._said
    monkeypatch.setattr(Letters, "_said", said)
    trajectory = await played(functions, "yes", does="shows_what_is_refused")
    assert (trajectory.outcome, trajectory.environment_reward) == (Outcome.FINISHED, 1.0), trajectory.info


def test_a_function_that_blocks_its_thread_plays_on_the_inline_runner() -> None:
    """The gateway answers on the event loop, on which this runner calls all other synchronous code."""

    async def sample() -> Trajectory:
        catalogue = Catalogue.load([])
        choice = EnvironmentChoice(chosen=Chosen("environment", "agent", function("guesses")), timeout_s=60.0)
        workers = InlineWorkers(catalogue)
        pool = EnvironmentPool(choice, ProcessStarter(workers), build=catalogue.build)
        await pool.start()
        try:
            return await played(pool, "yes", "no")
        finally:
            await pool.stop()
            await workers.close()

    with asyncio.Runner(loop_factory=DebuggerLoop) as runner:
        trajectory = runner.run(sample())
    assert trajectory.outcome is Outcome.FINISHED and trajectory.environment_reward == 1.0, trajectory.info


@shared_loop
async def test_many_samples_share_a_process_and_no_conversation(guessing: EnvironmentPool) -> None:
    all_played = await asyncio.gather(*(played(guessing, f"say {n}", "no", answer=f"say {n}") for n in range(9)))
    assert [trajectory.environment_reward for trajectory in all_played] == [1.0] * 9
    assert [texts(trajectory)[0].count(f"SAY {n}") for n, trajectory in enumerate(all_played)] == [1] * 9


@shared_loop
async def test_parallel_calls_of_one_sample_are_rows_of_it(functions: EnvironmentPool) -> None:
    trajectory = await played(functions, "x", does="asks_side_by_side")
    assert texts(trajectory) == ["[user:same][a:X$"] * 2 and trajectory.environment_reward == 2.0


@shared_loop
@pytest.mark.parametrize(
    ("pools", "does", "answer", "said"),
    [
        ("functions", "says_nothing", "", "has read no answer"),
        ("functions", "gives_no_number", "no", "reported no reward"),
        ("functions", "gives_no_number", "text", "finite number"),
        ("functions", "gives_no_number", "large", "-1e+308 as its reward; return a finite number from -1e9 to 1e9"),
        ("functions", "breaks", "", "the agent of t broke"),
        ("programs", "silent", "", "reported no reward"),
        ("programs", "fail", "", "exited with 3: what went wrong"),
        ("programs", "talk", "", "exited with 4: xx"),
    ],
    indirect=["pools"],
)
async def test_an_agent_that_fails_has_an_outcome_and_no_reward(
    pools: EnvironmentPool, does: str, answer: str, said: str
) -> None:
    trajectory = await played(pools, "x", does=does, answer=answer)
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR and said in trajectory.info["error"]
    assert trajectory.step_rewards == ()


async def test_a_missing_agent_has_an_outcome() -> None:
    async with pooled(command=["/nowhere/agent"]) as pool:
        trajectory = await played(pool, "x")
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR and "can't be started" in trajectory.info["error"]


async def test_an_agent_need_not_report_a_reward_if_rewards_judge() -> None:
    async with pooled(reward="rewards", **program("silent")) as pool:
        trajectory = await played(pool, "x")
    assert trajectory.outcome is Outcome.FINISHED and trajectory.step_rewards == () and trajectory.response == "x"


async def test_a_function_that_never_ends_is_cancelled() -> None:
    async with pooled(timeout_s=1.5, **function("sleeps")) as pool:
        assert (await played(pool, "x")).outcome is Outcome.ENVIRONMENT_TIMEOUT


async def test_a_program_that_never_ends_is_killed(tmp_path: Path) -> None:
    async with pooled(timeout_s=2.0, **program("hang", tmp_path)) as pool:
        assert (await played(pool, "x")).outcome is Outcome.ENVIRONMENT_TIMEOUT
        assert not left(str(tmp_path))


@shared_loop
async def test_processes_left_by_a_program_end_with_its_sample(programs: EnvironmentPool, folder: Path) -> None:
    """A process in a session of its own, and one whose parents are gone."""
    trajectory = await played(programs, "x", does="daemon")
    assert trajectory.outcome is Outcome.FINISHED, trajectory.info
    assert not left(str(folder))


def left_files(path: str) -> list[Path]:
    return [path for path in (Path(path), Path(path).parent) if path.exists()]


def left(word: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if word in " ".join(words[1:]) and str(AGENTS) in " ".join(words):
            found.append(process.pid)
    return found


@shared_loop
async def test_a_program_sees_its_own_keys_and_no_secrets_of_the_run(programs: EnvironmentPool, folder: Path) -> None:
    await played(programs, "x", does="variables")
    seen = json.loads((folder / "variables").read_text())
    assert "HF_TOKEN" not in seen and seen["MINE"] == "1"
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"] != seen["RELAX_REPORT_KEY"]
    assert seen["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert left_files(seen["RELAX_TASK"]) == [], "the task's file ends with the sample"


def test_an_agent_asks_the_pools_that_its_table_names() -> None:
    assert Agent(AgentOptions(function="a:b", models=("judge",))).needs_engines == ("judge",)
    assert Agent(AgentOptions(function="a:b")).needs_engines == ()


def test_only_a_program_outside_of_a_sandbox_changes_files_of_the_user() -> None:
    assert Agent(AgentOptions(function="a:b")).writes_anywhere
    boxed = AgentOptions(command=("true",), sandbox=True, judge=("true",))
    assert not Agent(boxed).writes_anywhere


async def test_a_failed_pool_ends_the_sample_even_if_the_agent_handles_the_error() -> None:
    """Its own error, or a good reward, would blame or praise the policy for an answer that it never had."""
    agent = AgentSession(None, None)  # type: ignore[arg-type]
    async with _unhidden(agent):
        pass
    agent.side_calls.failure = DeadlineExceeded("engine pool judge", "an answer", 1.0)
    with pytest.raises(DeadlineExceeded):
        async with _unhidden(agent):
            pass
    with pytest.raises(DeadlineExceeded):
        async with _unhidden(agent):
            raise RuntimeError("the agent's own")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere.py:solve", "there is no file"),
        (f"{AGENTS}:solve", "no function 'solve'"),
        ("no_module:f", "no_module"),
    ],
)
def test_a_missing_function_is_reported(place: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        load_function("environment.function", place)


async def test_a_missing_function_is_reported_at_the_start() -> None:
    with pytest.raises(Exception, match="there is no file"):
        async with pooled(function="nowhere.py:solve"):
            pass


@shared_loop
async def test_contexts_of_an_agent_are_paid_apart(functions: EnvironmentPool) -> None:
    trajectory = await played(functions, "x", does="plans")
    refused = await played(functions, "x", does="plans", answer="nobody")
    assert trajectory.contexts == ("planner", "worker", "worker") and len(trajectory.rows()) == 3
    assert trajectory.turn_rewards == (0.5,) and trajectory.environment_reward == 1.5
    assert dict(zip(trajectory.step_turns, trajectory.step_rewards, strict=True)) == {0: 0.5, -1: 1.0}
    assert refused.outcome is Outcome.ENVIRONMENT_ERROR and "'nobody'" in refused.info["error"]
