# SPDX-License-Identifier: Apache-2.0
"""Parts of a loss: surrogate objectives, the critic's loss, preferences of pairs, and divergences between policies.

All losses are to be minimised. `ratio` is the policy's probability over the anchor's. Advantages come from
`advantages`; `counts` aggregates the values.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from relax_core.api.algorithm import Groups
from relax_core.learn.counts import MAX_LOG_RATIO

TINY = 1e-8
"""Least probability of all tokens but the sampled one; keeps the divergence finite if this token is certain."""


def reinforce(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return `-A log p`, [tokens] (Williams 1992)."""
    return -advantages * log_probs


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Tensor:
    """Return `-min(ratio A, clip(ratio, 1 - low, 1 + high) A)`, [tokens] (PPO, arXiv 1707.06347, eq. 7).

    A `dual_clip` c > 1 bounds the loss by `-c A` for tokens with A < 0 (Ye et al., arXiv 1912.09729).
    """
    if dual_clip:
        ratio = torch.minimum(ratio, torch.full_like(ratio, torch.inf).masked_fill(advantages < 0, dual_clip))
    inside = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, inside * advantages)


def capped(ratio: Tensor, cap: float) -> Tensor:
    """Return `min(ratio, cap)`, [tokens]; beyond the cap the gradient is that of `cap log p`, not 0."""
    return ratio * (cap / ratio.detach()).clamp(max=1.0)


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> Tensor:
    """Return bool [tokens]: True if a bound of `clipped_surrogate` is active, so that the token has no gradient."""
    outside = ((ratio < 1 - clip_low) & (advantages < 0)) | ((ratio > 1 + clip_high) & (advantages > 0))
    return outside | ((ratio > dual_clip) & (advantages < 0)) if dual_clip else outside


