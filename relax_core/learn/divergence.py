# SPDX-License-Identifier: Apache-2.0
"""How far a student's distribution q is from a teacher's p: over a support of tokens, or estimated from the sampled token.

    reverse   KL(q || p)
    forward   KL(p || q)
    jsd       b KL(p || m) + (1 - b) KL(q || m),  m = b p + (1 - b) q       (generalised, GKD, arXiv 2306.13649, eq. 1)

All three are f-divergences, sum q f(p / q). With x = p / q of a token that q sampled, the gradient by q of their mean is
that of `log q` times `f(x) - x f'(x)`: what `sampled_credit` is minus of, up to a constant, which is a baseline.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

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
