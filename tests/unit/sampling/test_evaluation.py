# SPDX-License-Identifier: Apache-2.0
"""What an evaluation says: mean, standard error and count of what could be judged, over all tasks of its set."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, strategies as st

from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.api.weights import Version
from relax_core.data.overlap import RowContent, row_content
from relax_core.engines.pool import EnginePool
from relax_core.engines.requests import PendingRequest, SamplingParams
from relax_core.rewards.host import ScoredSample
from relax_core.rewards.scorer import RewardScorer
from relax_core.sampling.evaluation import SHOWN, EvalSet, Evaluation, best_of, standard_error
from relax_core.sampling.groups import Turns
from relax_core.sampling.session import sample_seeds

RUN = SimpleNamespace(seed=3, steps=10, eval=SimpleNamespace(every=1, at_start=True))


class Tasks:
    """Tasks with the prompts `p<index>`, or those that `prompts` gives by index."""

    def __init__(self, prompts: Mapping[int, str] | None = None) -> None:
        self._prompts = prompts or {}

    def _task(self, index: int) -> Task:
        return Task(f"t{index}", self._prompts.get(index, f"p{index}"))

    def rendered(self, index: int) -> tuple[Task, tuple[int, ...]]:
        return self._task(index), (index,)

    def content(self, index: int) -> RowContent:
        return row_content(self._task(index))


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


def _evaluation(
    pool: Pool, scorer: Scorer, indices: Sequence[int], samples: int, prompts: Mapping[int, str] | None = None,
    shown: int | None = SHOWN,
) -> Evaluation:  # fmt: skip
    async def play(
        task: Task, prompt: Any, seeds: Sequence[int], samplings: Sequence[SamplingParams], turns: Turns,
        *, max_new_tokens: int | None,
    ) -> Any:  # fmt: skip
        pairs = enumerate(zip(seeds, samplings, strict=True))
        await turns.generate([PendingRequest(prompt, 4, seed, own, place=place) for place, (seed, own) in pairs])
        return [Trajectory((Message("user", "?"), Message("assistant", "!")), "!", ()) for _ in seeds]

    sampling = SamplingParams(0.5, 0.8)
    held = EvalSet("held-out", cast(Any, Tasks(prompts)), indices, samples, sampling)
    return Evaluation([held], RUN, play, cast(RewardScorer, scorer), cast(EnginePool, pool), shown)


async def test_an_evaluation_reports_mean_error_and_best_and_counts_unjudged_samples_separately() -> None:
    values = (1.0, 0.0, 0.0, None, 1.0, 1.0)
    (found,) = await _evaluation(Pool(), Scorer(*values), (4, 7, 9), 2).run(Version("actor", 0, 2))
    assert (found.step, found.count, found.temperature) == (2, 5, 0.5)
    assert found.mean == pytest.approx(3 / 5)
    assert found.metrics == {
        "standard_error": pytest.approx(math.sqrt((0.2**2 + 0.6**2 + 0.8**2) * 3 / 2) / 5),
        "failed": 1.0,
        "best_of_2": 1.0,
    }
    assert list(found.tasks.values()) == [(1.0, 0.0), (0.0,), (1.0, 1.0)], "what was not judged is no reward"


async def test_a_run_records_the_samples_of_some_groups_and_an_evaluation_alone_those_of_all() -> None:
    for shown, want in ((SHOWN, SHOWN), (None, SHOWN + 4)):
        evaluation = _evaluation(Pool(), Scorer(*[1.0] * (SHOWN + 4)), range(SHOWN + 4), 1, shown=shown)
        (found,) = await evaluation.run(Version("actor", 0, 1))
        assert len(found.samples) == want


async def test_draws_belong_to_the_content_of_a_task_wherever_it_stands_in_a_file() -> None:
    seeds = []
    for indices, prompts in (((4, 7, 9), {}), ((9, 1, 2), {1: "P4.", 2: " p7"})):
        pool = Pool()
        await _evaluation(pool, Scorer(*[1.0] * 6), indices, 2, prompts).run(Version("actor", 0, 1))
        seeds.append([call.seed for call in pool.calls])
    first, second = seeds
    assert second == [*first[4:], *first[:4]]


async def test_rows_that_repeat_a_task_are_more_samples_of_it_with_draws_of_their_own() -> None:
    one, several = Pool(), Pool()
    values = (1.0, 0.0, 0.0, 1.0, 1.0, 0.0)
    (whole,) = await _evaluation(one, Scorer(*values), (4, 7), 3).run(Version("actor", 0, 1))
    prompts = {5: "p4", 6: "p4 ", 8: "p7", 10: "P7"}
    rows = (4, 5, 6, 7, 8, 10)
    (spread,) = await _evaluation(several, Scorer(*values), rows, 1, prompts).run(Version("actor", 0, 1))
    assert [call.seed for call in several.calls] == [call.seed for call in one.calls]
    assert (spread.mean, spread.metrics, spread.tasks) == (whole.mean, whole.metrics, whole.tasks)
    assert spread.metrics["best_of_3"] == 1.0


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


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5))
def test_the_best_of_rewards_of_zero_and_one_is_pass_at_k(right: list[int]) -> None:
    """Chen et al. (arXiv 2107.03374), eq. 1: 1 - C(n - c, k) / C(n, k) for c right of n samples."""
    found = best_of([[1.0] * count + [0.0] * (8 - count) for count in right])
    for k in (2, 4, 8):
        expected = statistics.fmean(1 - math.comb(8 - count, k) / math.comb(8, k) for count in right)
        assert found[f"best_of_{k}"] == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=5), min_size=2, max_size=6))
def test_a_clustered_error_is_that_of_a_regression_on_a_constant_with_clustered_residuals(
    groups: list[list[float]],
) -> None:
    """Liang and Zeger (1986): (X'X)^-1 (sum of X_g' e_g e_g' X_g) (X'X)^-1 in float64, for X a column of ones."""
    values = np.array([value for group in groups for value in group])
    cluster = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    column = np.ones((len(values), 1))
    bread = np.linalg.inv(column.T @ column)
    residuals = values - column[:, 0] * (bread @ column.T @ values)
    scores = [column[cluster == at].T @ residuals[cluster == at] for at in range(len(groups))]
    meat = sum((np.outer(score, score) for score in scores), np.zeros((1, 1)))
    variance = (bread @ meat @ bread)[0, 0] * len(groups) / (len(groups) - 1)
    assert standard_error(groups) == pytest.approx(math.sqrt(variance), abs=1e-9)


async def test_one_value_has_no_standard_error_and_no_values_have_no_mean() -> None:
    (one,) = await _evaluation(Pool(), Scorer(1.0), (0,), 1).run(Version("actor", 0, 1))
    assert (one.mean, one.count, one.metrics["standard_error"]) == (1.0, 1, 0.0)
    (none,) = await _evaluation(Pool(), Scorer(None), (0,), 1).run(Version("actor", 0, 1))
    assert math.isnan(none.mean) and (none.count, none.metrics["failed"]) == (0, 1.0)


async def test_evaluation_seeds_differ_by_task_and_are_equal_at_every_step() -> None:
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
    assert not {call.seed for call in first} & {seed for i in range(16) for seed in sample_seeds(RUN.seed, i, range(8))}
    assert await evaluation.run(Version("actor", 0, 2)) == [], "a version is evaluated once"
