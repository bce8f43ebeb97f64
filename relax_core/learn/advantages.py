# SPDX-License-Identifier: Apache-2.0
"""Advantages of samples within their group: rewards [groups, samples] in, the same shape out.

Only valid members count and get one; a group whose rewards are all equal, or with one valid member, is exactly 0
(rounding would otherwise give it a tiny gradient, and its rows a forward for nothing). Credit of tokens is in `returns`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

STD_EPS = 1e-6
"""Keeps a nearly constant group finite; far below any spread of rewards that means something."""


def group_mean(rewards: Tensor, valid: Tensor) -> Tensor:
    """`r - mean(r)` (Dr.GRPO)."""
    centred = rewards - _mean(rewards, valid)
    return torch.where(valid & _spread(rewards, valid), centred, 0.0)


def group_mean_std(rewards: Tensor, valid: Tensor, eps: float = STD_EPS) -> Tensor:
    """`(r - mean(r)) / (std(r) + eps)` with the unbiased standard deviation (GRPO)."""
    centred = group_mean(rewards, valid)
    members = valid.sum(dim=1, keepdim=True)
    variance = centred.square().sum(dim=1, keepdim=True) / (members - 1).clamp(min=1)
    return centred / (variance.sqrt() + eps)


def leave_one_out(rewards: Tensor, valid: Tensor) -> Tensor:
    """`r_i` minus the mean of the others, which is `n / (n - 1) (r_i - mean(r))` (RLOO)."""
    members = valid.sum(dim=1, keepdim=True)
    return group_mean(rewards, valid) * members / (members - 1).clamp(min=1)


def group_mean_relative(rewards: Tensor, valid: Tensor, eps: float = STD_EPS) -> Tensor:
    """`(r - mean(r)) / (mean(r) + eps)` for rewards of 0 and above; a group whose mean is not above 0 has none (MaxRL)."""
    mean = _mean(rewards, valid)
    return torch.where(mean > 0, group_mean(rewards, valid) / (mean.clamp(min=0) + eps), 0.0)


def length_weighted_baseline(rewards: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """`r - sum(l r) / sum(l)`: the baseline of least variance where a gradient's size grows with length (OPO)."""
    weights = torch.where(valid, lengths.to(rewards.dtype), 0.0)
    baseline = (weights * rewards).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(valid & _spread(rewards, valid), rewards - baseline, 0.0)


def per_reward(
    parts: Mapping[str, Tensor], valid: Tensor, weights: Mapping[str, float], eps: float = STD_EPS
) -> Tensor:
    """`sum_k w_k (r_k - mean(r_k)) / std(r_k)`: each reward normalised in its group before they are added (GDPO)."""
    credited = [group_mean_std(part, valid, eps) * weights.get(name, 1.0) for name, part in sorted(parts.items())]
    return torch.stack(credited).sum(dim=0)


def whiten(values: Tensor, valid: Tensor, eps: float = STD_EPS) -> Tensor:
    """`(a - mean(a)) / (std(a) + eps)` over everything that is valid, whatever the shape; 0 where all are equal."""
    chosen = values[valid]
    if len(chosen) < 2 or bool((chosen == chosen[0]).all()):
        return torch.zeros_like(values)
    return torch.where(valid, (values - chosen.mean()) / (chosen.std() + eps), 0.0)


def beyond_baseline(rewards: Tensor, valid: Tensor, baseline: Tensor | None) -> Tensor:
    """`R_i - b`, b [groups]; 0 in a group whose baseline is NaN or missing."""
    if baseline is None:
        return torch.zeros_like(rewards)
    known = valid & torch.isfinite(baseline)[:, None]
    return torch.where(known, rewards - torch.nan_to_num(baseline)[:, None], 0.0)


def informative(rewards: Tensor, valid: Tensor) -> Tensor:
    """[groups] bool: two valid rewards of the group differ."""
    return _spread(rewards, valid).squeeze(1)


def _mean(rewards: Tensor, valid: Tensor) -> Tensor:
    total = torch.where(valid, rewards, 0.0).sum(dim=1, keepdim=True)
    return total / valid.sum(dim=1, keepdim=True).clamp(min=1)


def _spread(rewards: Tensor, valid: Tensor) -> Tensor:
    """[groups, 1]: whether two valid rewards of the group differ."""
    largest = torch.where(valid, rewards, -torch.inf).amax(dim=1, keepdim=True)
    smallest = torch.where(valid, rewards, torch.inf).amin(dim=1, keepdim=True)
    return largest > smallest
