# SPDX-License-Identifier: Apache-2.0
"""Divergence Proximal Policy Optimization (Qi et al., DPPO, arXiv 2602.04879), with the binary approximations.

    J = E_behaviour[ M_t r_t A_t ],   r_t = p_t / behaviour_t
    M_t = 0 where the step leads away ((A_t > 0 and r_t > 1) or (A_t < 0 and r_t < 1)) and D_t > delta, else 1
    D_t = |p_t - behaviour_t| (tv), or the kl of the two-point distributions (this token, any other)

The trust region is one of probabilities, not of their ratio, which is volatile for rare tokens and lenient with likely
ones; it is taken to the policy that sampled. The authors' code also bounds the ratio, at 20,
which is left out. The top-k approximations need distributions that engines do not give.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class DPPOOptions(PolicyGradientOptions):
    """The paper's setting."""

    divergence: Literal["tv", "kl"] = "tv"
    """Total variation or Kullback-Leibler, of the two-point distributions."""
    delta: float = Field(0.15, gt=0.0)
    """Largest divergence at which a step may lead away; 0.05 is the paper's for `kl`."""
    correction: Literal["truncate", "mask", "reject", "behaviour", "none"] = "behaviour"
    """The ratio and the trust region are taken to the policy that sampled (`behaviour`, the paper); the others take them to
    the step's start, and weigh by the step's start over the policy that sampled (`truncate`, `mask`, `reject`) or do
    not (`none`)."""


class DPPO(PolicyGradient[DPPOOptions]):
    """Leaves out the tokens whose probability has moved too far already."""

    paper = "arXiv 2602.04879"
    min_group_size = 2

    def credit(self, groups: Groups) -> Tensor:
        """Normalised within the group, as in GRPO."""
        return learn.group_mean_std(groups.rewards, groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The masked, unclipped surrogate of each token."""
        options, ratio = self.options, learn.log_ratio(batch, policy.log_probs, anchor).exp()
        divergence = learn.binary_divergence(policy.log_probs, anchor, options.divergence)
        outside = learn.moves_away(ratio.detach(), batch.advantages) & (divergence > options.delta)
        return Surrogate(-(ratio * batch.advantages).masked_fill(outside, 0.0), outside)
