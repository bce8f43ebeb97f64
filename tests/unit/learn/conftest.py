# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from relax_core.api import Ragged, RowBatch, RowId


@pytest.fixture
def rows():
    """Two groups of two samples; the second sample of group 4 has two rows. Row lengths 3, 2, 2, 4, 3."""
    lengths = np.array([3, 2, 2, 4, 3])

    def column(values, dtype):
        return Ragged(np.array(values, dtype), lengths)

    return RowBatch(
        (RowId(4, 0, 0, 0), RowId(4, 1, 0, 0), RowId(4, 1, 0, 1), RowId(9, 0, 0, 0), RowId(9, 1, 1, 0)),
        {
            "tokens": column(range(14), np.int32),
            "loss_mask": column([0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 1], np.uint8),
            "advantages": column([0, 1, 1, 5, 0, 0, 2, 0, 0, 7, 0, 0, 0, 3], np.float32),
            "weight_versions": column([-1, 6, 7, -1, 7, -1, 7, -1, 6, -1, 7, -1, -1, 7], np.int32),
            "rewards": Ragged(np.array([1, 0, 0, 1, 0], np.float32), np.ones(5, np.int64)),
        },
    )
