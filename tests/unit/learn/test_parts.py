# SPDX-License-Identifier: Apache-2.0
"""Public parts of losses: advantages, ratios, surrogate, divergences, scoring."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from relax_core import learn
from relax_core.api import Loss, RowBatch, RowId
from tests.golden.reference import plain, rloo

FLOATS = st.floats(-3, 3)


GROUPS = st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4)


@given(groups=GROUPS)
def test_rewards_are_compared_within_their_group(groups):
    rewards = torch.tensor(groups, dtype=torch.float64)
    valid = torch.ones_like(rewards, dtype=torch.bool)
    parts = zip(groups, *(f(rewards, valid).tolist() for f in (learn.group_mean_std, learn.leave_one_out)), strict=True)
    for own, normalised, left_out in parts:
        assert normalised == pytest.approx(plain.normalised(own, None), rel=1e-9, abs=1e-9)
        assert left_out == pytest.approx(rloo.left_out(own, None), abs=1e-9)


@given(groups=GROUPS)
def test_whitened_values_have_mean_zero_and_spread_one(groups):
    values = torch.tensor(groups, dtype=torch.float64)
    white = learn.whiten(values, torch.ones_like(values, dtype=torch.bool))
    assert float(white.mean()) == pytest.approx(0, abs=1e-6)
    if float(values.std()) > 1e-2:
        assert float(white.std()) == pytest.approx(1, abs=1e-3)


def test_whitening_looks_at_valid_values_only():
    values, valid = torch.tensor([1.0, 3.0, math.nan, 99.0]), torch.tensor([True, True, False, False])
    assert learn.whiten(values, valid).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0, 0], abs=1e-5)
    assert learn.whiten(values, torch.tensor([True, False, False, False])).tolist() == [0] * 4


def test_invalid_members_are_in_no_statistic():
    rewards, valid = torch.tensor([[1.0, 0, 50]]), torch.tensor([[True, True, False]])
    lengths = torch.tensor([[1, 3, 900]])
    assert learn.leave_one_out(rewards, valid).tolist() == [[1, -1, 0]]
    assert learn.length_weighted_baseline(rewards, valid, lengths).tolist() == [[0.75, -0.25, 0]]
    assert learn.group_mean(rewards, valid).tolist() == [[0.5, -0.5, 0]]
    assert learn.group_mean_relative(rewards, valid)[0].tolist() == pytest.approx([1, -1, 0], abs=1e-5)
    for lower in (rewards - 0.5, rewards - 1):
        assert not learn.group_mean_relative(lower, valid).any(), "a mean that is not above zero"
    assert not learn.group_mean_std(rewards, torch.tensor([[True, False, False]])).any(), "nobody to compare with"
    assert learn.informative(rewards, valid).tolist() == [True]


def test_a_soft_limit_of_length():
    lengths = torch.tensor([1, 6, 8, 10, 40])
    assert learn.overlong_penalty(lengths, 10, 4).tolist() == [0, 0, -0.5, -1, -1]


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


@pytest.mark.parametrize("log_p", [-95.0, -400.0, -1e6, -1e-30])
@pytest.mark.parametrize("log_q", [-1.0, -95.0, -1e6])
def test_divergence_estimators_are_finite_for_extreme_log_probs(log_p, log_q):
    for anchor in (-1e-3, -95.0, -1e6):
        p = torch.tensor(log_p, requires_grad=True)
        for value in (
            learn.kl_k3(p, torch.tensor(log_q)),
            learn.kl_unbiased(p, torch.tensor(log_q), torch.tensor(anchor)),
        ):
            (slope,) = torch.autograd.grad(value, p)
            assert math.isfinite(value.detach()) and math.isfinite(slope)
    if log_q - log_p > 20:
        assert float(learn.kl_k3(p.detach(), torch.tensor(log_q))) == pytest.approx(math.exp(20) - 21)


@given(log_p=st.floats(-30, 0, width=32), log_q=st.floats(-30, 0, width=32))
def test_bounds_of_log_ratios_leave_ordinary_ones_bit_for_bit(log_p, log_q):
    p, q = torch.tensor(log_p), torch.tensor(log_q)
    if abs(log_p - log_q) <= 20:
        assert float(learn.kl_k3(p, q)) == float((q - p).exp() - (q - p) - 1)
        assert float(learn.kl_unbiased(p, q, q)) == float((p - q).exp() * ((q - p).exp() - (q - p) - 1))


def test_the_gradient_of_the_unbiased_estimator_is_that_of_the_divergence():
    """Of a policy with three tokens, in expectation over what it samples; k3's own is another."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()

    def slope(estimate):
        log_p = logits.log_softmax(0)
        return torch.autograd.grad((log_p.detach().exp() * estimate(log_p)).sum(), logits)[0]

    log_p = logits.log_softmax(0)
    exact = torch.autograd.grad((log_p.exp() * (log_p - q)).sum(), logits)[0]
    assert torch.allclose(slope(lambda p: learn.kl_unbiased(p, q, p.detach())), exact)
    assert torch.allclose(slope(lambda p: learn.kl_k2(p, q)), exact)
    assert torch.allclose(slope(lambda p: learn.kl_k1(p, q)), torch.zeros(3, dtype=torch.float64))
    assert not torch.allclose(slope(lambda p: learn.kl_k3(p, q)), exact)


