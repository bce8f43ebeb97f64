# SPDX-License-Identifier: Apache-2.0
"""Public parts of losses: advantages, ratios, surrogate, divergences, scoring."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_core import learn

FLOATS = st.floats(-3, 3)


def test_mean_only_leaves_the_spread():
    rewards, valid = torch.tensor([[1.0, 0, 5, 9], [2, 2, 2, 2]]), torch.tensor([[True, True, True, False], [True] * 4])
    assert learn.group_mean(rewards, valid).tolist() == [[-1, -2, 3, 0], [0, 0, 0, 0]]


def test_a_single_valid_member_gets_nothing():
    rewards, valid = torch.tensor([[3.0, 0.0]]), torch.tensor([[True, False]])
    assert learn.group_mean_std(rewards, valid).tolist() == [[0, 0]]


@given(log_p=FLOATS, log_q=FLOATS)
def test_divergence_estimators_agree_with_their_formulas(log_p, log_q):
    p, q = torch.tensor(log_p, dtype=torch.float64), torch.tensor(log_q, dtype=torch.float64)
    d = log_p - log_q
    assert float(learn.kl_k1(p, q)) == pytest.approx(d)
    assert float(learn.kl_k2(p, q)) == pytest.approx(d * d / 2)
    assert float(learn.kl_k3(p, q)) == pytest.approx(math.exp(-d) + d - 1, abs=1e-12)
    assert float(learn.kl_k3(p, q)) >= -1e-12


def test_divergence_estimators_are_unbiased_where_they_claim_it():
    p, q = torch.tensor([0.2, 0.3, 0.5]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
    exact = float((p.exp() * (p - q)).sum())
    assert float((p.exp() * learn.kl_k1(p, q)).sum()) == pytest.approx(exact)
    assert float((p.exp() * learn.kl_k3(p, q)).sum()) == pytest.approx(exact)


@pytest.mark.parametrize(("ratio", "advantage", "dual", "want"), [
    (1.5, 1.0, 0.0, -1.28), (0.5, 1.0, 0.0, -0.5), (0.5, -1.0, 0.0, 0.8), (1.5, -1.0, 0.0, 1.5),
    (9.0, -1.0, 3.0, 3.0), (9.0, 1.0, 3.0, -1.28), (2.0, -1.0, 3.0, 2.0),
])  # fmt: skip
def test_the_surrogate_is_bounded_on_the_side_that_would_gain(ratio, advantage, dual, want):
    got = learn.clipped_surrogate(torch.tensor([ratio]), torch.tensor([advantage]), 0.2, 0.28, dual)
    assert float(got) == pytest.approx(want)


def test_a_clipped_token_is_one_without_gradient():
    ratio = torch.tensor([0.5, 0.9, 1.5, 0.5, 1.5], requires_grad=True)
    advantages = torch.tensor([-1.0, 1.0, 1.0, 1.0, -1.0])
    learn.clipped_surrogate(ratio, advantages, 0.2, 0.28).sum().backward()
    assert learn.clipped(ratio, advantages, 0.2, 0.28).tolist() == (ratio.grad == 0).tolist()


def test_ratio_levels(rows):
    batch, moved = learn.PackedBatch(rows), torch.arange(14.0)
    zeros = torch.zeros(14)
    assert learn.log_ratio(batch, moved, zeros).tolist() == moved.tolist()
    assert learn.log_ratio(batch, moved, zeros, "sequence")[:5].tolist() == [3, 3, 3, 4, 4]
    assert learn.log_ratio(batch, moved, zeros, "geometric")[:5].tolist() == [1.5, 1.5, 1.5, 4, 4]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_scores_are_of_the_tempered_distribution(temperature):
    torch.manual_seed(0)
    logits, ids = torch.randn(6, 9, dtype=torch.float64), torch.arange(6)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    for max_logits in (2**25, 20):
        log_probs, entropy = learn.score_tokens(
            logits, lambda x: x, ids, vocab_size=9, temperature=temperature, entropy=True, max_logits=max_logits
        )
        assert torch.allclose(log_probs, distribution.log_prob(ids))
        assert entropy is not None and torch.allclose(entropy, distribution.entropy())


def test_logits_larger_than_the_bound_never_exist_at_once():
    widest = 0

    def head(features):
        nonlocal widest
        widest = max(widest, features.shape[0] * 9)
        return features

    logits = torch.randn(50, 9, requires_grad=True)
    learn.score_tokens(logits, head, torch.zeros(50, dtype=torch.long), vocab_size=9, max_logits=40)[0].sum().backward()
    assert widest <= 40
