# SPDX-License-Identifier: Apache-2.0
"""What is dropped and why, and which tasks come when."""

from __future__ import annotations

from collections import Counter
from math import nan

import pytest
from relax_plugin_selection.curriculum import Curriculum, CurriculumOptions
from relax_plugin_selection.filters import (
    RewardBand,
    RewardBandOptions,
    Truncated,
    TruncatedOptions,
    ZeroVariance,
    ZeroVarianceOptions,
)
from relax_plugin_selection.mixture import Mixture, MixtureOptions
from relax_plugin_selection.success_rate import SuccessRate, SuccessRateOptions

from relax_core.api import AttemptId, ConfigError, Filter, Message, Outcome, Task, Trajectory

TASK = Task("t", "?")


def verdict(rule: Filter, rewards: list[float], cut: int = 0) -> str:
    """Of a group with these rewards, `cut` of whose samples a limit ended."""
    outcomes = [Outcome.TRUNCATED if index < cut else Outcome.FINISHED for index in range(len(rewards))]
    attempts = [AttemptId(0, index, 0) for index in range(len(rewards))]
    trajectories = [Trajectory((Message("user", "?"),), "", (), outcome) for outcome in outcomes]
    return rule.reject(TASK, attempts, trajectories, rewards)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.0, 0.0], "all rewards are 0"),
        ([1.0, 1.0, nan], "all rewards are 1"),
        ([0.5, 0.75], "all rewards are 0.5"),
        ([0.5, 0.8], ""),
        ([nan, nan], ""),
    ],
)
def test_groups_that_differ_by_no_more_than_the_tolerance_are_dropped(rewards: list[float], reason: str) -> None:
    assert verdict(ZeroVariance(ZeroVarianceOptions(tolerance=0.25)), rewards) == reason


def test_groups_out_of_the_band_are_dropped() -> None:
    rule = RewardBand(RewardBandOptions(low=0.25, high=0.75))
    assert [verdict(rule, [mean, mean]) for mean in (0.2, 0.25, 0.75, 0.8)] == ["too hard", "", "", "too easy"]
    assert verdict(rule, [nan, 0.5]) == ""


def test_groups_mostly_cut_off_are_dropped() -> None:
    rule = Truncated(TruncatedOptions(most=0.5))
    assert [verdict(rule, [0.0] * 4, cut) for cut in range(5)] == ["", "", "", "cut off", "cut off"]


def tasks(column: str, values: list[object]) -> list[Task]:
    return [Task(str(index), "?", metadata={column: value}) for index, value in enumerate(values)]


def test_a_curriculum_widens_from_the_easiest_tasks_to_all() -> None:
    hard = [9, 3, 7, 1, 5, 0, 8, 2, 6, 4]
    sampler = Curriculum(CurriculumOptions(start=0.2, groups=100))
    sampler.open(tasks("difficulty", list(hard)))
    early = {hard[sampler.pick(group, 10, 0)] for group in range(10)}
    late = {hard[sampler.pick(group, 10, 0)] for group in range(100, 300)}
    assert early <= {0, 1, 2} and late == set(range(10))


@pytest.mark.parametrize("value", [None, "hard", "nan", float("nan"), "inf", float("-inf"), 10**400, [1]])
def test_a_task_without_its_difficulty_is_refused(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"sampler.column = 'difficulty': got .* in task 1; give each task a finite number"
    ):
        Curriculum().open(tasks("difficulty", [1, value]))


def test_a_mixture_has_the_shares_and_gives_each_kind_in_epochs() -> None:
    kinds = ["maths"] * 8 + ["code"] * 2 + ["chat"] * 5
    sampler = Mixture(MixtureOptions(weights={"maths": 2.0, "chat": 0.0}))
    sampler.open(tasks("source", list(kinds)))
    picks = [sampler.pick(group, len(kinds), 0) for group in range(600)]
    shares = Counter(kinds[pick] for pick in picks)
    assert shares["chat"] == 0 and 1.6 < shares["maths"] / shares["code"] < 2.5
    code = [pick for pick in picks if kinds[pick] == "code"]
    assert all(set(code[at : at + 2]) == {8, 9} for at in range(0, len(code) - 1, 2))


def test_a_mixture_of_unknown_kinds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights \{'math': 2.0\} of kinds \['maths'\]"):
        Mixture(MixtureOptions(weights={"math": 2.0})).open(tasks("source", ["maths"]))


def test_a_mixture_over_a_column_that_a_task_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampler.column = 'kind': got None in task 0; give each task a value"):
        Mixture(MixtureOptions(column="kind")).open(tasks("source", ["maths", "code"]))


def test_uncertain_tasks_come_more_often() -> None:
    sampler = SuccessRate(SuccessRateOptions(memory=0.0))
    for task, rate in enumerate((0.0, 0.5, 1.0)):
        sampler.learned(task, task, [rate])
    counts = Counter(sampler.pick(group, 3, 0) for group in range(1000))
    assert counts[1] > 4 * max(counts[0], counts[2]) and min(counts[0], counts[2]) > 10


def test_a_rate_keeps_what_it_was_by_its_memory_and_is_measured_by_the_best_reward() -> None:
    sampler = SuccessRate(SuccessRateOptions(memory=0.75, best=2.0))
    sampler.learned(0, 0, [2.0, 2.0])
    sampler.learned(1, 0, [0.0])
    sampler.learned(2, 1, [1.0])
    sampler.learned(3, 2, [8.0])
    assert sampler.state() == {"rates": {"0": 0.75, "1": 0.5, "2": 1.0}}


def test_a_mixture_continues_where_it_was_and_each_epoch_has_an_order_of_its_own() -> None:
    kinds = ["maths"] * 12
    whole, first, second = (Mixture(MixtureOptions()) for _ in range(3))
    for sampler in (whole, first, second):
        sampler.open(tasks("source", list(kinds)))
    picked = [whole.pick(group, 12, 3) for group in range(36)]
    epochs = [picked[at : at + 12] for at in (0, 12, 24)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    begun = [first.pick(group, 12, 3) for group in range(17)]
    second.load(first.state())
    assert begun + [second.pick(group, 12, 3) for group in range(17, 36)] == picked
