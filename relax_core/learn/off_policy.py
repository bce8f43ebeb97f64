# SPDX-License-Identifier: Apache-2.0
"""Corrections for samples that another policy drew: an older version, or an engine that rounds otherwise.

Three policies: `behaviour` sampled (rollout_log_probs), `proximal` starts the step (old_log_probs), and the one that is
trained. The decoupled objective (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, section 5) is

    E_behaviour[ w * min(r A, clip(r) A) ],   w = proximal / behaviour,   r = policy / proximal

and everything here is a form of w: [tokens], without gradient. Nothing here changes a denominator: a token that is left
out still counts in the mean, as in the papers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_core.api.algorithm import LossBatch
from relax_core.learn.ratio import Level, log_ratio


def importance_ratio(
    batch: LossBatch, old_log_probs: Tensor, rollout_log_probs: Tensor, level: Level = "token"
) -> Tensor:
    """`proximal / behaviour` of the token, of its row (the product), or the geometric mean over its row."""
    return log_ratio(batch, old_log_probs.detach(), rollout_log_probs.detach(), level).exp()


def truncate(ratio: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: `min(w, C)` (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"; Espeholt et al., arXiv 1802.01561, section 4.1, for the truncation itself)."""
    return ratio.clamp(max=cap)


def mask_outside(ratio: Tensor, floor: float, cap: float) -> Tensor:
    """Masked importance sampling: `w` where `floor <= w <= cap`, else 0. By token with 0.5 and 5 it is IcePop (Ring-1T,
    arXiv 2510.18855); by row or geometric mean, the MIS of Liu, Li et al. 2025, "When speed kills stability"."""
    return torch.where(within(ratio, floor, cap), ratio, 0.0)


def within(ratio: Tensor, floor: float, cap: float) -> Tensor:
    """[tokens] bool, rejection sampling: whether the sample is near enough to be learnt from, unweighted."""
    return (ratio >= floor) & (ratio <= cap)


def importance_weight(
    batch: LossBatch,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    level: Level = "token",
    truncate_at: float = 2.0,
    mask_below: float = 0.0,
    masks: bool = False,
) -> Tensor:
    """The weight of each token: truncated at `truncate_at`, or with `masks` 0 outside `mask_below .. truncate_at`.

    It is 1 where the engine is the trainer and nothing lags, apart from rounding.
    """
    ratio = importance_ratio(batch, old_log_probs, rollout_log_probs, level)
    return mask_outside(ratio, mask_below, truncate_at) if masks else truncate(ratio, truncate_at)


def off_policy_sequence_mask(
    batch: LossBatch, log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """[tokens] bool, False for rows to leave out: `A < 0` and `mean_t log(behaviour / policy) > delta` (DeepSeek-V3.2,
    arXiv 2512.02556, section 3.1, off-policy sequence masking)."""
    apart = batch.broadcast(batch.sequence_mean(rollout_log_probs - log_probs.detach()))
    return (advantages >= 0) | (apart <= delta)


def second_moment_mask(log_ratio: Tensor, chosen: Tensor, bound: float) -> Tensor:
    """[tokens] bool: all but those of `chosen` with the largest (log r)^2, as few as bring the mean of the others of `chosen`
    to `bound` (M2PO, arXiv 2510.01161). Equal ones go together, so that their order decides nothing."""
    squares = log_ratio.square()
    ordered = squares[chosen].sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    fitting = int((means <= bound).sum())
    if fitting == len(ordered):
        return torch.ones_like(chosen)
    return ~chosen | (squares < ordered[fitting])
