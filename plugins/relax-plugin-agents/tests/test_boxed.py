# SPDX-License-Identifier: Apache-2.0
"""Agents in real boxes of bubblewrap, and judges after them: whatever an agent does there is judged or is an outcome."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from relax_plugin_agents.boxed import read_copies, run_judge
from relax_plugin_agents.environment import AgentOptions

from relax_core.api import Chosen, Outcome, ProgramEnd, ProgramResult, Task, Trajectory
from relax_core.config.run_config import EnvironmentChoice, SandboxChoice
from relax_core.engines.requests import PendingRequest
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.episode import Limits
from relax_core.sandboxes.pool import SandboxPool
from tests.processes import named
from tests.unit.sampling.toy_policy import END, Completion, completion, play

HERE = Path(__file__).parent
COPIES = {
    "copies": {"agent.py": str(HERE / "boxed_for_tests.py")},
    "judge_copies": {"judge.py": str(HERE / "judge_for_tests.py")},
}
JUDGE = ("python", "judge.py")
JUDGED = {"judge": JUDGE, **COPIES}
LIMITS = {"box_memory_mb": 128, "box_pids": 24, "box_disk_mb": 16, "box_output_kb": 64}
shared_loop = pytest.mark.asyncio(loop_scope="module")


class Boxed:
    """An environment whose agents play in boxes."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.pool = pool

    async def play(self, *lines: str, does: str = "plays", answer: str = "yes", **columns: Any) -> Trajectory:
        async def generate(call: PendingRequest) -> Completion:
            await asyncio.sleep(0)
            return completion(lines[call.prompt.count(END)])

        task = Task("t", "go", answer, {"does": does, **columns})
        async with asyncio.timeout(300):
            return await self.pool.play(lambda handle: play(handle, generate, task, Limits(200, 8)))


class Machine:
    """The sandbox that all environments of this module share, and the processes."""

    def __init__(self, sandbox: str = "bubblewrap") -> None:
        self.children = LocalWorkers([])
        self.sandboxes = SandboxPool(
            SandboxChoice(chosen=Chosen("sandbox", sandbox), programs=1), ProcessStarter(self.children)
        )

    @asynccontextmanager
    async def boxed(self, timeout_s: float = 60.0, **options: Any) -> AsyncIterator[Boxed]:
        told = {
            "sandbox": True,
            "command": ("python", "agent.py"),
            **({} if "reward" in options else JUDGED),
            **options,
        }
        choice = EnvironmentChoice(chosen=Chosen("environment", "agent", told), timeout_s=timeout_s)
        pool = EnvironmentPool(
            choice, ProcessStarter(self.children), build=Catalogue.load([]).build, sandboxes=self.sandboxes
        )
        try:
            await pool.start()
            await self.sandboxes.start()
            yield Boxed(pool)
        finally:
            await pool.stop()

    async def close(self) -> None:
        await self.sandboxes.close()
        await self.children.close()


@pytest.fixture(scope="module")
async def machine() -> AsyncIterator[Machine]:
    machine = Machine()
    yield machine
    await machine.close()


