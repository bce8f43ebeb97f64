# SPDX-License-Identifier: Apache-2.0
"""Group-in-Group Policy Optimization (GiGPO, Feng et al., arXiv 2505.10978): for agents of several turns.

    A_E(i)    = (R_i - mean(R)) / F(R)                        over the samples of a task                        (eq. 3)
    G(s)      = { (a_t, G_t) : s_t = s },                     G_t = sum_k gamma^(k-t) r_k                       (eq. 6)
    A_S(a_t)  = (G_t - mean(G(s_t))) / F(G(s_t))              over all turns of the task that began in s        (eq. 7)
    A(a_t)    = A_E + omega A_S,  and PPO's clipped surrogate                                                   (eq. 8)

F is the standard deviation, or 1. A state is what the environment names (`Observation.state`), else what it showed. A turn
that alone began in its state has no A_S; where none is repeated this is GRPO, and for tasks of one turn, whose samples all
begin in one state, it is GRPO with an advantage of (1 + omega) A_E.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from relax_core import learn
from relax_core.api import STATES, STEP_REWARDS, TURNS, Column, Groups, LossBatch, PolicyOutputs
from relax_core.learn.policy_gradient import ClippedOptions, PolicyGradient, Surrogate, clipped_ratio

if TYPE_CHECKING:
    from torch import Tensor


class GiGPOOptions(ClippedOptions):
    """The paper's setting, apart from the correction and `kl_coef` (0.01 there, with a reference model in memory). Its mean
    over turns is, as in its code, a mean over their tokens."""

    gamma: float = Field(0.95, gt=0.0, le=1.0)
    """Discount of what later turns earn."""
    step_weight: float = Field(1.0, ge=0.0)
    """omega, the weight of A_S beside A_E."""
    normalise: Literal["std", "none"] = "std"
    """F: divide by the standard deviation, or only take off the mean."""


class GiGPO(PolicyGradient[GiGPOOptions]):
    """No critic: a turn is compared with other turns from the same state, a sample with others of the same task."""

    paper = "arXiv 2505.10978"
    min_group_size = 2

    def advantage_columns(self) -> frozenset[Column]:
        return super().advantage_columns() | {TURNS, STATES, STEP_REWARDS}

    def credit(self, groups: Groups) -> Tensor:
        """Eq. 8, for each token that of its turn; a divergence in the reward is one of A_E."""
        options, valid = self.options, groups.valid
        normalised = learn.group_mean_std if options.normalise == "std" else learn.group_mean
        episode = normalised(groups.rewards, valid)
        returns = learn.turn_returns(groups.step_rewards, options.gamma)
        step = learn.step_credit(returns, groups.states, valid, std=options.normalise == "std")
        return learn.of_turns(episode[..., None] + options.step_weight * step, groups)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The clipped surrogate of each token."""
        ratio = learn.log_ratio(batch, policy.log_probs, anchor).exp()
        return clipped_ratio(self.options, ratio, batch.advantages)