def test_aggregations_share_out_the_same_tokens(rows):
    batch, ones = learn.PackedBatch(rows), torch.ones(14)
    terms = {how: learn.aggregate(batch, ones, how, fixed_length=4) for how in ("token", "sequence", "sum", "fixed")}
    counts = learn.Denominators(learn.count(rows))
    sums = learn.reduce(Loss(terms), batch, counts)
    # 7 trained tokens in five rows, each of which has one
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        {"token": 1, "sequence": 1, "sum": 7 / 5, "fixed": 7 / 20}
    )


def test_an_average_over_samples_is_bit_for_bit_that_over_sequences_where_each_sample_has_one_row(rows):
    single = RowBatch(tuple(RowId(place, 0, 0, 0) for place in range(len(rows))), rows.columns)
    values, reduced = torch.randn(14, generator=torch.Generator().manual_seed(3)), []
    for how in ("sequence", "trajectory"):
        batch, leaf = learn.PackedBatch(single), values.clone().requires_grad_()
        loss = Loss({"policy": learn.aggregate(batch, leaf, how, 0.7)})
        total = learn.reduce(loss, batch, learn.Denominators(learn.count(single)))["policy"]
        reduced.append((float(total.detach()), torch.autograd.grad(total, leaf)[0].tolist()))
    assert reduced[0] == reduced[1]


def test_an_average_over_samples_does_not_depend_on_how_their_rows_are_divided(rows):
    """The second sample of group 4 has two rows, of one trained token each."""
    whole = rows.with_columns({"sample_tokens": learn.sample_tokens(rows)})
    assert whole.columns["sample_tokens"].values.tolist() == [2, 2, 2, 2, 1]
    values, sums = torch.arange(14.0), []
    for parts in ([range(5)], [[0, 1], [2, 3, 4]], [[4], [2], [0], [1, 3]]):
        denominators, total = learn.Denominators(learn.count(whole)), 0.0
        for part in parts:
            batch = learn.PackedBatch(whole.take(list(part)))
            own = torch.cat([values.split([3, 2, 2, 4, 3])[row] for row in part])
            term = learn.aggregate(batch, own, "trajectory")
            total += float(learn.reduce(Loss({"policy": term}), batch, denominators)["policy"])
        sums.append(total)
    # samples: (1 + 2) / 2, (4 + 6) / 2, (8 + 10) / 2 and 13
    assert sums == pytest.approx([(1.5 + 5 + 9 + 13) / 4] * 3)


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
    ratio.grad = None
    learn.clipped_surrogate(ratio, advantages, 0.2, 0.28, 1.4).sum().backward()
    assert learn.clipped(ratio, advantages, 0.2, 0.28, 1.4).tolist() == (ratio.grad == 0).tolist()
    assert learn.clipped(ratio, advantages, 0.2, 0.28, 1.4)[-1]


def test_the_weight_of_cispo_is_bounded_and_has_no_gradient_of_its_own():
    log_probs = torch.tensor([-1.0, -0.5, -3.0, -0.2], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([-1.2, -2.5, -0.5, -0.2], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5, 1.0], dtype=torch.float64)
    learn.clipped_weight(log_probs, (log_probs - anchor).exp(), advantages, 0.2, 0.3).sum().backward()
    weights = torch.tensor([math.exp(0.2), 1.3, 0.8, 1.0], dtype=torch.float64)
    torch.testing.assert_close(log_probs.grad, -weights * advantages)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_scores_are_of_the_tempered_distribution(temperature):
    torch.manual_seed(0)
    logits, ids = torch.randn(6, 9, dtype=torch.float64), torch.arange(6)
    want, have, sliced = (logits.clone().requires_grad_() for _ in range(3))
    distribution = torch.distributions.Categorical(logits=want / temperature)
    wanted = {"log_probs": distribution.log_prob(ids), "entropy": distribution.entropy()}
    plain = learn.score_distribution(have, lambda x: x, ids, learn.Wanted(), vocab_size=9, temperature=temperature)
    sum(value.square().sum() for value in wanted.values()).backward()
    for leaf, max_logits in ((have, 2**25), (sliced, 20)):
        scored = learn.score_distribution(
            leaf, lambda x: x, ids, learn.Wanted(entropy=True), vocab_size=9, temperature=temperature, max_logits=max_logits
        )  # fmt: skip
        sum(scored[name].square().sum() for name in wanted).backward()
        assert all(torch.allclose(scored[name], value) for name, value in wanted.items())
        assert torch.allclose(leaf.grad, want.grad)
        measured = learn.score_distribution(
            leaf, lambda x: x, ids, learn.Wanted(measured_entropy=True), vocab_size=9, temperature=temperature,
            max_logits=max_logits,
        )  # fmt: skip
        assert torch.allclose(measured["measured_entropy"], wanted["entropy"])
        assert torch.equal(measured["log_probs"], plain["log_probs"]) and not measured["measured_entropy"].requires_grad


