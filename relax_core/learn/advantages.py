# SPDX-License-Identifier: Apache-2.0
"""Advantages of samples within their group: rewards [groups, samples] in, the same shape out.

Only valid members count and get one; a group whose rewards are all equal, or with one valid member, is exactly 0
(rounding would otherwise give it a tiny gradient, and its rows a forward for nothing).
"""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPS = 1e-6
"""Keeps a nearly constant group finite; far below any spread of rewards that means something."""


def group_mean(rewards: Tensor, valid: Tensor) -> Tensor:
    """`r - mean(r)`."""
    centred = rewards - _mean(rewards, valid)
    return torch.where(valid & _spread(rewards, valid), centred, 0.0)


def group_mean_std(rewards: Tensor, valid: Tensor, eps: float = STD_EPS) -> Tensor:
    """`(r - mean(r)) / (std(r) + eps)` with the unbiased standard deviation."""
    centred = group_mean(rewards, valid)
    members = valid.sum(dim=1, keepdim=True)
    variance = centred.square().sum(dim=1, keepdim=True) / (members - 1).clamp(min=1)
    return centred / (variance.sqrt() + eps)


def _mean(rewards: Tensor, valid: Tensor) -> Tensor:
    total = torch.where(valid, rewards, 0.0).sum(dim=1, keepdim=True)
    return total / valid.sum(dim=1, keepdim=True).clamp(min=1)


def _spread(rewards: Tensor, valid: Tensor) -> Tensor:
    """[groups, 1]: whether two valid rewards of the group differ."""
    largest = torch.where(valid, rewards, -torch.inf).amax(dim=1, keepdim=True)
    smallest = torch.where(valid, rewards, torch.inf).amin(dim=1, keepdim=True)
    return largest > smallest
