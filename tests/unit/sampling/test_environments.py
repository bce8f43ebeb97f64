# SPDX-License-Identifier: Apache-2.0
"""Environments in real child processes: they crash, hang and block, and only their own samples feel it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from relax_core.api import Chosen, Message, Outcome, Task, Trajectory
from relax_core.config.run_config import EnvironmentChoice
from relax_core.engines.requests import PendingRequest
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.environments import EnvironmentPool, Retried
from relax_core.sampling.episode import Limits
from relax_core.sampling.session import state_key
from tests.processes import kept_worker
from tests.unit.sampling.toy_policy import END, Completion, Script, completion, play, texts

ENVIRONMENTS = '''
import asyncio, os, time
from pathlib import Path
from relax_core.api import Environment, Message, Observation, Options, Step, Tool


class WildOptions(Options):
    log: str
    """File to which closes are written."""


class Wild(Environment[WildOptions]):
    """Does what the policy says."""

    @classmethod
    async def open(cls, options):
        return {"pid": os.getpid(), "born": time.monotonic_ns(), "opened": time.time()}

    async def reset(self, task, seed):
        return Observation(f"seed {seed}", state="start")

    async def step(self, action):
        word = action.text
        if word == "raise":
            raise RuntimeError("wild broke")
        if word == "hang":
            await asyncio.sleep(1000)
        if word == "block":
            time.sleep(1000)
        if word == "exit":
            os._exit(3)
        if word == "eat":
            self.eaten = bytearray(8 << 30)
        if word == "wait":
            await asyncio.sleep(0.5)
        if word == "busy":
            time.sleep(2.0)
        if word == "linger":
            await asyncio.sleep(1.5)
        if word == "odd":
            return Step("", True, info={"what": object()})
        return Step(Observation(f"{word}!", state="on"), word == "bye", 0.5, dict(self.shared))

    async def close(self):
        with Path(self.options.log).open("a") as file:
            file.write("closed\\n")

    def format_observation(self, observation):
        text = observation if isinstance(observation, str) else observation.content
        return (Message("tool", text),)


class Tame(Wild):
    """Declares that it can't block or crash."""

    in_process = True


class Wanderer(Environment[WildOptions]):
    """Branches, as the task says."""

    async def run(self, task, seed, session):
        first = await session.generate()
        if task.answer == "raise":
            raise RuntimeError(f"agent broke after {first.text}")
        if task.answer == "hang":
            await asyncio.sleep(1000)
        if task.answer == "exit":
            os._exit(3)
        if task.answer == "long":
            await asyncio.sleep(0.4)
        if task.answer == "listen":
            heard = []
            whole = await session.fork().generate(None, (), lambda partial: heard.append(partial.text))
            session.note({"heard": heard, "whole": whole.text})
            return
        other = session.fork()
        session.observe("left")
        other.observe(Observation("right", state="start"))
        left, right = await asyncio.gather(session.generate(), other.generate())
        fresh = session.restart((Message("user", left.text + right.text),))
        await fresh.generate()
        session.reward(0.25)

    async def close(self):
        with Path(self.options.log).open("a") as file:
            file.write("closed\\n")
