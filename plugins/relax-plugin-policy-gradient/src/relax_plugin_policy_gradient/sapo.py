# SPDX-License-Identifier: Apache-2.0
"""Soft Adaptive Policy Optimization (Gao et al., SAPO, arXiv 2511.20347).

    J = E[ 1/G sum_i 1/|y_i| sum_t f(r_it) A_i ],   f(r) = sigmoid(tau (r - 1)) 4 / tau,
    tau = tau_positive where A_i > 0, else tau_negative;   A_i = (R_i - mean(R)) / std(R)

In place of a bound, a gate whose slope is 1 at ratio 1 and fades smoothly, sooner for negative advantages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class SAPOOptions(PolicyGradientOptions):
    """The paper's setting, apart from the correction."""

    tau_positive: float = Field(1.0, gt=0.0)
    """How fast the gate closes for tokens with a positive advantage."""
    tau_negative: float = Field(1.05, gt=0.0)
    """How fast it closes for the others, whose gradient spreads over many unlikely tokens."""
    aggregation: Aggregation = "sequence"
    """As in every algorithm: `sequence`, `token`, `sum`, `fixed` or `trajectory`."""


class SAPO(PolicyGradient[SAPOOptions]):
    """A soft gate on each token's ratio."""

    paper = "arXiv 2511.20347"
    min_group_size = 2

    def credit(self, groups: Groups) -> Tensor:
        """Normalised within the group."""
        return learn.group_mean_std(groups.rewards, groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The gate of each token."""
        ratio = learn.log_ratio(batch, policy.log_probs, anchor).exp()
        return Surrogate(learn.soft_gate(ratio, batch.advantages, self.options.tau_positive, self.options.tau_negative))