def test_the_measured_entropy_is_not_rounded_by_autocast():
    torch.manual_seed(0)
    logits, ids = torch.randn(6, 9) * 5 + 20, torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        scored = learn.score_distribution(logits, lambda x: x, ids, learn.Wanted(measured_entropy=True), vocab_size=9)
    want = torch.distributions.Categorical(logits=logits.double()).entropy()
    torch.testing.assert_close(scored["measured_entropy"].double(), want, atol=1e-5, rtol=0)


def test_logits_larger_than_the_bound_never_exist_at_once():
    widest = 0

    def head(features):
        nonlocal widest
        widest = max(widest, features.shape[0] * 9)
        return features

    logits = torch.randn(50, 9, requires_grad=True)
    ids = torch.zeros(50, dtype=torch.long)
    scored = learn.score_distribution(logits, head, ids, learn.Wanted(), vocab_size=9, max_logits=40)
    scored["log_probs"].sum().backward()
    assert widest <= 40


def test_logits_in_half_precision_are_scored_in_float32():
    torch.manual_seed(0)
    logits = (torch.randn(6, 9) * 4).bfloat16()
    ids = torch.arange(6)
    for wanted in (learn.Wanted(), learn.Wanted(entropy=True)):
        found = learn.score_distribution(logits, lambda x: x, ids, wanted, vocab_size=9, temperature=0.7)
        exact = torch.log_softmax(logits.double() / 0.7, -1).gather(-1, ids[:, None])[:, 0]
        assert found["log_probs"].dtype == torch.float32
        torch.testing.assert_close(found["log_probs"].double(), exact, atol=1e-5, rtol=1e-5)


def test_the_divergence_of_a_token_that_is_almost_certain_is_exact():
    p, q = torch.tensor([1 - 1e-4, 1 - 1e-3]), torch.tensor([1 - 1e-3, 1 - 1e-4])
    exact = (
        q.double() * (q.double() / p.double()).log() + (1 - q.double()) * ((1 - q.double()) / (1 - p.double())).log()
    )
    found = learn.binary_divergence(p.double().log(), q.double().log(), "kl")
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0.0)


def test_a_clipped_value_loss_marks_where_the_clip_decides():
    values, old, returns = torch.tensor([1.0, 1.0, 0.1]), torch.zeros(3), torch.tensor([0.0, 2.0, 0.0])
    loss, decides = learn.clipped_value_loss(values, old, returns, 0.2)
    assert loss.tolist() == pytest.approx([1.0, 1.8**2, 0.01]) and decides.tolist() == [False, True, False]


def test_a_log_ratio_is_bounded_before_it_is_exponentiated():
    student, teacher = torch.tensor([-60.0, -25.0]), torch.tensor([-1.0, -1.0])
    most = math.exp(20.0)
    assert learn.sampled_credit("forward", student, teacher).tolist() == pytest.approx([most - 1] * 2, rel=1e-5)
    assert learn.sampled_credit("reverse", student, teacher).tolist() == [20.0, 20.0]
    assert learn.sampled_divergence(student, teacher, reverse=True).tolist() == [200.0, 200.0]
    assert learn.sampled_divergence(student, teacher, reverse=False).tolist() == pytest.approx(
        [most - 21] * 2, rel=1e-5
    )


def test_a_mean_over_all_ranks_divides_by_what_all_of_them_counted():
    ranks = [learn.Denominators({"tokens": 4.0}) for _ in range(2)]
    for rank, number in zip(ranks, (2.0, 3.0), strict=True):
        rank.add({"pairs": torch.tensor(number)})
        assert rank.nominal("pairs") == 1.0
    shares = [rank.share() for rank in ranks]
    for rank in ranks:
        rank.join(shares)
        assert rank.rescale({}) == pytest.approx(1 / 5)
