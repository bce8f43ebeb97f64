# SPDX-License-Identifier: Apache-2.0
"""The bound on staleness, asserted where it matters: on the rows a trainer is about to train. No torch.

`lag(token)` is the version at the start of the step that trains it minus the version that sampled it,
over tokens with `loss_mask = 1`.
"""

from __future__ import annotations

import numpy as np

from relax_core.api.batch import RowBatch


def token_lags(rows: RowBatch, step: int) -> np.ndarray:
    """[trained tokens] lags, rows one after another."""
    trained = rows.columns["loss_mask"].values.astype(bool)
    versions = rows.columns["weight_versions"].values[trained].astype(np.int64)
    lags: np.ndarray = step - versions
    return lags


def check_lag(rows: RowBatch, step: int, max_staleness: int) -> int:
    """The largest lag. Raises ValueError naming the first row outside `0 <= lag <= max_staleness`; -1 is unbounded."""
    lags = token_lags(rows, step)
    if not len(lags):
        return 0
    bound = max_staleness if max_staleness >= 0 else int(lags.max())
    wrong = (lags < 0) | (lags > bound)
    if wrong.any():
        raise ValueError(_sentence(rows, step, max_staleness, int(np.argmax(wrong))))
    return int(lags.max())


def _sentence(rows: RowBatch, step: int, max_staleness: int, trained_token: int) -> str:
    mask = rows.columns["loss_mask"]
    token = int(np.flatnonzero(mask.values)[trained_token])
    row = int(np.searchsorted(mask.offsets(), token, side="right")) - 1
    version = int(rows.columns["weight_versions"].values[token])
    return (
        f"weight_versions of row {tuple(rows.ids[row])}: got version {version} in a step that starts at version {step}, "
        f"lag {step - version}; max_staleness = {max_staleness} allows 0 to {max_staleness}"
    )
