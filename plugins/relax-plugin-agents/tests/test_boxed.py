# SPDX-License-Identifier: Apache-2.0
"""Agents in real boxes of bubblewrap, and judges after them: whatever an agent does there is judged or is an outcome."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from relax_plugin_agents.boxed import read_copies
from relax_plugin_agents.environment import AgentOptions

from relax_core.api import Chosen, Outcome, Task, Trajectory
from relax_core.config.run_config import EnvironmentChoice, SandboxChoice
from relax_core.engines.requests import Completion, GenerateCall
from relax_core.registry.catalogue import Catalogue
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.episode import Limits
from relax_core.sandboxes.pool import SandboxPool
from tests.unit.sampling.toy_policy import END, completion, play

HERE = Path(__file__).parent
COPIES = {
    "copies": {"agent.py": str(HERE / "boxed_for_tests.py")},
    "judge_copies": {"judge.py": str(HERE / "judge_for_tests.py")},
}
JUDGED = {"judge": ("python", "judge.py"), **COPIES}


class Boxed:
    """An environment whose agents play in boxes."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.pool = pool

    async def play(self, *lines: str, answer: str = "yes", **columns: Any) -> Trajectory:
        async def generate(call: GenerateCall) -> Completion:
            await asyncio.sleep(0)
            return completion(lines[call.tokens.count(END)])

        task = Task("t", "go", answer, columns)
        async with asyncio.timeout(300):
            return await self.pool.play(lambda handle: play(handle, generate, task, Limits(200, 8)))


@asynccontextmanager
async def boxed(
    what: str, timeout_s: float = 60.0, sandbox: str = "bubblewrap", **options: Any
) -> AsyncIterator[Boxed]:
    children = LocalWorkers([])
    sandboxes = SandboxPool(SandboxChoice(chosen=Chosen("sandbox", sandbox), programs=1), children)
    told = {
        "sandbox": True,
        "command": ("python", "agent.py", what),
        **({} if "reward" in options else JUDGED),
        **options,
    }
    chosen = Chosen("environment", "agent", told)
    choice = EnvironmentChoice(chosen=chosen, timeout_s=timeout_s)
    pool = EnvironmentPool(choice, children, build=Catalogue.load([]).build, sandboxes=sandboxes)
    try:
        await pool.start()
        await sandboxes.start()
        yield Boxed(pool)
        await pool.stop()
    finally:
        await sandboxes.close()
        await children.close()


@pytest.mark.parametrize("sandbox", ["bubblewrap", "process"])
async def test_what_an_agent_leaves_is_judged_after_it(sandbox: str) -> None:
    async with boxed("plays", sandbox=sandbox) as environment:
        right, wrong = await asyncio.gather(environment.play("a", "yes"), environment.play("a", "no"))
    for trajectory, reward in ((right, 1.0), (wrong, 0.0)):
        assert trajectory.outcome is Outcome.FINISHED, trajectory.info
        assert trajectory.environment_reward == reward and len(trajectory.rows()) == 1


async def test_agents_that_wait_for_the_model_take_no_place_of_programs() -> None:
    """There is one place, and it stays free for judges."""
    asked = asyncio.Semaphore(0)
    everybody = asyncio.Event()

    async with boxed("plays") as environment:

        async def generate(call: GenerateCall) -> Completion:
            asked.release()
            await everybody.wait()
            return completion("yes")

        async def one(number: int) -> Trajectory:
            task = Task(f"t{number}", "go", "yes")
            return await environment.pool.play(lambda handle: play(handle, generate, task, Limits(200, 8)))

        playing = [asyncio.create_task(one(number)) for number in range(4)]
        async with asyncio.timeout(60):
            for _ in playing:
                await asked.acquire()
        everybody.set()
        assert [(await sample).environment_reward for sample in playing] == [1.0] * 4