@pytest.fixture(scope="module")
async def environment(machine: Machine) -> AsyncIterator[Boxed]:
    """The environment of most tests: its tasks say what the agent and the judge do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "of the run")
        async with machine.boxed(env={"MINE": "1"}, **LIMITS) as environment:
            yield environment


async def judge(environment: Boxed) -> None:
    right, wrong = await asyncio.gather(environment.play("a", "yes"), environment.play("a", "no"))
    for trajectory, reward in ((right, 1.0), (wrong, 0.0)):
        assert trajectory.outcome is Outcome.FINISHED, trajectory.info
        assert trajectory.environment_reward == reward and len(trajectory.rows()) == 1


@shared_loop
async def test_files_left_by_an_agent_are_judged_after_its_end(environment: Boxed) -> None:
    await judge(environment)


async def test_files_left_by_an_agent_are_judged_after_its_end_without_bubblewrap() -> None:
    machine = Machine("process")
    try:
        async with machine.boxed() as environment:
            await judge(environment)
    finally:
        await machine.close()


@shared_loop
async def test_agents_that_wait_for_the_model_take_no_place_of_programs(environment: Boxed) -> None:
    """There is one place, and it stays free for judges."""
    asked = asyncio.Semaphore(0)
    everybody = asyncio.Event()

    async def generate(call: PendingRequest) -> Completion:
        asked.release()
        await everybody.wait()
        return completion("yes")

    async def one(number: int) -> Trajectory:
        task = Task(f"t{number}", "go", "yes", {"does": "plays"})
        return await environment.pool.play(lambda handle: play(handle, generate, task, Limits(200, 8)))

    playing = [asyncio.create_task(one(number)) for number in range(2)]
    async with asyncio.timeout(60):
        for _ in playing:
            await asked.acquire()
    everybody.set()
    assert [(await sample).environment_reward for sample in playing] == [1.0] * 2


@shared_loop
async def test_a_box_has_the_policy_and_the_task_but_nothing_that_would_help_to_cheat(environment: Boxed) -> None:
    files = {"repo/a.py": "a = 1", "repo/b.py": ""}
    trajectory = await environment.play("a", "b", does="variables", judge="quotes", files=files, judge_files={"x": "s"})
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    seen = json.loads(trajectory.info["error"].partition("exited with 1: ")[2].rpartition(" (")[0])
    assert seen["task"] == {"id": "t", "prompt": "go", "does": "variables", "judge": "quotes"}
    assert {"repo", "agent.py"} <= set(seen["files"])
    env = seen["env"]
    assert "HF_TOKEN" not in env and "RELAX_REPORT_KEY" not in env and "RELAX_REPORT_URL" not in env
    assert env["MINE"] == "1" and env["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert env["ANTHROPIC_API_KEY"] == env["OPENAI_API_KEY"]


@shared_loop
async def test_an_agent_reports_from_a_box_only_if_configured(machine: Machine, environment: Boxed) -> None:
    async with machine.boxed(reward="reported", copies=COPIES["copies"]) as trusting:
        assert (await trusting.play("yes", "b", does="reports")).environment_reward == 1.0
    judged = await environment.play("yes", "b", does="reports")
    assert judged.environment_reward == 1.0, "the judge's: it failed to report"


@shared_loop
@pytest.mark.parametrize("does", ["forge", "daemon"])
async def test_files_left_by_an_agent_cannot_forge_a_verdict(does: str, environment: Boxed) -> None:
    expects, judged = await asyncio.gather(
        environment.play("a", "no", does=does, judge="asks what was", judge_files={"expected": "as it was"}),
        environment.play("a", "no", does=does),
    )
    assert expects.environment_reward == 1.0, expects.info
    assert judged.outcome is Outcome.FINISHED, judged.info
    assert judged.environment_reward == 0.0


@shared_loop
async def test_a_program_of_the_agent_that_a_judge_runs_cannot_speak_for_it(environment: Boxed) -> None:
    trajectory = await environment.play("a", "no", does="forge", judge="runs it")
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR and trajectory.step_rewards == ()
    assert "gave no verdict: its last line is b'{\"reward\": 1.0}'" in trajectory.info["error"]


@shared_loop
@pytest.mark.parametrize(
    ("does", "end", "reward"),
    [
        ("fail", "exit", 1.0),
        ("fail", "something else", 0.0),
        ("forks", "pids exit memory", 1.0),
        ("kills its parent", "signal", 1.0),
        ("prints", "output", 1.0),
    ],
)
async def test_an_agent_that_fails_or_meets_a_limit_is_judged(
    does: str, end: str, reward: float, environment: Boxed
) -> None:
    trajectory = await environment.play("a", "b", does=does, judge="end", answer=end)
    assert trajectory.outcome is Outcome.FINISHED, trajectory.info
    assert trajectory.environment_reward == reward


@shared_loop
async def test_a_full_box_is_an_outcome(environment: Boxed) -> None:
    full = await environment.play("a", "yes", does="fills")
    assert full.outcome is Outcome.ENVIRONMENT_ERROR and "No space" in full.info["error"]


@shared_loop
async def test_a_sleeping_agent_ends_with_its_box(machine: Machine) -> None:
    async with machine.boxed(timeout_s=2.0) as environment:
        assert (await environment.play("a", "yes", does="sleeps")).outcome is Outcome.ENVIRONMENT_TIMEOUT
        async with asyncio.timeout(30):
            while named("bwrap"):
                await asyncio.sleep(0.05)


@shared_loop
async def test_a_judge_without_a_verdict_is_an_outcome_and_no_zero(environment: Boxed) -> None:
    trajectory = await environment.play("a", "yes", judge="fails")
    said = "the judge program gave no verdict: it exited with 1: what the judge misses"
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR and said in trajectory.info["error"], trajectory.info
    assert trajectory.step_rewards == ()


@shared_loop
@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"files": ["a"]}, "column files: got ['a']; write an object that maps paths to text"),
        ({"judge_files": {"a": 1}}, "column judge_files"),
        ({"judge_files": {"../../x": "y"}}, "give a path relative"),
    ],
)
async def test_files_that_cannot_be_written_are_reported(
    columns: dict[str, Any], said: str, environment: Boxed
) -> None:
    trajectory = await environment.play("a", "yes", **columns)
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR and said in trajectory.info["error"], trajectory.info


class ScriptedBox:
    """A box in which every program prints the same line, with the judge's key for KEY, and ends in the same way."""

    python = "python"

    def __init__(self, line: str, end: ProgramEnd = ProgramEnd.OK) -> None:
        self.line, self.end, self.wall_s = line, end, 0.0

    async def write(self, path: str, content: bytes) -> None:
        """Keep nothing."""

    async def run(self, command: Any, stdin: bytes, env: Any, wall_s: float) -> ProgramResult:
        self.wall_s = wall_s
        return ProgramResult(self.end, stdout=self.line.replace("KEY", stdin.decode().strip()).encode())


