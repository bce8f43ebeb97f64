# SPDX-License-Identifier: Apache-2.0
"""Group-in-Group Policy Optimization (GiGPO, Feng et al., arXiv 2505.10978): for agents of several turns.

    A_E(i)    = (R_i - mean(R)) / F(R)                        over the samples of a task                        (eq. 3)
    G(s)      = { (a_t, G_t) : s_t = s },                     G_t = sum_k gamma^(k-t) r_k                       (eq. 6)
    A_S(a_t)  = (G_t - mean(G(s_t))) / F(G(s_t))              over all turns of the task that began in s        (eq. 7)
    A(a_t)    = A_E + omega A_S,  and PPO's clipped surrogate                                                   (eq. 8)

F is the standard deviation, or 1. A state is `Observation.state` if the environment sets it, else the observation
itself. A turn whose state occurs only once has A_S = 0, so without repeated states this is GRPO. In tasks of one turn
all samples begin in one state, and this is GRPO with an advantage of (1 + omega) A_E.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from relax_core import learn
from relax_core.api import STATES, STEP_REWARDS, TURNS, Column, Groups
from relax_core.learn.policy_gradient import ClippedOptions, ClippedPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class GiGPOOptions(ClippedOptions):
    """Options of GiGPO; the defaults are the paper's, except `correction` and `kl_coef` (0.01 in the paper).

    The loss is a mean over the tokens of all turns, as in the authors' code; the paper has a mean over turns.
    """

    gamma: float = Field(0.95, gt=0.0, le=1.0)
    """Discount factor per turn for the rewards of later turns."""
    step_weight: float = Field(1.0, ge=0.0)
    """Weight omega of A_S (compared with turns in the same state) relative to A_E (compared with whole samples)."""
    normalise: Literal["std", "none"] = "std"
    """Divisor F of the advantages. `std`: the standard deviation; `none`: 1, so only the mean is subtracted."""


class GiGPO(ClippedPolicyGradient[GiGPOOptions]):
    """A policy gradient that compares samples of one task, and turns that begin in the same state."""

    paper = "arXiv 2505.10978"

    def advantage_columns(self) -> frozenset[Column]:
        return super().advantage_columns() | {TURNS, STATES, STEP_REWARDS}

    def credit(self, groups: Groups) -> Tensor:
        """Return the advantage of each token's turn (eq. 8); `reward_kl_coef` changes A_E only."""
        options, valid = self.options, groups.valid
        normalised = learn.group_mean_std if options.normalise == "std" else learn.group_mean
        episode = normalised(groups.rewards, valid)
        returns = learn.turn_returns(groups.step_rewards, options.gamma)
        step = learn.step_credit(returns, groups.states, valid, std=options.normalise == "std")
        return learn.of_turns(episode[..., None] + options.step_weight * step, groups)
