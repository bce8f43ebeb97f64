# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++ (Hu et al., arXiv 2501.03262), the general form: one sample per prompt is enough.

    A_t = R - beta sum_{u >= t} log(p_u / p_ref_u),   normalised by mean and standard deviation over all tokens of the batch
    J = E[ min(r_t A_t, clip(r_t, 1 - e, 1 + e) A_t) ]

The divergence (k1, weighted by beta = `reward_kl_coef`) reduces each token's reward; if beta is 0, every token has its
sample's reward. The statistics need the whole batch, so training can't begin before a step's last rows have arrived.
"""

from __future__ import annotations

from pydantic import Field

from relax_core import learn
from relax_core.api import Advantages, Groups, Scope
from relax_core.learn.policy_gradient import ClippedOptions, ClippedPolicyGradient


class ReinforcePlusPlusOptions(ClippedOptions):
    """Options of REINFORCE++; the defaults are the paper's, except `correction` and `reward_kl_coef` (paper: 0.01)."""

    gamma: float = Field(1.0, gt=0.0, le=1.0)
    """Discount factor per token for the rewards of later tokens."""


class ReinforcePlusPlus(ClippedPolicyGradient[ReinforcePlusPlusOptions]):
    """PPO's surrogate without a critic: returns are normalised by the batch's mean and standard deviation."""

    paper = "arXiv 2501.03262"
    statistics = Scope.BATCH
    min_group_size = 1

    def advantages(self, groups: Groups) -> Advantages:
        """Return the reward-to-go of each token, normalised over the batch, [tokens]."""
        mask = groups.token_columns["loss_mask"].bool()
        earned = learn.token_rewards(groups, self.options.reward_kl_coef)
        to_go = learn.reward_to_go(earned, mask, groups.row_lengths, self.options.gamma)
        return Advantages(learn.whiten(to_go, mask & learn.of_samples(groups.valid, groups)))