async def verdict_of(box: ScriptedBox) -> float:
    ended: Any = ProgramResult(ProgramEnd.OK)
    return await run_judge(box, JUDGE, {}, 5.0, (0.0, 1.0), Task("t", "go", "yes"), ended)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "its last line is b''"),
        ("[1]", "its last line is b'[1]'"),
        ('{"reward": 1}', "its last line is"),
        ('{"reward": 1, "key": "é"}', "its last line is"),
        ('{"reward": NaN, "key": "KEY"}', "the judge's reward is nan;"),
        ('{"reward": true, "key": "KEY"}', "the judge's reward is True;"),
        ('{"reward": 2, "key": "KEY"}', "the judge's reward is 2;"),
        ('{"key": "KEY"}', "the judge's reward is None;"),
    ],
)
async def test_a_judge_that_says_nothing_valid_gives_no_verdict(line: str, said: str) -> None:
    with pytest.raises(RuntimeError) as error:
        await verdict_of(ScriptedBox(line))
    assert said in str(error.value)


async def test_a_judge_has_a_time_limit_of_its_own() -> None:
    box = ScriptedBox('{"reward": 1, "key": "KEY"}')
    assert await verdict_of(box) == 1.0 and box.wall_s == 5.0
    with pytest.raises(RuntimeError, match=r"was ended by its limit \(wall\)"):
        await verdict_of(ScriptedBox("", ProgramEnd.WALL))


@shared_loop
async def test_a_missing_agent_is_reported(machine: Machine) -> None:
    async with machine.boxed(command=("/no/agent",), reward="rewards") as environment:
        trajectory = await environment.play("a", "yes")
    assert "the agent's program exited with 127: /no/agent can't be started" in trajectory.info["error"]


def test_a_folder_is_copied_with_all_of_its_files(tmp_path: Path) -> None:
    for name in ("a.py", "inner/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_copies({"src": tmp_path, "c.py": tmp_path / "a.py"}, "copies") == {
        "src/a.py": b"a.py", "src/inner/b.py": b"inner/b.py", "c.py": b"a.py",
    }  # fmt: skip


def test_a_missing_file_is_reported() -> None:
    with pytest.raises(FileNotFoundError, match=r"environment\.copies: got '/no/file'"):
        read_copies({"a": Path("/no/file")}, "copies")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "set either command or function"),
        ({"command": ["a"], "function": "b:c"}, "set either command or function"),
        ({"function": "a:b", "models": ("policy",)}, "do not list the policy's own name"),
        ({"function": "a:b", "models": ("judge", "judge")}, "do not list the policy's own name"),
        ({"function": "a:b", "sandbox": True}, "set command"),
        ({"command": ["a"], "sandbox": True}, "the source of the reward is required"),
        ({"command": ["a"], "sandbox": True, "judge": ["b"], "reward": "reported"}, "both judge and reward"),
        (
            {"command": ["a"], "sandbox": True, "reward": "rewards", "judge_copies": {"a": "b"}},
            "without judge: set judge",
        ),
        ({"command": ["a"], "sandbox": True, "judge": ["b"], "judge_range": [1, 0]}, "judge_range: got 1, 0"),
        ({"command": ["a"], "judge": ["b"]}, "judge has no effect outside of a sandbox"),
        ({"command": ["a"], "box_pids": 3}, "box_pids has no effect outside of a sandbox"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AgentOptions(**options)
