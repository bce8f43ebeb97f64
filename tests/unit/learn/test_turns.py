# SPDX-License-Identifier: Apache-2.0
"""Credit of turns: compared where they began in an equal state, of one group, by valid members; and back to tokens."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from pydantic import ValidationError
from relax_plugin_policy_gradient.gigpo import GiGPO, GiGPOOptions
from relax_plugin_policy_gradient.grpo import GRPO, GRPOOptions

from relax_core import learn
from relax_core.api import AttemptId, Groups, Outcome, Ragged, RowBatch, RowId, Sealed
from relax_core.api.trajectory import Node, Trajectory
from relax_core.learn.groups import credited
from relax_core.rewards.host import ScoredSample
from relax_core.sampling.rows import row_batch

NAN = math.nan


def numbers(values):
    return torch.tensor(values, dtype=torch.float64)


def credit(returns, states, valid=None, std=False):
    returns = numbers(returns)
    valid = torch.ones(returns.shape[:2], dtype=torch.bool) if valid is None else torch.tensor(valid)
    return learn.step_credit(returns, torch.tensor(states), valid, std)


@pytest.mark.parametrize(
    ("returns", "states", "valid", "want"),
    [
        ([[[1.0, 4.0], [3.0, 6.0]]], [[[5, 8], [5, -8]]], None, [[[-1, 0], [1, 0]]]),
        ([[[1.0, 2.0], [6.0, 9.0]]], [[[5, 5], [5, 0]]], None, [[[-2, -1], [3, 0]]]),  # a sample came back to state 5
        ([[[1.0]], [[3.0]]], [[[5]], [[5]]], None, [[[0]], [[0]]]),  # states of other tasks are no comparison
        ([[[1.0], [3.0], [100.0]]], [[[5], [5], [5]]], [[True, True, False]], [[[-1], [1], [0]]]),
        ([[[1.0, 2.0], [3.0, NAN]]], [[[5, 8], [5, 0]]], None, [[[-1, 0], [1, NAN]]]),
    ],
)
def test_turns_are_compared_where_they_began_in_an_equal_state(returns, states, valid, want):
    torch.testing.assert_close(credit(returns, states, valid), numbers(want), equal_nan=True, rtol=0, atol=0)


def test_equal_returns_are_exactly_nothing():
    assert credit([[[0.1], [0.1], [0.1]]], [[[5], [5], [5]]], std=True).tolist() == [[[0], [0], [0]]]


def test_no_turns_at_all_give_nothing():
    empty = torch.zeros(2, 3, 0, dtype=torch.float64)
    assert learn.step_credit(empty, empty.long(), torch.ones(2, 3, dtype=torch.bool)).shape == (2, 3, 0)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.floats(-3, 3)), min_size=3, max_size=3), min_size=4, max_size=4)
)
def test_step_credit_sums_to_nothing_in_each_state(drawn):
    """Whatever was earned: a state's mean is taken off, so no state is pushed up or down as a whole."""
    states = torch.tensor([[[state for state, _ in turns] for turns in drawn]])
    returns = numbers([[[earned for _, earned in turns] for turns in drawn]])
    for std in (True, False):
        got = learn.step_credit(returns, states, torch.ones(1, 4, dtype=torch.bool), std)
        for state in states.unique():
            assert float(got[states == state].sum()) == pytest.approx(0, abs=1e-9)


def of_rows(turns, states, earned, samples, rewards):
    """Groups of rows that are given as lists over tokens; `samples` says whose each is. Group 0."""
    lengths = np.array([len(row) for row in turns])
    seen = [row[:place].count(sample) for place, sample in enumerate(samples) for row in [samples]]

    def column(rows, dtype):
        return Ragged(np.concatenate([np.array(row, dtype) for row in rows]), lengths)

    batch = RowBatch(
        tuple(RowId(0, sample, 0, number) for sample, number in zip(samples, seen, strict=True)),
        {"loss_mask": column([[int(t >= 0) for t in row] for row in turns], np.uint8), "turns": column(turns, np.int32),
         "states": column(states, np.int64), "contexts": column(states, np.int64), "step_rewards": column(earned, np.float32)},
    )  # fmt: skip
    sealed = {
        AttemptId(0, sample, 0): Sealed(AttemptId(0, sample, 0), samples.count(sample), Outcome.FINISHED, reward)
        for sample, reward in enumerate(rewards)
    }
    return learn.Grouping(batch, sealed, ("loss_mask", "turns", "states", "contexts", "step_rewards"))


