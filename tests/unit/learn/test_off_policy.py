# SPDX-License-Identifier: Apache-2.0
"""Corrections for samples that another policy drew."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from relax_core import learn
from relax_core.learn.policy_gradient import ClippedOptions


@pytest.fixture
def batch(rows):
    return learn.PackedBatch(rows)


def per_token(values):
    return torch.tensor(values, dtype=torch.float32)


def test_the_weight_is_exactly_one_where_engine_and_trainer_agree(batch):
    log_probs = -torch.rand(14)
    for level in ("token", "sequence", "geometric"):
        for masks in (False, True):
            weight = learn.importance_weight(batch, log_probs, log_probs, level=level, masks=masks)
            assert weight.tolist() == [1.0] * 14


def test_levels_of_the_ratio(batch):
    old = per_token([0, 1, 3, *[0] * 11])
    token, sequence, mean = (
        learn.importance_ratio(batch, old, torch.zeros(14), level)[:3].log()
        for level in ("token", "sequence", "geometric")
    )
    assert token.tolist() == pytest.approx([0, 1, 3])
    assert sequence.tolist() == pytest.approx([4, 4, 4]) and mean.tolist() == pytest.approx([2, 2, 2])


@given(st.lists(st.floats(-50, 50), min_size=1), st.floats(0.1, 10))
def test_a_truncated_weight_is_bounded_and_never_larger(moved, cap):
    ratio = torch.tensor(moved, dtype=torch.float64).exp()
    weight = learn.truncate(ratio, cap)
    assert bool((weight <= cap).all()) and bool((weight <= ratio).all())
    assert bool((weight[ratio <= cap] == ratio[ratio <= cap]).all())


def test_a_masked_weight_is_the_ratio_or_nothing():
    ratio = torch.tensor([0.4, 0.5, 1.0, 5.0, 5.1, math.inf, math.nan])
    assert learn.mask_outside(ratio, 0.5, 5.0).tolist() == [0, 0.5, 1.0, 5.0, 0, 0, 0]
    assert learn.within(ratio, 0.5, 5.0).tolist() == [False, True, True, True, False, False, False]


def test_an_overflowing_ratio_is_bounded(batch):
    far = torch.full((14,), -1e4)
    assert learn.importance_weight(batch, torch.zeros(14), far, truncate_at=2.0).tolist() == [2.0] * 14
    for level in ("token", "sequence", "geometric"):
        assert bool(learn.log_ratio(batch, torch.zeros(14), far, level).exp().isfinite().all())


def test_a_weight_has_no_gradient(batch):
    old = torch.zeros(14, requires_grad=True)
    assert not learn.importance_weight(batch, old, torch.zeros(14)).requires_grad


def test_only_bad_sequences_that_are_too_far_are_left_out(batch):
    # row 0 (trained 1, 2) has moved by 0.2 on average, row 1 (trained 4) by 0.05
    policy = per_token([0, -0.3, -0.1, 0, -0.05, *[0] * 9])
    bad = learn.off_policy_sequence_mask(batch, policy, torch.zeros(14), torch.full((14,), -1.0), 0.1)
    assert bad[:5].tolist() == [False] * 3 + [True] * 2
    good = learn.off_policy_sequence_mask(batch, policy, torch.zeros(14), torch.full((14,), 1.0), 0.1)
    assert bool(good.all())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"correction": "none", "correction_cap": 3.0}, "correction_cap"),
        ({"correction": "behaviour", "correction_level": "sequence"}, "correction_level"),
        ({"correction_floor": 0.5}, "correction_floor"),
        ({"correction": "mask", "correction_floor": 2.0}, "correction_floor"),
        ({"kl_coef": 0.1, "reward_kl_coef": 0.1}, "reward_kl_coef"),
        ({"kl_estimator": "k2"}, "kl_estimator"),
        ({"fixed_length": 5}, "fixed_length"),
        ({"aggregation": "fixed"}, "fixed_length"),
        ({"kl_coef": -1}, "kl_coef"),
        ({"correction_cap": 0}, "correction_cap"),
        ({"dual_clip": 0.9}, "dual_clip"),
        ({"dual_clip": 1.0}, "dual_clip"),
    ],
)
def test_an_option_without_effect_or_against_another_is_refused(options, field):
    with pytest.raises(ValueError, match=field):
        ClippedOptions(**options)
