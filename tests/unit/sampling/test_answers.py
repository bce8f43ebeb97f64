# SPDX-License-Identifier: Apache-2.0
"""Samples that are one answer are asked together, and are what an episode of their own would have made of each."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from relax_core.api import Action, Chosen, InfrastructureError, Message, Outcome, Step, Task
from relax_core.api.errors import PoolFailed
from relax_core.config.run_config import EnvironmentChoice
from relax_core.engines.requests import SAMPLING, PendingRequest, SamplingParams
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.episode import InProcess, Limits, SingleTurn, run_answers, run_episode
from relax_core.sampling.session import Branch, Sample
from relax_core.testing.environment import EnvironmentSuite
from tests.unit.engines.pool_fixtures import call, engines, until
from tests.unit.engines.scripted_engine import GATE
from tests.unit.sampling.toy_policy import Completion, Letters, Script, answered, answering, completion

TASK = Task("t", (Message("user", "go"),))
LATE = Completion((97,), (-1.0,), (4,), (), "deadline", "too slow")
FAILED = Completion((), (), (), (), "error", "out of memory")
TWO = (SAMPLING, SAMPLING)
SAMPLINGS = (SAMPLING, SamplingParams(0.5, 0.9), SamplingParams(0.0), SAMPLING)
MIXED = Completion((97, 98, 0), (-1.0, -2.0, -3.0), (4, 5, 5), (4, 3, 5))


class Engines:
    """Answers each call by its seed's place among those asked; notes how often it was asked."""

    def __init__(self, answers: Sequence[Completion]) -> None:
        self.answers, self.calls = list(answers), list[PendingRequest]()
        self.asked = 0

    async def generate(self, requests: Sequence[PendingRequest]) -> None:
        self.asked += 1
        for request in requests:
            answered(request, self.answers[len(self.calls)])
            self.calls.append(request)
            if request.on_end is not None:
                request.on_end()


@pytest.mark.parametrize(
    "limits",
    [Limits(100), Limits(3), Limits(100, stop=("on",)), Limits(100, token_budget=13), Limits(100, max_context=11),
     Limits(100, max_context=5)],
    ids=["free", "short", "stop text", "budget", "context", "no room"],
)  # fmt: skip
async def test_batched_answers_equal_those_of_separate_episodes(limits: Limits) -> None:
    family, seeds = Letters(), (7, 8, 9, 10)
    prompt = family.start(TASK.prompt)
    said = [completion("pong", limits.max_new_tokens), FAILED, MIXED, completion("one on one", limits.max_new_tokens)]
    apart, together = Engines(said), Engines(said)
    alone = InProcess(SingleTurn(), 0.0)
    episodes = [
        await run_episode(TASK, prompt, seed, alone, family, apart.generate, limits, None, None, sampling, place)
        for place, (seed, sampling) in enumerate(zip(seeds, SAMPLINGS, strict=True))
    ]
    made: list[None] = []
    answers = await run_answers(
        TASK, prompt, seeds, SAMPLINGS, family, together.generate, limits, lambda: made.append(None)
    )
    assert answers == episodes
    assert together.asked <= 1
    assert len(made) == len(together.calls)
    assert [one.continuation() for one in together.calls] == [one.continuation() for one in apart.calls]
    assert [(one.place, one.stop) for one in together.calls] == [(one.place, one.stop) for one in apart.calls]


class TestSingleTurn(EnvironmentSuite):
    component = "single-turn"


class Praised(SingleTurn):
    """Gives a reward of its own."""

    async def step(self, action: Action) -> Step:
        return Step("", done=True, reward=1.0)


@pytest.mark.parametrize(("environment", "once"), [(SingleTurn, True), (Praised, False)])
def test_only_the_built_in_environment_is_left_out(environment: type[SingleTurn], once: bool) -> None:
    choice = EnvironmentChoice(chosen=Chosen("environment", "single-turn"))
    pool = EnvironmentPool(choice, ProcessStarter(LocalWorkers()), build=lambda _: environment())
    assert pool.answers_once is once


async def test_a_failed_engine_is_an_outcome_of_its_requests_and_a_bug_is_raised() -> None:
    async def gone(requests: Sequence[PendingRequest]) -> None:
        raise InfrastructureError("gone")

    async def wrong(requests: Sequence[PendingRequest]) -> None:
        raise ZeroDivisionError

    async def nobody(requests: Sequence[PendingRequest]) -> None:
        raise PoolFailed("engine-0 failed 8 times in a row")

    family = Letters()
    prompt = family.start(TASK.prompt)
    failed = await run_answers(TASK, prompt, (1, 2), TWO, family, gone, Limits(9), list)
    assert [one.outcome for one in failed] == [Outcome.ENGINE_ERROR] * 2
    assert all("gone" in one.info["error"] for one in failed)
    with pytest.raises(ZeroDivisionError):
        await run_answers(TASK, prompt, (1, 2), TWO, family, wrong, Limits(9), list)
    with pytest.raises(PoolFailed):
        await run_answers(TASK, prompt, (1, 2), TWO, family, nobody, Limits(9), list)


async def test_requests_of_one_call_end_one_by_one_and_return_in_order() -> None:
    async with engines(2) as (pool, _, _told):
        ended: list[int] = []
        calls = [call(100 * number, length) for number, length in enumerate((9, 3, 6))]
        for number, one in enumerate(calls):
            one.on_end = partial(ended.append, number)
        await pool.generate(calls)
        assert [one.tokens for one in calls] == [
            list(range(100 * number + 1, 100 * number + 1 + length)) for number, length in enumerate((9, 3, 6))
        ]
        assert ended == [1, 2, 0]


def held() -> list[object]:
    """List the parts of samples among all that is alive."""
    return [one for one in gc.get_objects() if isinstance(one, (Sample, Branch, PendingRequest))]


async def test_ended_samples_are_freed_without_garbage_collection() -> None:
    family = Letters()
    prompt = family.start(TASK.prompt)
    gc.collect()
    gc.disable()
    earlier = held()  # kept, so that no new one gets the place of an old one
    try:
        async with engines(1) as (pool, _, _told):
            await run_answers(TASK, prompt, (1, 2), TWO, family, pool.generate, Limits(3), list)
            alone = Script("pong")
            await run_episode(TASK, prompt, 3, InProcess(SingleTurn(), 0.0), family, answering(alone), Limits(9))
            alone.calls.clear()
            await until(lambda: not [one for one in held() if not any(one is old for old in earlier)])
    finally:
        gc.enable()


async def test_cancelling_a_call_cancels_all_its_running_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GATE, str(tmp_path / "shut"))  # the long ones go on until they are given up
    async with engines(1) as (pool, _, _told):
        asked = asyncio.ensure_future(pool.generate([call(0, 2), call(100, 60), call(200, 60)]))
        await until(lambda: pool.facts()["engine-0"]["running"] == 2)
        asked.cancel()
        await until(lambda: pool.facts()["engine-0"]["running"] == 0)
        assert asked.cancelled()
        await pool.generate([after := call(0, 2)])
        assert after.tokens == [1, 2]


async def test_a_turn_that_is_late_is_an_outcome_of_its_own_and_never_judged() -> None:
    family = Letters()
    (late,) = await run_answers(
        TASK, family.start(TASK.prompt), (1,), (SAMPLING,), family, Engines([LATE]).generate, Limits(9), list
    )
    assert late.outcome is Outcome.ENGINE_TIMEOUT
    assert not late.outcome.judged
    assert late.info["error"] == "too slow"
