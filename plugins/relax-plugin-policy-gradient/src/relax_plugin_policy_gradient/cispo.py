# SPDX-License-Identifier: Apache-2.0
"""Clipped IS-weight Policy Optimization (MiniMax-M1, arXiv 2506.13585, section 3.1).

    J = E[ 1/(sum_i |o_i|) sum_i sum_t sg(w_it) A_i log p_it ]                                       (eq. 4)
    w_it = clip(r_it, 1 - e_low, 1 + e_high),   A_i = (R_i - mean(R)) / std(R)                       (eq. 5)

Only the importance weight is clipped. So rare tokens keep their gradient, which PPO's clipping would drop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from relax_core import learn
from relax_core.api import LossBatch, PolicyOutputs
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class CISPOOptions(PolicyGradientOptions):
    """Options of CISPO: no lower bound, as in the paper. The upper bound of 5 is from ScaleRL (arXiv 2510.13786)."""

    clip_low: float = Field(1.0, gt=0.0, le=1.0)
    """Distance of the weight's lower bound below 1: the bound is 1 - clip_low. 1: no lower bound."""
    clip_high: float = Field(4.0, gt=0.0)
    """Distance of the weight's upper bound above 1: the bound is 1 + clip_high."""


class CISPO(PolicyGradient[CISPOOptions]):
    """REINFORCE with a bounded importance weight."""

    paper = "arXiv 2506.13585"

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the term of eq. 4 for each token."""
        options, ratio = self.options, learn.log_ratio(batch, policy.log_probs.detach(), anchor).exp()
        values = learn.clipped_weight(policy.log_probs, ratio, batch.advantages, options.clip_low, options.clip_high)
        return Surrogate(values, (ratio < 1 - options.clip_low) | (ratio > 1 + options.clip_high))
