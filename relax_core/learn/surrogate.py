# SPDX-License-Identifier: Apache-2.0
"""Surrogate objectives as losses to minimise, [tokens] each; `ratio` is that of policy and anchor.

The loss of a critic's values. It credits nothing: what the values should have been comes from `returns.gae`.

What is learnt from pairs: the logistic likelihood that the chosen one wins, and how pairs are told of.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def reinforce(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """`-A log p` (Williams 1992)."""
    return -advantages * log_probs


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Tensor:
    """`-min(ratio A, clip(ratio, 1 - low, 1 + high) A)` (PPO, arXiv 1707.06347, eq. 7); `dual_clip` > 1 bounds it by
    `-c A` where A < 0 (Ye et al., arXiv 1912.09729)."""
    inside = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, inside * advantages)
    if dual_clip:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """[tokens] bool: where the bound is active, so that the token has no gradient."""
    return ((ratio < 1 - clip_low) & (advantages < 0)) | ((ratio > 1 + clip_high) & (advantages > 0))


def clipped_weight(log_probs: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """`-sg(clip(ratio, 1 - low, 1 + high)) A log p`: the weight is bounded, every token keeps a gradient (CISPO, MiniMax-M1,
    arXiv 2506.13585, eq. 4 and 5)."""
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * log_probs


def soft_gate(ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float) -> Tensor:
    """`-4 / tau sigmoid(tau (ratio - 1)) A`, tau by the sign of A: its slope is A at ratio 1 and fades on both sides (SAPO,
    arXiv 2511.20347)."""
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages


def binary_divergence(log_probs: Tensor, anchor: Tensor, kind: str = "tv") -> Tensor:
    """Divergence of the two-point distributions (this token, any other) from the anchor's: total variation `|q - p|`, or
    `kl`(anchor || policy); a lower bound of the whole distributions' (DPPO, arXiv 2602.04879). Without gradient."""
    p, q = log_probs.detach().exp(), anchor.exp()
    if kind == "tv":
        return (q - p).abs()
    rest_p, rest_q = (1 - p).clamp(min=TINY), (1 - q).clamp(min=TINY)
    return q * (anchor - log_probs.detach()) + rest_q * (rest_q / rest_p).log()


def moves_away(ratio: Tensor, advantages: Tensor) -> Tensor:
    """[tokens] bool: a step for this token would take the policy further from the anchor."""
    return ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))


TINY = 1e-8
"""Least probability of all other tokens together: keeps the divergence of a certain token finite."""


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
