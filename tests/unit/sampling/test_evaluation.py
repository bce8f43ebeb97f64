# SPDX-License-Identifier: Apache-2.0
"""What an evaluation says: mean, standard error and count of what could be judged, over all tasks of its set."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.api.weights import Version
from relax_core.engines.pool import EnginePool
from relax_core.engines.requests import PendingRequest, SamplingParams
from relax_core.rewards.scorer import RewardScorer, ScoredSample
from relax_core.sampling.evaluation import EvalSet, Evaluation, best_of, standard_error
from relax_core.sampling.groups import Turns
from relax_core.sampling.session import sample_seed

RUN = SimpleNamespace(seed=3, steps=10, eval=SimpleNamespace(every=1, at_start=True))


class Tasks:
    def rendered(self, index: int) -> tuple[Task, tuple[int, ...]]:
        return Task(f"t{index}", f"p{index}"), (index,)


class Pool:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.calls = list[PendingRequest]()

    async def generate(self, requests: Sequence[PendingRequest]) -> None:
        self.calls += requests


class Scorer:
    """Scores the samples of a set one after another; None is what it can't judge."""

    def __init__(self, *values: float | None) -> None:
        self._values = iter(values)

    async def score(self, groups: Sequence[tuple[Task, Sequence[Trajectory]]]) -> list[tuple[ScoredSample, ...]]:
        def one() -> ScoredSample:
            value = next(self._values)
            if value is None:
                return ScoredSample(math.nan, outcome=Outcome.REWARD_ERROR)
            return ScoredSample(value)

        return [tuple(one() for _ in samples) for _, samples in groups]


def _evaluation(pool: Pool, scorer: Scorer, indices: Sequence[int], samples: int) -> Evaluation:
    async def play(
        task: Task, prompt: Any, seeds: Sequence[int], samplings: Sequence[SamplingParams], turns: Turns
    ) -> Any:
        pairs = enumerate(zip(seeds, samplings, strict=True))
        await turns.generate([PendingRequest(prompt, 4, seed, own, place=place) for place, (seed, own) in pairs])
        return [Trajectory((Message("user", "?"), Message("assistant", "!")), "!", ()) for _ in seeds]

    sampling = SamplingParams(0.5, 0.8)
    held = EvalSet("held-out", cast(Any, Tasks()), indices, samples, sampling)
    return Evaluation([held], RUN, play, cast(RewardScorer, scorer), cast(EnginePool, pool))


async def test_an_evaluation_tells_mean_error_and_best_and_counts_apart_what_was_not_judged() -> None:
    values = (1.0, 0.0, 0.0, None, 1.0, 1.0)
    (found,) = await _evaluation(Pool(), Scorer(*values), (4, 7, 9), 2).run(Version("actor", 0, 2))
    assert (found.step, found.count, found.temperature) == (2, 5, 0.5)
    assert found.mean == pytest.approx(3 / 5)
    assert found.metrics == {
        "standard_error": pytest.approx(math.sqrt((0.2**2 + 0.6**2 + 0.8**2) * 3 / 2) / 5),
        "failed": 1.0,
        "best_of_2": 1.0,
    }


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=9), st.integers(1, 4))
def test_samples_that_repeat_each_other_make_no_mean_surer(values: list[float], copies: int) -> None:
    usual = statistics.stdev(values) / math.sqrt(len(values))
    assert standard_error([[value] * copies for value in values]) == pytest.approx(usual, abs=1e-9)
    assert standard_error([*([value] for value in values), []]) == pytest.approx(usual, abs=1e-9)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6), min_size=1, max_size=4))
def test_the_best_of_some_samples_is_the_mean_over_all_choices_of_so_many(groups: list[list[float]]) -> None:
    most = max(map(len, groups))
    found = best_of(groups)
    assert set(found) == {f"best_of_{k}" for k in {2, 4, most} if 1 < k <= most}
    for name, value in found.items():
        k = int(name.rpartition("_")[2])
        choices = [[max(chosen) for chosen in combinations(group, k)] for group in groups if len(group) >= k]
        assert value == pytest.approx(statistics.fmean(map(statistics.fmean, choices)))


async def test_one_value_has_no_standard_error_and_none_has_no_mean() -> None:
    (one,) = await _evaluation(Pool(), Scorer(1.0), (0,), 1).run(Version("actor", 0, 1))
    assert (one.mean, one.count, one.metrics["standard_error"]) == (1.0, 1, 0.0)
    (none,) = await _evaluation(Pool(), Scorer(None), (0,), 1).run(Version("actor", 0, 1))
    assert math.isnan(none.mean) and (none.count, none.metrics["failed"]) == (0, 1.0)


async def test_each_task_is_asked_with_its_own_draws_of_the_version_and_the_same_at_every_step() -> None:
    pool = Pool()
    evaluation = _evaluation(pool, Scorer(*[1.0] * 12), (4, 7, 9), 2)
    await evaluation.run(Version("actor", 0, 1))
    first, pool.calls = pool.calls, []
    await evaluation.run(Version("actor", 0, 2))
    assert [(call.prompt, call.seed) for call in pool.calls] == [(call.prompt, call.seed) for call in first]
    assert [call.prompt for call in first] == [(index,) for index in (4, 4, 7, 7, 9, 9)]
    assert len({call.seed for call in first}) == 6
    assert {call.floor for call in first} == {1} and {call.floor for call in pool.calls} == {2}
    assert {call.sampling for call in (*first, *pool.calls)} == {SamplingParams(0.5, 0.8)}
    assert len({call.session for call in first}) == 6 and len({call.group for call in first}) == 3
    assert not {call.seed for call in first} & {sample_seed(RUN.seed, i, n) for i in range(16) for n in range(8)}
    assert await evaluation.run(Version("actor", 0, 2)) == [], "a version is evaluated once"
