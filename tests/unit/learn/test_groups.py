# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from relax_core import learn
from relax_core.api import Advantages, AttemptId, Outcome, Sealed


@pytest.fixture
def samples():
    """The four samples of `rows`, and one of group 9 that has no rows at all."""
    return {
        AttemptId(*key): Sealed(AttemptId(*key), 1, Outcome.FINISHED, reward, trained_tokens=tokens, parts={"exact": reward})
        for key, reward, tokens in [
            ((9, 2, 0), 0.5, 0), ((4, 1, 0), 0.0, 2), ((9, 0, 0), 1.0, 2), ((4, 0, 0), 1.0, 2), ((9, 1, 1), 0.0, 1),
        ]
    }  # fmt: skip


def test_groups_are_rectangles_with_room_for_the_largest(rows, samples):
    groups = learn.Grouping(rows, samples, ("weight_versions", "rewards")).groups
    assert groups.rewards.tolist() == [[1, 0, 0], [1, 0, 0.5]]
    assert groups.valid.tolist() == [[True, True, False], [True, True, True]]
    assert groups.lengths.tolist() == [[2, 2, 0], [2, 1, 0]]
    assert groups.parts["exact"].tolist() == groups.rewards.tolist()
    assert groups.row_sample.tolist() == [0, 1, 1, 3, 4]
    assert groups.row_lengths.tolist() == [3, 2, 2, 4, 3]
    assert set(groups.token_columns) == {"weight_versions"}


def test_members_without_a_verdict_are_not_valid(rows, samples):
    known = list(samples)
    samples[known[0]] = replace(samples[known[0]], outcome=Outcome.REWARD_TIMEOUT)
    samples[known[1]] = replace(samples[known[1]], reward=float("nan"))
    samples[known[2]] = replace(samples[known[2]], outcome=Outcome.TRUNCATED)
    groups = learn.Grouping(rows, samples).groups
    assert groups.valid.tolist() == [[True, False, False], [True, True, False]]
    assert groups.rewards.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_a_greedy_sample_without_a_verdict_is_no_baseline(rows, samples):
    greedy = {AttemptId(4, 2, 0): (Outcome.FINISHED, 0.5), AttemptId(9, 3, 0): (Outcome.REWARD_TIMEOUT, 0.0)}
    samples |= {key: Sealed(key, 0, outcome, reward, baseline=True) for key, (outcome, reward) in greedy.items()}
    groups = learn.Grouping(rows, samples).groups
    assert groups.baseline.nan_to_num(-1.0).tolist() == [0.5, -1.0]
    assert groups.rewards.tolist() == [[1, 0, 0], [1, 0, 0.5]], "it is no member of its group"


def test_a_metric_of_a_judgement_is_not_a_reward(rows, samples):
    told = {key: replace(one, parts={**one.parts, "judge/verdicts/agreement": 1.0}) for key, one in samples.items()}
    assert set(learn.Grouping(rows, told).groups.parts) == {"exact"}


def test_an_advantage_a_sample_reaches_every_trained_token_of_its_rows(rows, samples):
    order = [3, 1, 4, 0, 2]
    grouping = learn.Grouping(rows.take(order), samples)
    column = grouping.columns(Advantages(torch.tensor([[1.0, 2, 9], [3, 4, 9]])))["advantages"]
    assert [row.tolist() for row in column.rows()] == [[0, 3, 0, 3], [0, 2], [0, 0, 4], [0, 1, 1], [0, 2]]


def test_an_advantage_a_token_comes_back_in_the_order_of_the_rows(rows, samples):
    order = [3, 1, 4, 0, 2]
    grouping = learn.Grouping(rows.take(order), samples)
    columns = grouping.columns(Advantages(torch.arange(14.0), returns=torch.arange(14.0) / 2))
    masked = torch.arange(14.0) * torch.from_numpy(rows.columns["loss_mask"].values)
    want = rows.with_columns(
        {"a": columns["advantages"].__class__(masked.numpy(), rows.columns["tokens"].lengths)}
    ).take(order)
    assert columns["advantages"].values.tolist() == want.columns["a"].values.tolist()
    assert (columns["returns"].values * 2).tolist() == want.columns["a"].values.tolist()


def test_a_wrong_shape_and_a_nan_are_refused(rows, samples):
    grouping = learn.Grouping(rows, samples)
    with pytest.raises(ValueError, match=r"got shape \(5,\)"):
        grouping.columns(Advantages(torch.zeros(5)))
    with pytest.raises(ValueError, match="NaN"):
        grouping.columns(Advantages(torch.full((2, 3), torch.nan)))


def test_a_row_of_an_unknown_sample_is_refused(rows, samples):
    del samples[AttemptId(4, 1, 0)]
    with pytest.raises(ValueError, match=r"\(4, 1, 0\)"):
        learn.Grouping(rows, samples)


def test_no_rows_give_an_empty_column(rows):
    grouping = learn.Grouping(rows.take([]), {})
    nothing = Advantages(learn.group_mean_std(grouping.groups.rewards, grouping.groups.valid))
    assert grouping.columns(nothing)["advantages"].values.size == 0