async def test_a_box_has_the_policy_and_the_task_but_nothing_that_would_help_to_cheat(monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_TOKEN", "of the run")
    async with boxed("variables", reward="rewards", copies=COPIES["copies"], env={"MINE": "1"}) as environment:
        files = {"repo/a.py": "a = 1", "repo/b.py": ""}
        trajectory = await environment.play("a", "b", files=files, judge_files={"secret": "s"}, colour="red")
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    seen = json.loads(trajectory.info["error"].partition("ended with 5: ")[2].rpartition(" (")[0])
    assert seen["task"] == {"id": "t", "prompt": "go", "colour": "red"}
    assert {"repo", "agent.py"} <= set(seen["files"])
    env = seen["env"]
    assert "HF_TOKEN" not in env and "RELAX_REPORT_KEY" not in env and "RELAX_REPORT_URL" not in env
    assert env["MINE"] == "1" and env["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert env["ANTHROPIC_API_KEY"] == env["OPENAI_API_KEY"]


async def test_an_agent_reports_from_a_box_only_where_that_is_said() -> None:
    async with boxed("reports", reward="reported", copies=COPIES["copies"]) as environment:
        assert (await environment.play("yes", "b")).environment_reward == 1.0
    async with boxed("reports") as environment:
        assert (await environment.play("yes", "b")).environment_reward == 1.0, "the judge's: it failed to report"


@pytest.mark.parametrize("what", ["forge", "daemon"])
async def test_what_an_agent_leaves_behind_forges_no_verdict(what: str) -> None:
    async with boxed(what, judge=("python", "judge.py", "asks what was")) as environment:
        trajectory = await environment.play("a", "no", judge_files={"expected": "as it was"})
        assert trajectory.environment_reward == 1.0, trajectory.info
    async with boxed(what) as environment:
        trajectory = await environment.play("a", "no")
        assert trajectory.outcome is Outcome.FINISHED, trajectory.info
        assert trajectory.environment_reward == 0.0


async def test_a_program_of_the_agent_that_a_judge_runs_can_not_speak_for_it() -> None:
    async with boxed("forge", judge=("python", "judge.py", "runs it")) as environment:
        trajectory = await environment.play("a", "no")
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR and trajectory.step_rewards == ()
    assert "gave no verdict: its last line is b'{\"reward\": 1.0}'" in trajectory.info["error"]


@pytest.mark.parametrize(
    ("what", "end"),
    [
        ("fail", "exit"),
        ("forks", "pids exit memory"),
        ("memory", "memory exit"),  # refused by the kernel, Python ends itself
        ("kills its parent", "signal"),
        ("signal", "signal"),
        ("prints", "output"),
    ],
)
async def test_an_agent_that_fails_or_meets_a_limit_is_judged(what: str, end: str) -> None:
    limits = {"box_memory_mb": 128, "box_pids": 24, "box_disk_mb": 16, "box_output_kb": 64}
    async with boxed(what, judge=("python", "judge.py", "end"), **limits) as environment:
        trajectory, sibling = await asyncio.gather(
            environment.play("a", "b", answer=end), environment.play("a", "b", answer="something else")
        )
    assert trajectory.outcome is sibling.outcome is Outcome.FINISHED, trajectory.info
    assert (trajectory.environment_reward, sibling.environment_reward) == (1.0, 0.0)


async def test_a_full_box_and_a_sleeping_agent_are_outcomes_that_hurt_nobody() -> None:
    async with boxed("fills", box_disk_mb=16) as environment:
        full = await environment.play("a", "yes")
    assert full.outcome is Outcome.ENVIRONMENT_ERROR and "No space" in full.info["error"]
    async with boxed("sleeps", timeout_s=4.0) as environment:
        assert (await environment.play("a", "yes")).outcome is Outcome.ENVIRONMENT_TIMEOUT
        async with asyncio.timeout(30):
            while [process for process in psutil.Process().children(recursive=True) if process.name() == "bwrap"]:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (("python", "judge.py", "fails"), "the judge gave no verdict: it ended with 1: what the judge misses"),
        (("python", "judge.py", "sleeps"), "was ended by its limit (wall)"),
        (("python", "judge.py", "says", ""), "its last line is b''"),
        (("python", "judge.py", "says", "[1]"), "its last line is b'[1]'"),
        (("python", "judge.py", "says", '{"reward": 1}'), "its last line is"),
        (("python", "judge.py", "says", '{"reward": 1, "key": "é"}'), "its last line is"),
        (("python", "judge.py", "says", '{"reward": 2, "key": "KEY"}'), "the judge's reward is 2;"),
        (("python", "judge.py", "says", '{"reward": NaN, "key": "KEY"}'), "the judge's reward is nan;"),
        (("python", "judge.py", "says", '{"reward": true, "key": "KEY"}'), "the judge's reward is True;"),
        (("python", "judge.py", "says", '{"key": "KEY"}'), "the judge's reward is None;"),
        (("/no/judge",), "/no/judge"),
    ],
)
async def test_a_judge_without_a_verdict_is_an_outcome_and_no_zero(judge: tuple[str, ...], said: str) -> None:
    async with boxed("plays", judge=judge, judge_s=8.0) as environment:
        trajectory = await environment.play("a", "yes")
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR and said in trajectory.info["error"], trajectory.info
    assert trajectory.step_rewards == ()


@pytest.mark.parametrize(
    ("column", "files", "said"),
    [
        ("files", {"../x": "y"}, "name it relative"),
        ("files", ["a"], "column files: got ['a']; it maps paths to text"),
        ("judge_files", {"a": 1}, "column judge_files"),
        ("judge_files", {"../../x": "y"}, "name it relative"),
    ],
)
async def test_files_that_can_not_be_written_are_told(column: str, files: Any, said: str) -> None:
    async with boxed("plays") as environment:
        trajectory = await environment.play("a", "yes", **{column: files})
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR and said in trajectory.info["error"]


async def test_an_agent_that_is_not_there_is_told() -> None:
    async with boxed("plays", command=("/no/agent",)) as environment:
        trajectory = await environment.play("a", "yes")
    assert "the agent's program ended with 127: /no/agent can't be started" in trajectory.info["error"]


def test_a_folder_is_copied_with_all_of_its_files(tmp_path: Path) -> None:
    for name in ("a.py", "inner/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_copies({"src": tmp_path, "c.py": tmp_path / "a.py"}, "copies") == {
        "src/a.py": b"a.py", "src/inner/b.py": b"inner/b.py", "c.py": b"a.py",
    }  # fmt: skip


async def test_a_file_that_is_not_there_is_told_at_the_start() -> None:
    with pytest.raises(Exception, match=r"environment\.copies: got '/no/file'"):
        async with boxed("plays", copies={"a": "/no/file"}):
            pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"function": "a:b", "sandbox": True}, "name a command"),
        ({"command": ["a"], "sandbox": True}, "nobody judges"),
        ({"command": ["a"], "sandbox": True, "judge": ["b"], "reward": "reported"}, "drop one of them"),
        ({"command": ["a"], "sandbox": True, "reward": "rewards", "judge_copies": {"a": "b"}}, "without a judge"),
        ({"command": ["a"], "sandbox": True, "judge": ["b"], "judge_range": [1, 0]}, "judge_range: got 1, 0"),
        ({"command": ["a"], "judge": ["b"]}, "judge has no effect outside of a sandbox"),
        ({"command": ["a"], "box_pids": 3}, "box_pids has no effect outside of a sandbox"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AgentOptions(**options)
