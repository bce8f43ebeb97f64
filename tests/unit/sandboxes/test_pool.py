# SPDX-License-Identifier: Apache-2.0
"""Rewards and environments in processes of their own run programs in boxes, which end with the sample, whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from relax_core.api import Action, Chosen, InfrastructureError, Message, Outcome, SystemClock, Task, Trajectory
from relax_core.config.run_config import EnvironmentChoice, RewardChoice, SandboxChoice
from relax_core.registry import Catalogue
from relax_core.rewards.host import ScoredSample
from relax_core.rewards.scorer import RewardScorer
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sandboxes.pool import SandboxPool
from tests.processes import named
from tests.unit.sampling.toy_policy import Script, play

PLUGIN = '''
import asyncio, os
from dataclasses import replace
from relax_core.api import Environment, InfrastructureError, Reward, Sandbox, SandboxLimits, Step

class Runs(Reward):
    """1 where the program of the response prints its answer."""
    needs_sandbox = SandboxLimits(wall_s=3.0, memory_mb=128)

    async def score(self, task, trajectory):
        async with self.sandbox.open() as box:
            await box.write("main.py", trajectory.response.encode())
            result = await box.run([box.python, "-I", "main.py"])
            return float(result.stdout.decode().strip() == str(task.answer))

class DoesNotWaitForIt(Reward):
    needs_sandbox = SandboxLimits(wall_s=60.0)

    async def score(self, task, trajectory):
        async with self.sandbox.open() as box:
            try:
                await asyncio.wait_for(box.run(["/bin/sleep", "60"]), 0.5)
            except TimeoutError:
                return 1.0

class DiesWithABoxOpen(Reward):
    needs_sandbox = SandboxLimits()

    async def score(self, task, trajectory):
        async with self.sandbox.open() as box:
            await box.run(["/bin/true"])
            os._exit(1)

class Shell(Environment):
    """Runs what the policy says in one box a sample."""
    gives_reward = True
    needs_sandbox = SandboxLimits(wall_s=5.0)

    async def reset(self, task, seed):
        self.opened = self.sandbox.open()
        self.box = await self.opened.__aenter__()

    async def step(self, action):
        result = await self.box.run(["/bin/sh", "-c", action.text])
        return Step(result.stdout.decode(), done="exit" in action.text, reward=float(result.code))

    async def close(self):
        await self.opened.__aexit__(None, None, None)

CONNECTS = """
import os, socket
with socket.socket(socket.AF_UNIX) as there:
    there.connect(os.environ["RELAX_SOCKET"])
    there.recv(1)
