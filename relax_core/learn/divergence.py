# SPDX-License-Identifier: Apache-2.0
"""How far a student's distribution q is from a teacher's p: over a support of tokens, or estimated from the sampled token.

    reverse   KL(q || p)
    forward   KL(p || q)
    jsd       b KL(p || m) + (1 - b) KL(q || m),  m = b p + (1 - b) q       (generalised, GKD, arXiv 2306.13649, eq. 1)

All three are f-divergences, sum q f(p / q). With x = p / q of a token that q sampled, the gradient by q of their mean is
that of `log q` times `f(x) - x f'(x)`: what `sampled_credit` is minus of, up to a constant, which is a baseline.

Estimators of KL(policy || reference) from the policy's own samples, [tokens] each (Schulman, 2020).

k1 is unbiased and may be negative; k2 is biased with low variance; k3 is unbiased in value and never negative. As a loss
their gradients differ: k1's is 0 in expectation (so it belongs into the reward), k2's is that of the divergence, k3's is
not, which `kl_unbiased` mends.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from relax_core.api.algorithm import Groups

Divergence = Literal["reverse", "forward", "jsd"]
LEAST = 1e-6
"""Of the mass outside the support: where it is all of the vocabulary, nothing is divided by 0."""
MOST = 20.0
"""Of a log ratio, before its exponential."""


def with_rest(log_probs: Tensor) -> Tensor:
    """[tokens, k] -> [tokens, k + 1]: one more outcome, any token outside the support. Of two distributions over it the
    divergence is never negative, at most that over all tokens, and 0 only where they agree on the support."""
    rest = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=LEAST)
    return torch.cat([log_probs, rest.log()], dim=-1)


def token_divergence(kind: Divergence, student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """[tokens, k] log-probs of both -> [tokens]; differentiable by both."""
    if kind == "reverse":
        return _kl(student, teacher)
    if kind == "forward":
        return _kl(teacher, student)
    middle = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, middle) + (1 - beta) * _kl(student, middle)


def sampled_credit(kind: Divergence, student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """[tokens] log-probs of a sampled token -> what it earns: in the policy gradient minus the gradient of the divergence.
    0 where both agree."""
    ratio = (teacher - student).clamp(max=MOST)
    if kind == "reverse":
        return ratio
    if kind == "forward":
        return ratio.expm1()
    return (1 - beta) * torch.logaddexp(ratio + math.log(beta), torch.full_like(ratio, math.log1p(-beta)))


def sampled_divergence(student: Tensor, teacher: Tensor, reverse: bool) -> Tensor:
    """[tokens], whose gradient is in the mean over the student's samples that of the divergence: half the square of the log
    ratio for `reverse`, k3 for `forward`."""
    ratio = (teacher - student).clamp(max=MOST)
    return ratio.square() / 2 if reverse else ratio.expm1() - ratio


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)


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
