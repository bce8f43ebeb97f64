# SPDX-License-Identifier: Apache-2.0
"""Soft Adaptive Policy Optimization (Gao et al., SAPO, arXiv 2511.20347).

    J = E[ 1/G sum_i 1/|y_i| sum_t f(r_it) A_i ],   f(r) = sigmoid(tau (r - 1)) 4 / tau,
    tau = tau_positive where A_i > 0, else tau_negative;   A_i = (R_i - mean(R)) / std(R)

The gate f replaces PPO's clipping. Its slope is 1 at ratio 1 and falls smoothly, faster for negative advantages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from relax_core import learn
from relax_core.api import LossBatch, PolicyOutputs
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class SAPOOptions(PolicyGradientOptions):
    """Options of SAPO; the defaults are the paper's, except `correction`."""

    tau_positive: float = Field(1.0, gt=0.0)
    """Steepness tau for tokens with a positive advantage; a larger tau shrinks the gradient faster off ratio 1."""
    tau_negative: float = Field(1.05, gt=0.0)
    """Steepness tau for tokens with a negative or zero advantage; larger, because their gradient raises many unlikely
    tokens."""
    aggregation: Aggregation = "trajectory"
    """Aggregation of the tokens' losses. `trajectory`: mean over the tokens of all rows of a sample, then over samples.
    `sequence`, `token`, `sum` and `fixed` mean the same as in `grpo`."""


class SAPO(PolicyGradient[SAPOOptions]):
    """GRPO with a soft gate on each token's ratio instead of clipping."""

    paper = "arXiv 2511.20347"

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the gated surrogate of each token."""
        ratio = learn.log_ratio(batch, policy.log_probs, anchor).exp()
        return Surrogate(learn.soft_gate(ratio, batch.advantages, self.options.tau_positive, self.options.tau_negative))