print(os.environ["RELAX_SOCKET"])
"""

class Driven(Environment):
    """Runs a program where the policy would be asked. One with a socket ends when its connection is closed."""
    gives_reward = True
    needs_sandbox = SandboxLimits(wall_s=60.0)

    async def run(self, task, seed, session):
        limits = replace(self.needs_sandbox, socket=task.answer or "")
        async with self.sandbox.open(limits) as box:
            command = [box.python, "-c", CONNECTS] if limits.socket else ["/bin/sh", "-c", "sleep 0.7; echo"]
            result = await box.run(command, socket=bool(limits.socket))
            session.reward(float(len(result.stdout)))

class Socketless(Sandbox):
    async def probe(self):
        """Need nothing."""

    async def open(self, limits):
        raise NotImplementedError

class Refused(Socketless):
    async def probe(self):
        raise InfrastructureError("the kernel says no")
'''


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "runs.py"
    path.write_text(PLUGIN)
    return str(path)


@pytest.fixture
async def workers(plugin: str) -> AsyncIterator[LocalWorkers]:
    children = LocalWorkers([plugin])
    yield children
    await children.close()


@asynccontextmanager
async def scoring(
    workers: LocalWorkers, reward: str, choice: SandboxChoice | None = None
) -> AsyncIterator[tuple[Callable[..., object], SandboxPool]]:
    """Give a function that scores responses whose programs print 42, and the pool of boxes."""
    sandboxes, settings = (
        SandboxPool(choice, ProcessStarter(workers)),
        RewardChoice(chosen=Chosen("reward", reward), timeout_s=2.0),
    )
    scorer = RewardScorer([settings], ProcessStarter(workers), SystemClock(), sandboxes=sandboxes)

    async def score(*responses: str) -> list[ScoredSample]:
        samples = [Trajectory((Message("user", "?"), Message("assistant", one)), one, ()) for one in responses]
        (scored,) = await scorer.score([(Task("t", "?", 42), samples)])
        return scored

    try:
        await scorer.start()
        await sandboxes.start()
        yield score, sandboxes
    finally:
        await scorer.stop()
        await sandboxes.close()


def holders() -> list[psutil.Process]:
    """Find the boxes that are open."""
    return named("bwrap")


async def gone(what: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while what():
            await asyncio.sleep(0.05)


async def test_a_reward_runs_the_programs_of_its_samples_and_no_box_is_left(workers: LocalWorkers) -> None:
    async with scoring(workers, "runs") as (score, _):
        scored = await score("print(42)", "print(41)", "syntax error(", "print(6 * 7)")
        assert [one.value for one in scored] == [1.0, 0.0, 0.0, 1.0]
        await gone(holders)
    assert holders() == []


async def test_time_in_a_queue_or_in_a_program_is_not_the_rewards_own(workers: LocalWorkers) -> None:
    """Each takes a second, one at a time; the last waits longer than the reward, and a program, may take."""
    choice = SandboxChoice(chosen=Chosen("sandbox", "bubblewrap"), programs=1)
    async with scoring(workers, "runs", choice) as (score, _):
        began = asyncio.get_running_loop().time()
        scored = await score(*["import time; time.sleep(1); print(42)"] * 5)
        assert [one.value for one in scored] == [1.0] * 5
        assert asyncio.get_running_loop().time() - began >= 5.0, "one after another"


async def test_a_program_without_a_waiting_caller_ends_with_its_box(workers: LocalWorkers) -> None:
    async with scoring(workers, "does-not-wait-for-it") as (score, _):
        (scored,) = await score("x")
        assert scored.value == 1.0, scored.error
        await gone(lambda: named("bwrap", "sleep", "nsenter"))


async def test_boxes_end_with_the_process_of_the_author_that_opened_them(workers: LocalWorkers) -> None:
    async with scoring(workers, "dies-with-a-box-open") as (score, sandboxes):
        (scored,) = await score("x")
        assert scored.outcome is Outcome.REWARD_ERROR and "its process ended" in scored.error
        await gone(lambda: holders() or sandboxes._boxes._value < 256)


async def test_a_sandbox_that_dies_is_an_outcome_and_the_next_sample_has_a_new_one(workers: LocalWorkers) -> None:
    async with scoring(workers, "runs") as (score, sandboxes):
        first = sandboxes._process.worker
        assert first is not None
        scoring_one = asyncio.ensure_future(score("import time; time.sleep(2)"))
        await gone(lambda: not holders())
        os.kill(first.pid, signal.SIGKILL)
        (lost,) = await scoring_one
        assert lost.outcome is Outcome.ENGINE_ERROR and "sandbox" in lost.error
        await gone(holders)
        (scored,) = await score("print(42)")
        assert scored.value == 1.0 and sandboxes._process.worker is not first


async def test_a_machine_that_refuses_the_sandbox_is_reported_before_sampling(workers: LocalWorkers) -> None:
    choice = SandboxChoice(chosen=Chosen("sandbox", "refused"))
    with pytest.raises(InfrastructureError, match="the kernel says no"):
        async with scoring(workers, "runs", choice):
            pass


async def test_an_environment_has_one_box_a_sample(workers: LocalWorkers, plugin: str) -> None:
    sandboxes = SandboxPool(None, ProcessStarter(workers))
    choice = EnvironmentChoice(chosen=Chosen("environment", "shell"))
    pool = EnvironmentPool(choice, ProcessStarter(workers), build=Catalogue.load([plugin]).build, sandboxes=sandboxes)
    await pool.start()
    await sandboxes.start()
    try:
        async with pool.instance() as one, pool.instance() as other:
            for handle, word in ((one, "a"), (other, "b")):
                await handle.reset(Task("t", "?"), 0)
                await handle.step(Action(f"echo {word} > file", ()))
            assert len(holders()) >= 2
            said = [(await handle.step(Action("cat file; exit 3", ())))[0] for handle in (one, other)]
            assert [(step.observation, step.reward, step.done) for step in said] == [
                ("a\n", 3.0, True),
                ("b\n", 3.0, True),
            ]
        await gone(holders)
    finally:
        await pool.stop()
        await sandboxes.close()


@asynccontextmanager
async def driven(
    workers: LocalWorkers, plugin: str, timeout_s: float, **choice: Any
) -> AsyncIterator[Callable[[str], Any]]:
    """Give a function that plays a sample whose environment runs a program with a socket, or with none."""
    sandbox = choice.pop("sandbox", "bubblewrap")
    sandboxes = SandboxPool(SandboxChoice(chosen=Chosen("sandbox", sandbox), **choice), ProcessStarter(workers))
    environment = EnvironmentChoice(chosen=Chosen("environment", "driven"), timeout_s=timeout_s)
    pool = EnvironmentPool(
        environment, ProcessStarter(workers), build=Catalogue.load([plugin]).build, sandboxes=sandboxes
    )
    await pool.start()
    await sandboxes.start()
    try:
        yield lambda path: pool.play(lambda handle: play(handle, Script(), Task("t", "?", path)))
    finally:
        await pool.stop()
        await sandboxes.close()


@pytest.fixture
async def listening() -> AsyncIterator[str]:
    """Listen at a socket that closes its connections when there are six."""
    everybody = asyncio.Barrier(6)

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await everybody.wait()
        writer.close()

    with TemporaryDirectory(prefix="relax-") as folder:
        path = f"{folder}/socket"
        server = await asyncio.start_unix_server(meet, path)
        yield path
        server.close()


async def test_programs_with_a_socket_take_no_place(workers: LocalWorkers, plugin: str, listening: str) -> None:
    async with driven(workers, plugin, 60.0, programs=1) as played:
        samples = await asyncio.gather(*(played(listening) for _ in range(6)))
    assert [sample.environment_reward for sample in samples] == [len("/socket\n")] * 6, samples[0].info


@pytest.mark.parametrize("few", [{"boxes": 1}, {"programs": 1}], ids=["boxes", "programs"])
async def test_waiting_for_a_place_is_not_time_of_an_environment_that_drives(
    workers: LocalWorkers, plugin: str, few: dict[str, int]
) -> None:
    """Each program takes 0.7 s, one at a time; the last waits longer than its environment may take."""
    async with driven(workers, plugin, 3.0, **few) as played:
        samples = await asyncio.gather(*(played("") for _ in range(6)))
    assert [sample.environment_reward for sample in samples] == [1.0] * 6, [sample.info for sample in samples]


async def test_a_sandbox_that_cannot_give_a_socket_is_named(workers: LocalWorkers, plugin: str, listening: str) -> None:
    async with driven(workers, plugin, 60.0, sandbox="socketless") as played:
        sample = await played(listening)
    assert sample.outcome is Outcome.ENVIRONMENT_ERROR
    assert "sandbox socketless: it can't give a box a socket" in sample.info["error"]
