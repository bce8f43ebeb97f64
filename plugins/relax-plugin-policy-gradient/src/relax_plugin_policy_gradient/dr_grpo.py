# SPDX-License-Identifier: Apache-2.0
"""Dr.GRPO, GRPO done right (Liu et al., arXiv 2503.20783, section 3.2).

    J = E[ 1/G sum_i sum_t min(r_it A_i, clip(r_it, 1 - e, 1 + e) A_i) ],   A_i = R_i - mean(R)

Two biases of GRPO are gone: that by length (no 1/|o_i|) and that by difficulty (no 1/std). The authors' code divides by
the generation budget, a constant: `aggregation = "fixed"` with `fixed_length` is that.
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


class DrGRPOOptions(PolicyGradientOptions):
    """The paper's setting, apart from the correction."""

    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0.0)
    """Upper bound of the ratio is 1 + clip_high."""
    aggregation: Aggregation = "sum"
    """As in every algorithm: `sequence`, `token`, `sum`, `fixed` or `trajectory`."""


class DrGRPO(PolicyGradient[DrGRPOOptions]):
    """GRPO without its two normalisations."""

    paper = "arXiv 2503.20783"
    min_group_size = 2

    def credit(self, groups: Groups) -> Tensor:
        """The mean of the group is the baseline, and nothing is divided."""
        return learn.group_mean(groups.rewards, groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The clipped surrogate of each token."""
        options, ratio = self.options, learn.log_ratio(batch, policy.log_probs, anchor).exp()
        values = learn.clipped_surrogate(ratio, batch.advantages, options.clip_low, options.clip_high)
        return Surrogate(values, learn.clipped(ratio.detach(), batch.advantages, options.clip_low, options.clip_high))
