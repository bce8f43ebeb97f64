# SPDX-License-Identifier: Apache-2.0
"""A critic's targets and loss against plain loops, and against themselves where nothing may differ."""

import math
import random
from functools import partial

import pytest
import torch

from tests.golden.bench import build, credited, draw_groups, flat, of_tokens, rows_of, summed, tensors
from tests.golden.reference import plain, ppo

SETTINGS = [{}, {"value_clip": 0.0}, {"gamma": 0.9, "lam": 0.6, "value_clip": 0.5}, {"lam": 1.0}]
each = pytest.mark.parametrize("options", SETTINGS)


def prepared(options, seed=0):
    """PPO, and rows with what the critic says now, what it said, and what it should have said."""
    algorithm, groups, source = build("ppo", options), draw_groups(seed), random.Random(seed)
    chosen = algorithm.options.model_dump()
    rows, targets = rows_of(groups, ppo.advantages(groups, chosen)), ppo.returns(groups, chosen)
    for row in rows:
        group, member, _, place = row["id"]
        row["returns"] = targets[group][member][place]
        row["value"] = [value + source.gauss(0, 0.4) for value in row["values"]]
    return algorithm, rows, chosen


def fitted(algorithm, rows, parts=None, dtype=torch.float64):
    """(loss, d loss / d value by row, metrics)."""
    values = {"values": tensors(rows, "value", dtype)}
    loss, slopes, metrics = summed(partial(algorithm.fit_loss, "critic"), rows, values, parts)
    return loss, slopes["values"], metrics


@each
def test_returns_equal_the_reference(options):
    algorithm = build("ppo", options)
    for seed in range(6):
        groups = draw_groups(seed)
        want = ppo.returns(groups, algorithm.options.model_dump())
        have = of_tokens(groups, credited(algorithm, groups, returns=True))
        assert flat(have) == pytest.approx(flat(of_tokens(groups, want)), abs=1e-9)


@each
def test_loss_and_gradient_equal_the_reference(options):
    for seed in range(3):
        algorithm, rows, chosen = prepared(options, seed)
        want, slopes = plain.constant(ppo.value_loss(rows, chosen)), flat(ppo.value_gradient(rows, chosen))
        for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 2e-6)):
            loss, gradient, _ = fitted(algorithm, rows, dtype=dtype)
            assert loss == pytest.approx(want, abs=bound)
            assert flat(gradient) == pytest.approx(slopes, abs=bound)


@each
def test_micro_batches_order_and_padding_change_nothing(options):
    algorithm, rows, _ = prepared(options, 2)
    loss, gradient, metrics = fitted(algorithm, rows)
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    for row in rows:
        row["mask"], row["value"] = row["mask"] + [0, 0], row["value"] + [0.0, 0.0]
        for key in ("values", "returns", "advantage", "old", "rollout", "ref"):
            row[key] = [x if m else math.nan for x, m in zip(row[key], row["mask"])] + [math.inf, math.nan]
    for parts in ([order], [order[:2], order[2:]], [[i] for i in order]):
        again, slopes, sums = fitted(algorithm, rows, parts)
        assert again == pytest.approx(loss, abs=1e-12)
        assert flat([row[:-2] for row in slopes]) == pytest.approx(flat(gradient), abs=1e-12)
        assert sums == {name: pytest.approx(value) for name, value in metrics.items()}
    masked = [slope for row, own in zip(rows, slopes) for m, slope in zip(row["mask"], own) if not m]
    assert masked == [0.0] * len(masked)
