# SPDX-License-Identifier: Apache-2.0
"""The trainer's own check of the bound, token by token: samples that mix versions pass exactly where each token may."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from relax_core.api.batch import Ragged, RowBatch, RowId
from relax_core.learn.counts import check_lag

STEP, K = 7, 2


def rows(*versions: list[int]) -> RowBatch:
    """Rows of trained tokens; -1 is a token that was given."""
    lengths = np.array([len(row) for row in versions], np.int64)
    flat = np.array([version for row in versions for version in row], np.int32)
    columns = {"weight_versions": Ragged(flat, lengths), "loss_mask": Ragged((flat >= 0).astype(np.uint8), lengths)}
    return RowBatch(tuple(RowId(number, 0, 0, 0) for number in range(len(versions))), columns)


def test_a_partial_sample_is_as_stale_as_its_oldest_token() -> None:
    assert check_lag(rows([-1, -1, 5, 5, 6, 7], [-1, 7]), STEP, K) == 2
    assert check_lag(rows([-1, 6, 7]), STEP, K) == 1


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4))
def test_one_token_outside_the_bound_is_enough(versions: list[list[int]]) -> None:
    lags = [STEP - version for row in versions for version in row]
    if all(0 <= lag <= K for lag in lags):
        assert check_lag(rows(*versions), STEP, K) == max(lags)
    else:
        with pytest.raises(ValueError, match="max_staleness = 2 allows 0 to 2"):
            check_lag(rows(*versions), STEP, K)
