# SPDX-License-Identifier: Apache-2.0
"""Estimators of KL(policy || reference) from the policy's own samples, [tokens] each (Schulman, 2020).

k1 is unbiased and may be negative; k2 is biased with low variance; k3 is unbiased in value and never negative. As a loss
their gradients differ: k1's is 0 in expectation (so it belongs into the reward), k2's is that of the divergence, k3's is
not, which `kl_unbiased` mends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_core.api.algorithm import Groups


def kl_k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`log p - log q`."""
    return log_probs - ref_log_probs


def kl_k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`(log p - log q)^2 / 2`."""
    return (log_probs - ref_log_probs).square() / 2


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`q/p - log(q/p) - 1`."""
    log_ratio = ref_log_probs - log_probs
    return log_ratio.exp() - log_ratio - 1


def kl_unbiased(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """`p/p_old (q/p - log(q/p) - 1)`: the value and the gradient of the divergence (DeepSeek-V3.2, arXiv 2512.02556,
    section 3.1, unbiased KL estimate); `p_old` sampled."""
    return (log_probs - old_log_probs).exp() * kl_k3(log_probs, ref_log_probs)


def less_divergence(groups: Groups, coef: float) -> Tensor:
    """[groups, samples] `r - coef * sum_t (log p - log q)` over a sample's trained tokens (Ouyang et al., arXiv 2203.02155,
    eq. 2): k1 in the reward, of the policy that sampled. It needs rollout_log_probs and ref_log_probs."""
    if groups.row_sample is None or groups.row_lengths is None:
        raise ValueError("less_divergence: the groups have no token columns")
    columns = groups.token_columns
    moved = kl_k1(columns["rollout_log_probs"], columns["ref_log_probs"]).to(groups.rewards.dtype)
    moved = torch.where(columns["loss_mask"].bool(), moved, 0.0)
    sample = groups.row_sample.repeat_interleave(groups.row_lengths)
    total = moved.new_zeros(groups.rewards.numel()).index_add(0, sample, moved)
    return torch.where(groups.valid, groups.rewards - coef * total.reshape(groups.rewards.shape), 0.0)
