# SPDX-License-Identifier: Apache-2.0
"""Differences of a sample by plain loops, and the settings that a comparison measures."""

import math

import numpy as np
import pytest
from relax_plugin_workbench.mismatch import Differences

from relax_core.api.batch import Ragged, RowBatch, RowId


def rows(masks, said):
    lengths = [len(mask) for mask in masks]
    return RowBatch(
        tuple(RowId(number, 0, 0, 0) for number in range(len(masks))),
        {
            "tokens": Ragged.of([np.zeros(length, np.int32) for length in lengths]),
            "loss_mask": Ragged.of([np.array(mask, np.uint8) for mask in masks]),
            "rollout_log_probs": Ragged.of([np.array(row, np.float32) for row in said]),
        },
    )


def test_only_sampled_tokens_count_by_their_place_in_the_sample():
    masks = [[0, 0, 1, 1], [0, *[1] * 20]]
    own = [np.array([9, 9, -1.5, -2.0], np.float32), np.array([9.0, *[-1.0] * 20], np.float32)]
    said = [np.array([0, 0, -1.0, -1.0]), np.array([0.0, *[-1.0] * 16, *[-0.9] * 4])]
    found = Differences.of(rows(masks, said), Ragged.of(own))
    apart = [-0.5, -1.0, *[0.0] * 16, *[-0.1] * 4]
    assert found.tokens == 22
    assert found.mean == pytest.approx(sum(map(abs, apart)) / 22, rel=1e-6)
    assert (found.max, found.p99) == (1.0, 1.0)
    assert found.k3_kl == pytest.approx(sum(math.exp(d) - 1 - d for d in apart) / 22, rel=1e-5)
    assert (found.ratio_min, found.ratio_max) == (pytest.approx(math.exp(-1)), 1.0)
    assert found.positions == ((16, pytest.approx(1.5 / 18)), (64, pytest.approx(0.1, rel=1e-5)))
    assert found.plain()["positions"][0]["before"] == 16


def test_ninety_nine_percent_are_at_most_the_p99():
    apart = np.arange(1, 1001) / 1000
    assert Differences.between(apart, np.zeros(1000, np.int64)).p99 == pytest.approx(0.99)
