# SPDX-License-Identifier: Apache-2.0
"""The loss of a critic's values. It credits nothing: what the values should have been comes from `returns.gae`."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """[tokens] `max((V - R)^2, (clamp(V, V_old - c, V_old + c) - R)^2)`, and where the bound decides (bool); c = 0: no
    bound. PPO's implementations have it (Schulman et al., arXiv 1707.06347, do not)."""
    error = (values - returns).square()
    if clip == 0:
        return error, torch.zeros_like(values, dtype=torch.bool)
    bounded = (values.clamp(old - clip, old + clip) - returns).square()
    return torch.maximum(error, bounded), bounded > error