def clipped_weight(log_probs: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return `-sg(clip(ratio, 1 - low, 1 + high)) A log p`, [tokens] (CISPO).

    The weight is bounded, and every token keeps a gradient. Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * log_probs


def soft_gate(ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float) -> Tensor:
    """Return `-4 / tau sigmoid(tau (ratio - 1)) A`, [tokens], with tau by the sign of A (SAPO, arXiv 2511.20347).

    The slope of the objective is A at ratio 1 and fades on both sides.
    """
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages


def binary_divergence(log_probs: Tensor, anchor: Tensor, kind: str = "tv") -> Tensor:
    """Return the divergence of policy and anchor over two outcomes, this token or any different token, [tokens].

    `kind` is `tv`, the total variation `|q - p|`, or `kl`, KL(anchor || policy). Both are lower bounds of the
    divergence over all tokens (DPPO, arXiv 2602.04879). The result has no gradient.
    """
    p, q = log_probs.detach().exp(), anchor.exp()
    if kind == "tv":
        return (q - p).abs()
    rest_p, rest_q = (1 - p).clamp(min=TINY), (1 - q).clamp(min=TINY)
    return q * (anchor - log_probs.detach()) + rest_q * (rest_q / rest_p).log()


def moves_away(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return bool [tokens]: True if a step for this token would move the policy further from the anchor."""
    return ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return `max((V - R)^2, (clamp(V, V_old - c, V_old + c) - R)^2)`, [tokens], and where the bound decides (bool).

    c = 0 means no bound. Implementations of PPO have this bound, but the paper does not (arXiv 1707.06347).
    """
    error = (values - returns).square()
    if clip == 0:
        return error, torch.zeros_like(values, dtype=torch.bool)
    bounded = (values.clamp(old - clip, old + clip) - returns).square()
    return torch.maximum(error, bounded), bounded > error


def preference(margin: Tensor, smoothing: float = 0.0, *, robust: bool = False) -> Tensor:
    """Return the negative log-likelihood of each pair's order, [pairs], from the chosen sample's margin [pairs].

    `smoothing` is the share of pairs whose order is wrong. With `robust`, the mean loss over labels with that share of
    errors equals the mean loss over correct labels. Otherwise each label is smoothed by that share.
    """
    right, wrong = -logsigmoid(margin), -logsigmoid(-margin)
    if robust:
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (sum, count) metrics of pairs from their rewards [pairs]: both means, the margin, and the accuracy."""
    count = chosen.new_tensor(float(len(chosen)))
    return {
        "pairs/chosen": (chosen.sum(), count),
        "pairs/rejected": (rejected.sum(), count),
        "pairs/margin": ((chosen - rejected).sum(), count),
        "pairs/accuracy": ((chosen > rejected).to(chosen.dtype).sum(), count),
    }


# -- divergence from a teacher or a reference ------------------------------------------------------------------------
#
# Divergence of a student's distribution q from a teacher's p, over a support of tokens or from the sampled token:
#
#     reverse   KL(q || p)
#     forward   KL(p || q)
#     jsd       b KL(p || m) + (1 - b) KL(q || m),  m = b p + (1 - b) q      (generalised, GKD, arXiv 2306.13649, eq. 1)
#
# All three are f-divergences, sum q f(p / q). Let x = p / q of a token that q sampled. The gradient of the divergence
# by q is the mean of the gradient of `log q` times `f(x) - x f'(x)`. `sampled_credit` is minus this factor, up to a
# constant, which is a baseline.

Divergence = Literal["reverse", "forward", "jsd"]
LEAST = 1e-6
"""Least mass outside the support, so that nothing is divided by 0 if the support is the whole vocabulary."""


def with_rest(log_probs: Tensor) -> Tensor:
    """Append one outcome, any token outside the support, to log-probs: [tokens, k] -> [tokens, k + 1].

    The divergence of two results is at most the divergence over all tokens, and 0 only if both agree on the support.
    """
    rest = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=LEAST)
    return torch.cat([log_probs, rest.log()], dim=-1)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)


def token_divergence(kind: Divergence, student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Return the divergence for log-probs of student and teacher, [tokens, k] -> [tokens]; differentiable by both."""
    if kind == "reverse":
        return _kl(student, teacher)
    if kind == "forward":
        return _kl(teacher, student)
    middle = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, middle) + (1 - beta) * _kl(student, middle)


def sampled_credit(kind: Divergence, student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Return each sampled token's credit from its log-probs, [tokens]; 0 if student and teacher agree.

    A policy gradient with this credit is minus the gradient of the divergence.
    """
    ratio = (teacher - student).clamp(max=MAX_LOG_RATIO)
    if kind == "reverse":
        return ratio
    if kind == "forward":
        return ratio.expm1()
    return (1 - beta) * torch.logaddexp(ratio + math.log(beta), torch.full_like(ratio, math.log1p(-beta)))


def sampled_divergence(student: Tensor, teacher: Tensor, reverse: bool) -> Tensor:
    """Return values [tokens] whose gradient, averaged over the student's samples, is that of the divergence.

    With `reverse`, a value is half the square of the log ratio, otherwise (forward) k3.
    """
    ratio = (teacher - student).clamp(max=MAX_LOG_RATIO)
    return ratio.square() / 2 if reverse else ratio.expm1() - ratio


# Estimators of KL(policy || reference) from the policy's own samples (Schulman, 2020). k1 is unbiased and may be
# negative; k2 is biased with low variance; k3 is unbiased in value and never negative. As losses they differ in their
# gradients: k1's is 0 in expectation (so k1 belongs in the reward), k2's is that of the divergence, and k3's is not,
# which `kl_unbiased` corrects.


def kl_k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the estimate k1, `log p - log q`, [tokens]."""
    return log_probs - ref_log_probs


def kl_k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the estimate k2, `(log p - log q)^2 / 2`, [tokens]."""
    return (log_probs - ref_log_probs).square() / 2


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the estimate k3, `q/p - log(q/p) - 1`, [tokens].

    `log(q/p)` is at most `MAX_LOG_RATIO`, so that the exponential is finite; beyond, the gradient is 0.
    """
    log_ratio = (ref_log_probs - log_probs).clamp(max=MAX_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1


def kl_unbiased(log_probs: Tensor, ref_log_probs: Tensor, anchor: Tensor) -> Tensor:
    """Return `p/p_a (q/p - log(q/p) - 1)`, [tokens], where `p_a`, the anchor, is the policy that sampled.

    Value and gradient are unbiased (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, unbiased KL estimate), except where a
    log ratio is beyond `MAX_LOG_RATIO`.
    """
    weight = (log_probs - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return weight * kl_k3(log_probs, ref_log_probs)


def less_divergence(groups: Groups, coef: float) -> Tensor:
    """Return `r - coef * sum_t (log p - log q)` over a sample's trained tokens, [groups, samples].

    This is k1 in the reward (Ouyang et al., arXiv 2203.02155, eq. 2), with p the policy that sampled. The groups need
    the columns rollout_log_probs and ref_log_probs.
    """
    if groups.row_sample is None or groups.row_lengths is None:
        raise ValueError("less_divergence: got no token columns; name them in Algorithm.advantage_columns()")
    columns = groups.token_columns
    moved = kl_k1(columns["rollout_log_probs"], columns["ref_log_probs"]).to(groups.rewards.dtype)
    moved = torch.where(columns["loss_mask"].bool(), moved, 0.0)
    sample = groups.row_sample.repeat_interleave(groups.row_lengths)
    total = moved.new_zeros(groups.rewards.numel()).index_add(0, sample, moved)
    return torch.where(groups.valid, groups.rewards - coef * total.reshape(groups.rewards.shape), 0.0)
