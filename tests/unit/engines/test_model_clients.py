# SPDX-License-Identifier: Apache-2.0
"""Hands on engine pools, from the processes of rewards and environments: what engines do never becomes a score."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from relax_core.api import Chosen, ConfigError, InfrastructureError, Message, Outcome, SystemClock, Task, Trajectory
from relax_core.api.errors import DeadlineExceeded, PluginError
from relax_core.config.run_config import EnvironmentChoice, RewardChoice
from relax_core.config.tables import EngineTable
from relax_core.engines.factories import AuxiliaryPools
from relax_core.engines.model_client import PoolModelClient
from relax_core.registry.catalogue import Catalogue
from relax_core.rewards.host import ScoredSample
from relax_core.rewards.scorer import RewardScorer
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.environments import EnvironmentPool
from tests.unit.engines.pool_fixtures import Gate, engines, until
from tests.unit.engines.scripted_engine import REFUSED
from tests.unit.sampling.toy_policy import Letters

ASKING = '''
import asyncio
from relax_core.api import Environment, Observation, Reward, Unreadable


class Following(Reward):
    """The letter that the judge says last, by its place behind what the response says."""
    needs_engines = ("judge",)

    async def score(self, task, trajectory):
        said = await self.engines["judge"].generate(trajectory.response, 40)
        return float(ord(said.text[-1]) - ord(trajectory.response[-1]))


class Hasty(Reward):
    needs_engines = ("judge",)

    async def score(self, task, trajectory):
        return len((await self.engines["judge"].generate("a", 60, timeout_s=0.05)).text)


class Refused(Reward):
    needs_engines = ("judge",)

    async def score(self, task, trajectory):
        return len((await self.engines["judge"].generate([999], 2)).text)


class Elsewhere(Reward):
    needs_engines = ("judge",)

    async def score(self, task, trajectory):
        return len((await self.engines.get("judge").generate("a", 2)).text)


class Blocking(Reward):
    needs_engines = ("judge",)

    def score(self, task, trajectory):
        return 1.0


class Likely(Reward):
    needs_engines = ("judge",)

    async def score(self, task, trajectory):
        both = await self.engines["judge"].score("q", ["a", "b"])
        return both[0][0] - both[1][0]


class Unsure(Reward):
    async def score(self, task, trajectory):
        raise Unreadable("it said nothing", {"judge/unreadable": 1.0})


class Hinting(Environment):
    needs_engines = ("judge",)

    async def reset(self, task, seed):
        return Observation((await self.engines["judge"].generate("a", 3)).text)
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plugin") / "asking.py"
    path.write_text(ASKING)
    return str(path)


@asynccontextmanager
async def judging(plugin: str, name: str, client: Any, timeout_s: float = 60.0) -> AsyncIterator[RewardScorer]:
    children, models = LocalWorkers([plugin]), ({"judge": client} if client else {})
    scorer = RewardScorer(
        [RewardChoice(chosen=Chosen("reward", name), timeout_s=timeout_s)],
        ProcessStarter(children),
        SystemClock(),
        models=models,
    )
    try:
        await scorer.start()
        yield scorer
    finally:
        await scorer.stop()
        await children.close()


async def judged(scorer: RewardScorer, *responses: str) -> list[ScoredSample]:
    samples = [Trajectory((Message("user", "?"), Message("assistant", said)), said, ()) for said in responses]
    async with asyncio.timeout(300):
        (answers,) = await scorer.score([(Task("t", "?"), samples)])
    return answers


def client_of(pool: Any, timeout_s: float = 100.0, deterministic: bool = False) -> PoolModelClient:
    return PoolModelClient("judge", pool, Letters(), SystemClock(), timeout_s, deterministic)


class Dead:
    """A pool without engines."""

    name = "judge"

    async def generate(self, *args: Any, **named: Any) -> Any:
        raise InfrastructureError("engine pool judge: engine-0 failed 8 times in a row")


async def test_a_killed_engine_costs_no_answer_and_waiting_is_not_the_rewards_own_time(plugin: str, gate: Gate) -> None:
    """They take longer than the reward's own deadline; their engine dies in the middle of them."""
    async with engines(2) as (pool, _, told), judging(plugin, "following", client_of(pool), timeout_s=1.0) as scorer:
        asked = asyncio.create_task(judged(scorer, *"abcdefgh"))
        await until(lambda: bool(pool.facts()["engine-0"]["running"] and pool.facts()["engine-1"]["running"]))
        os.kill(pool.facts()["engine-0"]["pid"], signal.SIGKILL)
        await asyncio.sleep(1.5)
        gate.open()
        assert [answer.value for answer in await asked] == [40.0] * 8
        await until(lambda: told == ["failed", "retried", "recovered"])


async def test_a_deadline_is_the_samples_outcome_and_an_unreadable_prompt_the_authors_error(
    plugin: str, gate: Gate
) -> None:
    async with engines(1) as (pool, _, told):
        async with judging(plugin, "hasty", client_of(pool)) as scorer:
            (late,) = await judged(scorer, "x")
        async with judging(plugin, "refused", client_of(pool)) as scorer:
            (refused,) = await judged(scorer, "x")
        assert not told, "neither is the engine's fault"
    assert late.outcome is Outcome.ENGINE_TIMEOUT and "raise timeout_s or count of the engine pool judge" in late.error
    assert refused.outcome is Outcome.REWARD_ERROR and str(REFUSED) in refused.error
    assert math.isnan(late.value) and math.isnan(refused.value)


