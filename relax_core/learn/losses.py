# SPDX-License-Identifier: Apache-2.0
"""Parts of a loss: surrogate objectives, the critic's loss, preferences of pairs, and divergences between policies.

All are to be minimised. `ratio` is that of policy and anchor; advantages come from `advantages`, aggregation is apart.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from relax_core.api.algorithm import Groups

TINY = 1e-8
"""Least probability of all other tokens together: keeps the divergence of a certain token finite."""


def reinforce(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """`-A log p`, [tokens] (Williams 1992)."""
    return -advantages * log_probs


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Tensor:
    """[tokens] `-min(ratio A, clip(ratio, 1 - low, 1 + high) A)` (PPO, arXiv 1707.06347, eq. 7); `dual_clip` > 1 bounds it by
    `-c A` where A < 0 (Ye et al., arXiv 1912.09729)."""
    inside = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, inside * advantages)
    if dual_clip:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> Tensor:
    """[tokens] bool: where a bound of `clipped_surrogate` is active, so that the token has no gradient."""
    outside = ((ratio < 1 - clip_low) & (advantages < 0)) | ((ratio > 1 + clip_high) & (advantages > 0))
    return outside | ((ratio > dual_clip) & (advantages < 0)) if dual_clip else outside


def clipped_weight(log_probs: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """[tokens] `-sg(clip(ratio, 1 - low, 1 + high)) A log p`: the weight is bounded, every token keeps a gradient (CISPO,
    MiniMax-M1, arXiv 2506.13585, eq. 4 and 5)."""
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * log_probs


def soft_gate(ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float) -> Tensor:
    """[tokens] `-4 / tau sigmoid(tau (ratio - 1)) A`, tau by the sign of A: its slope is A at ratio 1 and fades on both sides
    (SAPO, arXiv 2511.20347)."""
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages


def binary_divergence(log_probs: Tensor, anchor: Tensor, kind: str = "tv") -> Tensor:
    """[tokens] divergence of the two-point distributions (this token, any other) from the anchor's: total variation
    `|q - p|`, or `kl`(anchor || policy); a lower bound of the whole distributions' (DPPO, arXiv 2602.04879). No gradient."""
    p, q = log_probs.detach().exp(), anchor.exp()
    if kind == "tv":
        return (q - p).abs()
    rest_p, rest_q = (1 - p).clamp(min=TINY), (1 - q).clamp(min=TINY)
    return q * (anchor - log_probs.detach()) + rest_q * (rest_q / rest_p).log()


def moves_away(ratio: Tensor, advantages: Tensor) -> Tensor:
    """[tokens] bool: a step for this token would take the policy further from the anchor."""
    return ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """[tokens] `max((V - R)^2, (clamp(V, V_old - c, V_old + c) - R)^2)`, and where the bound decides (bool); c = 0: no
    bound. PPO's implementations have it (Schulman et al., arXiv 1707.06347, do not)."""
    error = (values - returns).square()
    if clip == 0:
        return error, torch.zeros_like(values, dtype=torch.bool)
    bounded = (values.clamp(old - clip, old + clip) - returns).square()
    return torch.maximum(error, bounded), bounded > error


def preference(margin: Tensor, smoothing: float = 0.0, *, robust: bool = False) -> Tensor:
    """[pairs] -> [pairs]: minus the log-likelihood of the order, given by how far the chosen one is ahead.

    `smoothing`: the share of pairs whose order is wrong. `robust` takes it out of the loss, so that its mean over wrong
    labels is that over right ones; otherwise the loss is what such labels say.
    """
    right, wrong = -logsigmoid(margin), -logsigmoid(-margin)
    if robust:
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(sum, count) over pairs of their rewards [pairs]: mean of each, difference, and how often the chosen one is ahead."""
    count = chosen.new_tensor(float(len(chosen)))
    return {
        "pairs/chosen": (chosen.sum(), count),
        "pairs/rejected": (rejected.sum(), count),
        "pairs/margin": ((chosen - rejected).sum(), count),
        "pairs/accuracy": ((chosen > rejected).to(chosen.dtype).sum(), count),
    }


# -- divergence from a teacher or a reference ------------------------------------------------------------------------
#
# How far a student's distribution q is from a teacher's p, over a support of tokens or estimated from the sampled token:
#
#     reverse   KL(q || p)
#     forward   KL(p || q)
#     jsd       b KL(p || m) + (1 - b) KL(q || m),  m = b p + (1 - b) q       (generalised, GKD, arXiv 2306.13649, eq. 1)
#
# All three are f-divergences, sum q f(p / q). With x = p / q of a token that q sampled, the gradient by q of their mean is
# that of `log q` times `f(x) - x f'(x)`: what `sampled_credit` is minus of, up to a constant, which is a baseline.

Divergence = Literal["reverse", "forward", "jsd"]
LEAST = 1e-6
"""Least mass outside the support: where the support is all of the vocabulary, nothing is divided by 0."""
MOST = 20.0
"""Largest log ratio that is exponentiated."""


def with_rest(log_probs: Tensor) -> Tensor:
    """[tokens, k] -> [tokens, k + 1]: one more outcome, any token outside the support. Of two distributions over it the
    divergence is never negative, at most that over all tokens, and 0 only where they agree on the support."""
    rest = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=LEAST)
    return torch.cat([log_probs, rest.log()], dim=-1)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)


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


# Estimators of KL(policy || reference) from the policy's own samples (Schulman, 2020). k1 is unbiased and may be negative;
# k2 is biased with low variance; k3 is unbiased in value and never negative. As a loss their gradients differ: k1's is 0 in
# expectation (so it belongs into the reward), k2's is that of the divergence, k3's is not, which `kl_unbiased` mends.


def kl_k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """[tokens] `log p - log q`: k1."""
    return log_probs - ref_log_probs


def kl_k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """[tokens] `(log p - log q)^2 / 2`: k2."""
    return (log_probs - ref_log_probs).square() / 2


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """[tokens] `q/p - log(q/p) - 1`: k3."""
    log_ratio = ref_log_probs - log_probs
    return log_ratio.exp() - log_ratio - 1


def kl_unbiased(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """[tokens] `p/p_old (q/p - log(q/p) - 1)`: the value and the gradient of the divergence (DeepSeek-V3.2, arXiv 2512.02556,
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