def test_turns_of_several_rows_are_one_sample_s_and_come_back_to_their_tokens():
    big = 2**62 + 1
    grouping = of_rows(
        [[-1, 0, 0, -1, 1], [-1, 2], [-1, 0]],
        [[0, 7, 7, 0, big], [0, 8], [0, 7]],
        [[0, 0.5, 0.5, 0, 0], [0, 1], [0, 0]],
        [0, 0, 1],
        [1.5, 0.0, 0.25],
    )
    groups = grouping.groups
    assert groups.states.tolist() == [[[7, big, 8], [7, 0, 0], [0, 0, 0]]]
    assert groups.step_rewards[0, 0].tolist() == [0.5, 0, 1]
    assert groups.step_rewards[0, 1, 0] == 0 and bool(groups.step_rewards[0, 1:, 1:].isnan().all())
    per_token = learn.of_turns(torch.arange(9.0).reshape(1, 3, 3), groups)
    assert per_token.tolist() == [0, 0, 0, 0, 1, 0, 2, 0, 3]


def test_turn_columns_exist_only_on_request():
    batch = RowBatch((RowId(0, 0, 0, 0),), {"loss_mask": Ragged(np.array([0, 1], np.uint8), np.array([2]))})
    sealed = {AttemptId(0, 0, 0): Sealed(AttemptId(0, 0, 0), 1, Outcome.FINISHED, 1.0)}
    groups = learn.Grouping(batch, sealed, ("loss_mask",)).groups
    assert groups.step_rewards is None and groups.states is None
    with pytest.raises(ValueError, match="advantage_columns"):
        learn.of_turns(torch.zeros(1, 1, 1), groups)


@pytest.mark.parametrize("omega", [0.0, 2.5])
def test_gigpo_of_single_turns_is_grpo_with_another_size(omega):
    """All samples of a task begin in one state: A_S is A_E."""
    rewards = [1.0, 0.0, 0.25]
    grouping = of_rows([[-1, 0]] * 3, [[0, 7]] * 3, [[0, reward] for reward in rewards], [0, 1, 2], rewards)
    ours = GiGPO(GiGPOOptions(step_weight=omega)).advantages(grouping.groups).values
    grpo = GRPO().advantages(grouping.groups).values
    assert ours.tolist() == pytest.approx([x * (1 + omega) for a in grpo[0].tolist() for x in (0, a)])


def test_a_context_is_compared_with_those_of_its_name_in_other_samples():
    """Two turns of one context earn together; a context that one sample alone has, and missing turns, have no credit."""
    nan = float("nan")
    earned = numbers([[[0.0, 1.0, 5.0], [0.0, 0.0, nan], [2.0, 7.0, nan]]])
    contexts = torch.tensor([[[4, 4, 9], [4, 4, 0], [4, 8, 0]]])
    valid = torch.ones(1, 3, dtype=torch.bool)
    got = learn.context_credit(earned, contexts, valid, std=False)
    assert got[0, 0].tolist() == [0.0, 0.0, 0.0] and got[0, 1, :2].tolist() == [-1.0, -1.0]
    assert got[0, 2, :2].tolist() == [1.0, 0.0] and bool(got[0, 1:, 2].isnan().all())
    by_spread = learn.context_credit(earned, contexts, valid)
    assert by_spread[0, 2, 0] == pytest.approx(1.0, abs=1e-5) and by_spread[0, 1, 0] == pytest.approx(-1.0, abs=1e-5)
    without = learn.context_credit(earned, contexts, torch.tensor([[True, True, False]]), std=False)
    assert without[0, :2, 0].tolist() == [0.5, -0.5] and bool(
        without[0, 2].isnan().all() or (without[0, 2, :2] == 0).all()
    )


def test_contexts_are_compared_within_a_group_and_unnamed_samples_share_one_context():
    earned, contexts = numbers([[[1.0], [1.0]], [[3.0], [1.0]]]), torch.zeros(2, 2, 1, dtype=torch.int64)
    got = learn.context_credit(earned, contexts, torch.ones(2, 2, dtype=torch.bool), std=False)
    assert got.flatten().tolist() == [0.0, 0.0, 1.0, -1.0]


@pytest.mark.parametrize("normalise", ["std", "none"])
def test_grpo_by_context_is_grpo_where_there_is_one_context(normalise):
    grouping = of_rows(
        [[-1, 0, 0, -1, 1], [-1, 0, 1]], [[0, 7, 7, 0, 7], [0, 7, 7]], [[0, 0.25, 0.25, 0, 0.5], [0, 0, 0.25]],
        [0, 1], [0.75, 0.25],
    )  # fmt: skip
    by_context = GRPO(GRPOOptions(normalise=normalise, credit_by="context"))
    values = grouping.columns(by_context.advantages(grouping.groups))["advantages"]
    samples = grouping.columns(GRPO(GRPOOptions(normalise=normalise)).advantages(grouping.groups))["advantages"]
    np.testing.assert_allclose(values.values, samples.values, rtol=1e-6)
    with pytest.raises(ValidationError, match="use kl_coef"):
        GRPOOptions(credit_by="context", reward_kl_coef=0.1)