async def test_a_pool_that_can_answer_nothing_stops_the_run_as_infrastructure(plugin: str) -> None:
    async with judging(plugin, "elsewhere", Dead()) as scorer:
        few = await judged(scorer, *"abc")
        assert {answer.outcome for answer in few} == {Outcome.ENGINE_ERROR}
        with pytest.raises(InfrastructureError, match=r"got no answer on the first 16 samples: .*failed 8 times"):
            await judged(scorer, *"abcdefghijklmnop")


async def test_a_missing_pool_is_refused_and_so_is_a_reward_that_would_block(plugin: str) -> None:
    with pytest.raises(ConfigError, match="no pool named judge, which reward following needs"):
        async with judging(plugin, "following", None):
            """Does not start."""
    with pytest.raises(PluginError, match="write it as `async def`"):
        async with judging(plugin, "blocking", Dead()):
            """Does not start."""


async def test_completions_are_scored_behind_the_prompt_alone(plugin: str) -> None:
    async with engines(1) as (pool, _, _), judging(plugin, "likely", client_of(pool)) as scorer:
        assert [answer.value for answer in await judged(scorer, "x")] == [1.0]  # -ord("a") - -ord("b")


async def test_an_environment_in_a_process_of_its_own_asks_too(plugin: str) -> None:
    catalogue, children = Catalogue.load([plugin]), LocalWorkers([plugin])
    async with engines(1) as (pool, _, _):
        models = {"judge": client_of(pool)}
        choice = EnvironmentChoice(chosen=Chosen("environment", "hinting"))
        environments = EnvironmentPool(choice, ProcessStarter(children), build=catalogue.build, models=models)
        try:
            await environments.start()
            async with environments.instance() as handle:
                (shown,), _ = await handle.reset(Task("t", "?"), 0)
        finally:
            await environments.stop()
            await children.close()
    assert shown.text == "bcd"


async def test_scores_survive_a_dead_engine_and_an_engine_with_invalid_answers() -> None:
    rows = [[1, number, number + 1] for number in range(2, 40)]
    async with engines(2) as (pool, _, told):
        asked = asyncio.create_task(pool.score(rows, 2.0))
        await asyncio.sleep(0)
        os.kill(pool.facts()["engine-0"]["pid"], signal.SIGKILL)
        assert await asked == [(0.0, -row[1] / 2, -row[2] / 2) for row in rows]
        await until(lambda: told in ([], ["failed", "recovered"]))
    async with engines(2, kind="FalseEngine") as (pool, _, told):
        assert (await pool.score(rows, 1.0))[0] == (0.0, -2.0, -3.0)
        assert (await pool.score(rows, 1.0))[0] == (0.0, -2.0, -3.0)
        assert "failed" in told


async def test_a_pool_request_has_a_deadline_and_is_reported_while_open(gate: Gate) -> None:
    async with engines(1) as (pool, _, _):
        client = client_of(pool, timeout_s=1.0, deterministic=True)
        asked = [asyncio.create_task(client.generate("a", 50)) for _ in range(2)]
        while client.facts()["open"] < 2:
            await asyncio.sleep(0)
        for late in asked:
            with pytest.raises(DeadlineExceeded, match="engine pool judge waited"):
                await late
        assert client.facts()["open"] == 0
        with pytest.raises(ValueError, match="completion 1 is empty"):
            await client.score("q", ["a", ""])
        with pytest.raises(ValueError, match="exceed the context of 64"):
            await client.generate("a", 640)


async def test_a_deadline_names_the_limit_that_passed() -> None:
    class Silent:
        async def score(self, rows: object, temperature: float) -> None:
            await asyncio.Future()

    client = client_of(Silent(), timeout_s=100.0)
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s for log-probs"):
        await client.score("q", ["a"], timeout_s=0.2)


async def test_an_engine_whose_vocabulary_differs_from_its_folders_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    for told, refused in ((512, False), (640, True)):
        async with engines(1) as (pool, _, _):
            pool.start = partial(_facts, told)  # type: ignore[method-assign]
            tables = [EngineTable(name="judge", path=tmp_path)]
            pools = AuxiliaryPools(None, {"judge": client_of(pool)}, tables)  # type: ignore[arg-type]
            if not refused:
                await pools.start()
                continue
            with pytest.raises(ConfigError, match="engines.judge: got an engine with a vocabulary of 640 .* says 512"):
                await pools.start()


async def _facts(vocab_size: int) -> dict[str, int]:
    return {"vocab_size": vocab_size}


async def test_an_unreadable_verdict_is_an_outcome_of_its_own_and_is_counted(plugin: str) -> None:
    async with judging(plugin, "unsure", None) as scorer:
        (answer,) = await judged(scorer, "a")
    assert answer.outcome is Outcome.REWARD_UNREADABLE and math.isnan(answer.value)
    assert answer.parts == {"unsure/judge/unreadable": 1.0} and "it said nothing" in answer.error


async def test_deadlines_stop_while_a_pool_waits_for_its_turn(gate: Gate) -> None:
    async with engines(1) as (pool, _, _):
        client = client_of(pool, timeout_s=0.5)
        await client.pause()
        asked = asyncio.create_task(client.generate("a", 3))
        await asyncio.sleep(1.0)
        assert client.facts()["paused"] and client.facts()["open"] == 1 and not asked.done()
        gate.open()
        await client.resume()
        assert (await asked).text == "bcd"
        assert client.work() == 0


async def test_no_request_waits_for_its_turn_for_ever(gate: Gate) -> None:
    gate.open()
    async with engines(1) as (pool, _, _):
        client = PoolModelClient("judge", pool, Letters(), SystemClock(), 100.0, False, 0.2)
        await client.pause()
        with pytest.raises(DeadlineExceeded, match="its turn on the devices"):
            await client.generate("a", 3)
