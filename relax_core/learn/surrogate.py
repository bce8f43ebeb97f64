# SPDX-License-Identifier: Apache-2.0
"""The clipped surrogate of PPO (arXiv 1707.06347, eq. 7) as a loss to minimise, with separate bounds and dual clip."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Tensor:
    """`-min(ratio A, clip(ratio, 1 - low, 1 + high) A)`; `dual_clip` > 1 bounds it by `-c A` where A < 0."""
    inside = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, inside * advantages)
    if dual_clip:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """[tokens] bool: where the bound is active, so that the token has no gradient."""
    return ((ratio < 1 - clip_low) & (advantages < 0)) | ((ratio > 1 + clip_high) & (advantages > 0))