'''

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def pooled(
    folder: Path, name: str = "wild", timeout_s: float = 60.0, retried: Retried | None = None, **settings: Any
) -> AsyncIterator[EnvironmentPool]:
    plugin = folder / "wilds.py"
    plugin.write_text(ENVIRONMENTS)
    children = LocalWorkers([str(plugin)])
    chosen = Chosen("environment", name, {"log": str(folder / "closed.log")})
    build = Catalogue.load([str(plugin)]).build
    choice = EnvironmentChoice(chosen=chosen, timeout_s=timeout_s, **settings)
    pool = EnvironmentPool(choice, ProcessStarter(children), build=build, retried=retried)
    try:
        await pool.start()
        yield pool
        await pool.stop()
    finally:
        await children.close()


class Shared:
    """A pool that tests share; `closes` counts the instances that were closed since the test began."""

    def __init__(self, pool: EnvironmentPool, folder: Path) -> None:
        self.pool, self._folder, self._before = pool, folder, closes(folder)

    def closes(self) -> int:
        return closes(self._folder) - self._before


POOLS: dict[str, dict[str, Any]] = {
    "wild": {"name": "wild"},  # does what the policy says
    "wanderer": {"name": "wanderer"},  # branches
    "hurried": {"name": "wanderer", "timeout_s": 2.0},
}


@pytest.fixture(scope="module")
async def pools(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, tuple[EnvironmentPool, Path]]]:
    """The pools of the module."""
    async with AsyncExitStack() as started:
        made: dict[str, tuple[EnvironmentPool, Path]] = {}
        for kind, settings in POOLS.items():
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = await started.enter_async_context(pooled(folder, **settings)), folder
        yield made


@pytest.fixture
def wild(pools: dict[str, tuple[EnvironmentPool, Path]]) -> Shared:
    return Shared(*pools["wild"])


@pytest.fixture
def wanderer(pools: dict[str, tuple[EnvironmentPool, Path]]) -> Shared:
    return Shared(*pools["wanderer"])


@pytest.fixture
def hurried(pools: dict[str, tuple[EnvironmentPool, Path]]) -> Shared:
    return Shared(*pools["hurried"])


async def played(pool: EnvironmentPool, policy: Any, task: Task | None = None, seed: int = 7) -> Trajectory:
    async with asyncio.timeout(300):
        return await pool.play(lambda environment: play(environment, policy, task, Limits(100, 8), seed))


def says(*lines: str) -> Any:
    """A policy that says its lines in order, again in each play."""

    async def generate(call: PendingRequest) -> Completion:
        await asyncio.sleep(0)
        return completion(lines[call.prompt.count(END)])

    return generate


def closes(folder: Path) -> int:
    log = folder / "closed.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


async def test_an_episode_in_a_process_of_its_own(wild: Shared) -> None:
    trajectory = await played(wild.pool, Script("a", "bye"))
    assert texts(trajectory) == ["[user:go][tool:seed 7][a:A$][tool:a!][a:BYE$"]
    assert trajectory.step_rewards == (0.5, 0.5)
    assert trajectory.states == (state_key("start", (), ()), state_key("on", (), ()))
    assert trajectory.info["pid"] != os.getpid()
    assert wild.closes() == 1


async def test_many_instances_share_a_process_and_its_set_up(wild: Shared) -> None:
    played_all = await asyncio.gather(*(played(wild.pool, Script("a", "bye"), seed=seed) for seed in range(12)))
    assert len({trajectory.info["pid"] for trajectory in played_all}) == 1
    assert [trajectory.messages[1].text for trajectory in played_all] == [f"seed {seed}" for seed in range(12)]
    assert wild.closes() == 12


@pytest.mark.parametrize(("word", "said"), [("raise", "wild broke"), ("odd", "can't travel")])
async def test_an_instance_that_fails_costs_its_own_sample(wild: Shared, word: str, said: str) -> None:
    bad, good = await asyncio.gather(played(wild.pool, Script(word)), played(wild.pool, Script("a", "bye")))
    assert (bad.outcome, good.outcome) == (Outcome.ENVIRONMENT_ERROR, Outcome.FINISHED)
    assert said in bad.info["error"]
    assert wild.closes() == 2


async def test_an_instance_that_waits_for_ever_times_out_and_is_closed(tmp_path: Path) -> None:
    async with pooled(tmp_path, timeout_s=1.0) as pool:
        bad, good = await asyncio.gather(played(pool, Script("hang")), played(pool, Script("a", "bye")))
    assert (bad.outcome, good.outcome) == (Outcome.ENVIRONMENT_TIMEOUT, Outcome.FINISHED)
    assert closes(tmp_path) == 2


@pytest.mark.parametrize(
    ("word", "outcome", "settings"),
    [
        ("exit", Outcome.ENVIRONMENT_ERROR, {"retries": 1}),
        ("block", Outcome.ENVIRONMENT_TIMEOUT, {"timeout_s": 2.0, "retries": 1}),
        ("eat", Outcome.ENVIRONMENT_ERROR, {"memory_mb": 2048, "retries": 1}),
        ("block", Outcome.ENVIRONMENT_TIMEOUT, {"isolation": "sample", "workers": 2, "timeout_s": 2.0, "retries": 1}),
    ],
)
async def test_the_sample_that_breaks_a_process_fails_and_its_neighbours_are_played_to_their_end(
    tmp_path: Path, word: str, outcome: Outcome, settings: dict[str, Any]
) -> None:
    """The other is in the middle of a step, or waits for the policy, when it happens."""
    async with pooled(tmp_path, **settings) as pool:
        bad, good = await asyncio.gather(played(pool, says("a", word)), played(pool, says("wait", "wait", "bye")))
    assert bad.outcome is outcome and not bad.outcome.judged
    assert (good.outcome, good.step_rewards) == (Outcome.FINISHED, (0.5, 0.5, 0.5))


async def test_a_sample_that_was_late_since_another_kept_the_process_busy_is_played_again(tmp_path: Path) -> None:
    async with pooled(tmp_path, timeout_s=3.0) as pool:
        busy, late = await asyncio.gather(played(pool, says("busy", "bye")), played(pool, says("linger", "bye")))
    assert [one.outcome for one in (busy, late)] == [Outcome.FINISHED] * 2


async def test_an_in_process_environment_is_isolated_if_configured(
    tmp_path: Path,
) -> None:
    async with pooled(tmp_path, "tame") as pool:
        inside = await played(pool, says("bye"))
    async with pooled(tmp_path, "tame", isolation="shared") as pool:
        apart = await played(pool, says("bye"))
    assert inside.info["pid"] == os.getpid() != apart.info["pid"]


async def test_a_sample_whose_process_is_killed_is_played_again_and_reported(tmp_path: Path) -> None:
    retries: list[str] = []
    killed: set[int] = set()

    async def retried(name: str, why: str) -> None:
        retries.append(f"{name}: {why}")

    async with pooled(tmp_path, retried=retried) as pool:
        before = await played(pool, Script("bye"))

        async def kills(call: PendingRequest) -> Completion:
            if not killed:
                killed.add(before.info["born"])
                os.kill(kept_worker("environment-wild"), signal.SIGKILL)
            return cast(Completion, await says("bye")(call))

        after = await played(pool, kills)
    assert after.outcome is Outcome.FINISHED and after.info["born"] not in killed
    (why,) = retries
    assert re.fullmatch(r"environment-wild: process (ended: .*|was replaced); other samples ran in it", why)


async def test_an_agent_branches_from_its_own_process(wanderer: Shared) -> None:
    async def by_what_was_said(call: PendingRequest) -> Completion:
        await asyncio.sleep(0)
        said = "".join(map(chr, call.prompt))
        return completion("L" if "left" in said else "R" if "right" in said else "p")

    trajectory = await played(wanderer.pool, by_what_was_said)
    assert trajectory.outcome is Outcome.FINISHED
    assert sorted(texts(trajectory)) == sorted(
        ["[user:go][a:P$][user:left][a:L$", "[user:go][a:p$][user:right][a:R$", "[user:lr][a:P$"]
    )
    assert trajectory.turn_rewards == (0.0, 0.25), "the session that it was given to, whose second turn was its newest"
    assert trajectory.states[2] == state_key("start", (), ())
    assert wanderer.closes() == 1


@pytest.mark.parametrize(
    ("answer", "outcome", "closed"),
    [
        ("raise", Outcome.ENVIRONMENT_ERROR, 1),
        ("hang", Outcome.ENVIRONMENT_TIMEOUT, 1),
        ("exit", Outcome.ENVIRONMENT_ERROR, 0),
    ],
)
async def test_an_agent_that_fails_or_breaks_its_process_costs_no_other_agent_its_sample(
    hurried: Shared, answer: str, outcome: Outcome, closed: int
) -> None:
    async def slowly(call: PendingRequest) -> Completion:
        await asyncio.sleep(0.3)
        return completion("a")

    def task(answer: str) -> Task:
        return Task("t", (Message("user", "go"),), answer)

    good = asyncio.create_task(played(hurried.pool, slowly, task("long")))
    bad = await played(hurried.pool, says("a"), task(answer))
    assert bad.outcome is outcome
    assert (await good).outcome is Outcome.FINISHED
    assert hurried.closes() == closed + 1


async def test_an_agent_out_of_turns_hears_that_it_ended(wanderer: Shared) -> None:
    async with wanderer.pool.instance() as environment:
        trajectory = await play(environment, Script("a", "b", "c"), limits=Limits(100, 2))
    assert trajectory.outcome is Outcome.TRUNCATED
    assert wanderer.closes() == 1


async def test_a_bug_of_the_policys_side_is_not_the_environments(wanderer: Shared) -> None:
    with pytest.raises(ZeroDivisionError):
        await played(wanderer.pool, Script(ZeroDivisionError()))
    assert wanderer.closes() == 1


async def test_partial_text_reaches_an_environment_in_another_process(wanderer: Shared) -> None:
    async def policy(call: PendingRequest) -> Completion:
        for end in range(1, 5) if call.watch is not None else ():
            call.watch(tuple(map(ord, "four"[:end])))
            await asyncio.sleep(0.1)
        return completion("four")

    trajectory = await played(wanderer.pool, policy, Task("t", "go", "listen"))
    heard = list(trajectory.info["heard"])
    assert trajectory.info["whole"] == "four" and len(heard) > 1 and heard == sorted(heard, key=len)
    assert all("four".startswith(text) for text in heard)