def by_hand(samples, std=True):
    """Credit of each sample's contexts from [(reward of the whole sample, {context: reward of its turns})]."""
    members = range(len(samples))
    whole = [samples[i][0] - statistics.fmean(one for one, _ in samples) for i in members]
    credit = [{} for _ in members]
    for name in {name for _, contexts in samples for name in contexts}:
        having = [i for i in members if name in samples[i][1]]
        own = {i: samples[i][1][name] - statistics.fmean(samples[j][1][name] for j in having) for i in having}
        for i in having:
            if len(having) == len(samples):
                variance = sum((own[j] + whole[j]) ** 2 for j in having) / (len(having) - 1)
            else:
                variance = sum(x * x for x in own.values()) / max(1, len(having) - 1)
                variance += sum(x * x for x in whole) / (len(samples) - 1)
            credit[i][name] = (own[i] + whole[i]) / (math.sqrt(variance) + 1e-6 if std else 1.0)
    return credit


def credited_by_context(samples, std=True):
    """Ours, from samples with a row and a turn for each context; the whole sample's reward is of no turn."""
    played = []
    for number, (whole, contexts) in enumerate(samples):
        nodes, names = [], list(contexts)
        for turn in range(len(names)):
            nodes += [Node(None, (1, turn), sampled=False), Node(len(nodes), (2, 3), True, (-1.0,) * 2, (0, 0), turn)]
        trajectory = Trajectory((), "", tuple(nodes), contexts=tuple(names), states=(0,) * len(names))
        steps = tuple(contexts.values())
        played.append((AttemptId(0, number, 0), trajectory, ScoredSample(whole + sum(steps), steps=steps)))
    algorithm = GRPO(GRPOOptions(credit_by="context", normalise="std" if std else "none"))
    asked = tuple({"loss_mask", *(column.name for column in algorithm.advantage_columns())})
    batch, seals = row_batch(played, asked=asked)
    column = credited(algorithm, batch, {seal.attempt: seal for seal in seals}, asked)["advantages"]
    credit = [{} for _ in samples]
    for row, values in zip(batch.ids, column.rows(), strict=True):
        assert values[-1] == values[-2]
        credit[row.sample][list(samples[row.sample][1])[row.row]] = float(values[-1])
    return credit


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("samples", [
    [(1.0, {"plan": 0.0}), (1.0, {"solve": 0.0})],
    [(1.0, {"plan": 0.0}), (0.0, {"solve": 0.0})],
    [(1.0, {"plan": 0.0, "solve": 0.0}), (0.5, {"plan": 0.0}), (0.0, {"solve": 0.0, "check": 0.0})],
    [(0.0, {"plan": 0.5, "solve": 1.0}), (0.0, {"plan": 0.25}), (0.0, {"plan": 0.5, "solve": 0.0})],
    [(1.0, {"plan": 0.5, "solve": 0.7}), (0.3, {"plan": 0.1}), (0.3, {"plan": 0.5, "solve": 0.1, "check": 9.0})],
    [(1.0, {"plan": 0.5, "solve": 0.7}), (1.0, {"plan": 0.1, "solve": 0.1}), (0.0, {"plan": 0.1, "solve": 0.7})],
])  # fmt: skip
def test_a_reward_for_the_whole_sample_is_compared_with_all_samples_of_the_group(samples, std):
    ours, theirs = credited_by_context(samples, std), by_hand(samples, std)
    for own, want in zip(ours, theirs, strict=True):
        assert own == pytest.approx(want, abs=2e-6)


def test_equal_rewards_of_samples_that_end_in_different_contexts_give_no_advantage():
    assert credited_by_context([(1.0, {"plan": 0.0}), (1.0, {"solve": 0.0})]) == [{"plan": 0.0}, {"solve": 0.0}]
    assert credited_by_context([(0.3, {"plan": 0.0, "solve": 0.0}), (0.3, {"plan": 0.0})]) == [
        {"plan": 0.0, "solve": 0.0}, {"plan": 0.0},
    ]  # fmt: skip


@pytest.mark.parametrize("std", [True, False])
def test_by_context_is_by_sample_where_samples_have_one_common_context_or_only_rewards_as_a_whole(std):
    by_sample = GRPO(GRPOOptions(normalise="std" if std else "none"))
    for samples in (
        [(1.0, {"": 0.25}), (0.0, {"": 0.75}), (0.5, {"": 0.0})],
        [(1.0, {"plan": 0.0, "solve": 0.0}), (0.0, {"plan": 0.0}), (0.1, {"check": 0.0})],
    ):
        rewards = numbers([[whole + sum(contexts.values()) for whole, contexts in samples]])
        groups = Groups(rewards, torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3, dtype=torch.int64))
        want = by_sample.advantages(groups).values[0].tolist()
        for own, value in zip(credited_by_context(samples, std), want, strict=True):
            assert list(own.values()) == pytest.approx([value] * len(own), abs=1e-6)
