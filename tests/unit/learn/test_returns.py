# SPDX-License-Identifier: Apache-2.0
"""Credit of tokens: what follows, and its advantage over a critic. Rows of 4 and 3 tokens, observations in between."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from relax_core import learn

MASK = torch.tensor([0, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
LENGTHS = torch.tensor([4, 3])


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_rewards_to_go_skip_given_tokens():
    rewards = numbers(9, 1, 9, 2, 9, 3, 4)
    assert learn.reward_to_go(rewards, MASK, LENGTHS, gamma=0.5).tolist() == [0, 2, 0, 2, 0, 5, 4]


def test_a_reward_is_earned_at_the_last_trained_token():
    assert learn.at_last_token(numbers(5, 7), MASK, LENGTHS).tolist() == [0, 0, 0, 5, 0, 0, 7]
    nobody = torch.zeros(7, dtype=torch.bool)
    assert learn.at_last_token(numbers(5, 7), nobody, LENGTHS).tolist() == [0] * 7


@given(st.lists(st.floats(-3, 3), min_size=7, max_size=7), st.lists(st.floats(-3, 3), min_size=7, max_size=7),
       st.floats(0.5, 1), st.floats(0, 1))  # fmt: skip
def test_gae_equals_its_sum(rewards, values, gamma, lam):
    got, _ = learn.gae(numbers(*rewards), numbers(*values), MASK, LENGTHS, gamma, lam)
    for row in ([1, 3], [5, 6]):
        following = [*(values[t] for t in row[1:]), 0.0]
        deltas = [rewards[t] + gamma * v - values[t] for t, v in zip(row, following, strict=True)]
        for place, t in enumerate(row):
            want = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[place:]))
            assert float(got[t]) == pytest.approx(want, abs=1e-9)


def test_rows_without_a_trained_token_have_nothing():
    nobody = torch.zeros(7, dtype=torch.bool)
    assert learn.reward_to_go(torch.full((7,), math.nan), nobody, LENGTHS).tolist() == [0] * 7


def test_turns_earn_what_follows():
    rewards = torch.tensor([[[1.0, 2.0, 4.0], [1.0, math.nan, math.nan]]])
    got = learn.turn_returns(rewards, 0.5)
    assert got[0, 0].tolist() == [3, 4, 4]
    assert got[0, 1, 0] == 1 and bool(got[0, 1, 1:].isnan().all())
