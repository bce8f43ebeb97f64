# SPDX-License-Identifier: Apache-2.0
"""Group Relative Policy Optimization (Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1).

    J = E[ 1/G sum_i 1/|o_i| sum_t min(r_it A_i, clip(r_it, 1 - e, 1 + e) A_i) - beta D_KL ]        (eq. 3)
    A_i = (R_i - mean(R)) / std(R)                                                        (section 4.1.2)

D_KL is estimated by k3 (eq. 4), beta is `kl_coef`, and r is the policy over the one that starts the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class GRPOOptions(PolicyGradientOptions):
    """The paper's setting, apart from `kl_coef` (0.04 there, with a reference model in memory) and the correction."""

    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0.0)
    """Upper bound of the ratio is 1 + clip_high."""
    normalise: Literal["std", "none"] = "std"
    """Divide the advantage by the standard deviation of the group's rewards, or only take off their mean."""
    aggregation: Aggregation = "sequence"
    """Mean over each sequence, then over sequences (`sequence`, the paper); over all tokens (`token`); the sum over each
    sequence, mean over sequences (`sum`), or that by `fixed_length` tokens (`fixed`); over the tokens of a sample's rows
    together (`trajectory`)."""


class GRPO(PolicyGradient[GRPOOptions]):
    """No critic: a sample's advantage is how its reward compares with those of the same prompt."""

    paper = "arXiv 2402.03300"
    min_group_size = 2

    def credit(self, groups: Groups) -> Tensor:
        """Outcome supervision: one advantage for every token of the sample."""
        normalised = learn.group_mean_std if self.options.normalise == "std" else learn.group_mean
        return normalised(groups.rewards, groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Eq. 3: the clipped surrogate of each token; the divergence of eq. 4 is the option's k3."""
        options, ratio = self.options, learn.log_ratio(batch, policy.log_probs, anchor).exp()
        values = learn.clipped_surrogate(ratio, batch.advantages, options.clip_low, options.clip_high)
        return Surrogate(values, learn.clipped(ratio.detach(), batch.advantages, options.clip_low, options.clip_high))
