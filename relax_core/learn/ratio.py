# SPDX-License-Identifier: Apache-2.0
"""How far the policy has moved from the one a row was sampled under, by token or by whole row."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from relax_core.api.algorithm import LossBatch

Level = Literal["token", "sequence", "geometric"]


def log_ratio(batch: LossBatch, log_probs: Tensor, old_log_probs: Tensor, level: Level = "token") -> Tensor:
    """[tokens] `log(p / p_old)`: of the token, of its row (the sum), or the row's geometric mean (GSPO)."""
    moved = log_probs - old_log_probs
    if level == "token":
        return moved
    over_row = batch.sequence_sum(moved) if level == "sequence" else batch.sequence_mean(moved)
    return batch.broadcast(over_row)
