# SPDX-License-Identifier: Apache-2.0
"""Divergence Proximal Policy Optimization (Qi et al., DPPO, arXiv 2602.04879), with the binary approximations.

    J = E_behaviour[ M_t r_t A_t ],   r_t = p_t / behaviour_t
    M_t = 0 if D_t > delta and the update moves away ((A_t > 0 and r_t > 1) or (A_t < 0 and r_t < 1)), else 1
    D_t = |p_t - behaviour_t| (tv), or the kl of the two-point distributions (this token, all remaining tokens)

The trust region bounds the change of probabilities, around the policy that sampled. A bound on their ratio would be
volatile for rare tokens and too lenient for likely tokens. As in the authors' code, the weight r_t is at most 20. This
file omits the top-k approximations, which need distributions that engines do not return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from relax_core import learn
from relax_core.api import LossBatch, PolicyOutputs
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class DPPOOptions(PolicyGradientOptions):
    """Options of DPPO; the defaults are the paper's."""

    divergence: Literal["tv", "kl"] = "tv"
    """Divergence D_t: total variation (`tv`) or Kullback-Leibler divergence (`kl`) of the two-point distributions."""
    delta: float = Field(0.15, gt=0.0)
    """Maximum D_t at which a token's gradient may still increase D_t; the paper's value for `kl` is 0.05."""
    ratio_cap: float = Field(20.0, gt=1.0)
    """Maximum ratio r_t as a weight. A token with a larger ratio keeps a gradient, of this weight."""
    correction: Literal["truncate", "mask", "reject", "behaviour", "none"] = "behaviour"
    """Policy that ratio and trust region refer to. `behaviour` (the paper): the policy that sampled. All remaining
    values: the policy at the step's start. `truncate`, `mask` and `reject` then also weigh tokens by this policy's ratio
    to the policy that sampled; `none` does not."""


class DPPO(PolicyGradient[DPPOOptions]):
    """A policy gradient without the tokens whose probability has already moved too far."""

    paper = "arXiv 2602.04879"

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the masked, unclipped surrogate of each token."""
        options, ratio = self.options, learn.log_ratio(batch, policy.log_probs, anchor).exp()
        divergence = learn.binary_divergence(policy.log_probs, anchor, options.divergence)
        outside = learn.moves_away(ratio.detach(), batch.advantages) & (divergence > options.delta)
        return Surrogate(
            -(learn.capped(ratio, options.ratio_cap) * batch.advantages).masked_fill(outside, 0.0), outside
        )
