# SPDX-License-Identifier: Apache-2.0
"""The meter between engine and trainer against plain numpy over all tokens at once, however they were split."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from relax_core.learn.counts import BUCKETS, mean, merge_metrics, with_quantiles
from relax_core.learn.off_policy import Mismatch

OF = "train/rollout_log_prob_diff"
sizes = st.floats(-15, 15, allow_subnormal=False).map(lambda x: 0.0 if abs(x) < 1e-9 else x)


def measured(apart, mask, fresh, cuts):
    """As ranks and micro-batches would share it, merged and shown."""
    parts = []
    for piece in np.split(np.arange(len(apart)), sorted(cuts)):
        if len(piece):
            meter = Mismatch()
            meter.add(*(torch.from_numpy(array[piece]) for array in (apart, mask, fresh)))
            parts.append(meter.share())
    return {name: mean(metric) for name, metric in with_quantiles(merge_metrics(*parts)).items()}


@settings(max_examples=40)
@given(st.lists(st.tuples(sizes, st.booleans(), st.booleans()), min_size=1, max_size=300), st.data())
def test_every_metric_is_the_same_for_any_split_into_batches(tokens, data):
    apart = np.array([token[0] for token in tokens], np.float32)
    mask = np.array([token[1] for token in tokens])
    fresh = mask & np.array([token[2] for token in tokens])
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))
    found = measured(apart, mask, fresh, cuts)
    for of, kept in (("", mask), ("_lag0", fresh)):
        if not kept.any():
            assert found.get(f"{OF}{of}", 0.0) == 0.0
            continue
        own = apart[kept].astype(np.float64)
        ranked = np.sort(np.abs(own))
        p99 = ranked[len(ranked) - 1 - int(len(ranked) * 0.01)]
        assert found[f"{OF}{of}"] == pytest.approx(np.abs(own).mean())
        assert found[f"{OF}{of}_max"] == pytest.approx(ranked[-1])
        assert found[f"{OF}{of}_p99"] == pytest.approx(p99, rel=0.045, abs=3e-10)
        assert found[f"{OF}{of}_p99"] <= found[f"{OF}{of}_max"]
        assert found[f"train/rollout_kl{of}"] == pytest.approx((np.expm1(own) - own).mean(), rel=1e-6, abs=1e-16)
        assert found[f"train/rollout_ratio{of}_max"] == pytest.approx(np.exp(own.max()))
        assert found[f"train/rollout_ratio{of}_min"] == pytest.approx(np.exp(own.min()))


def test_the_quantile_does_not_move_with_the_split():
    apart = np.random.default_rng(0).lognormal(-6, 2, 4000).astype(np.float32)
    everything = np.ones(len(apart), bool)
    whole, parted = (measured(apart, everything, everything, cuts) for cuts in ((), range(0, 4000, 7)))
    assert whole[f"{OF}_p99"] == parted[f"{OF}_p99"] == pytest.approx(np.quantile(apart, 0.99), rel=0.05)


def test_nan_counts_as_the_largest_difference():
    meter = Mismatch()
    meter.add(torch.tensor([float("nan"), 1.0, 1e30]), torch.ones(3, dtype=torch.bool))
    assert meter.share()[f"{OF}_p99@{BUCKETS - 1}"] == (2.0, 2.0)
