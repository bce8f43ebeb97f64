# SPDX-License-Identifier: Apache-2.0
"""Maximum Likelihood Reinforcement Learning (MaxRL, arXiv 2602.02710).

    gradient of J = E[ 1/N sum_i (r_i - mean(r)) / mean(r) grad log p(y_i | x) ]

Rewards are 0 or more, because rewards of mixed signs can bring the mean near 0 and the advantages to any size. With
rewards 0 and 1 this estimates the gradient of the log of the success rate, whose series in powers of the failure rate is
cut off after N terms: the mean of grad log p over right answers minus the mean over all answers. A prompt without a right
answer gives no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from relax_core import learn
from relax_core.api import Groups
from relax_core.learn.policy_gradient import PlainOptions, PlainPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class MaxRLOptions(PlainOptions):
    """Options of MaxRL; the defaults are the paper's, except `correction`. Rewards must not be negative."""

    @model_validator(mode="after")
    def _rewards_stay_positive(self) -> Self:
        if self.reward_kl_coef:
            got = f"reward_kl_coef: got {self.reward_kl_coef}"
            raise ValueError(
                f"{got}; max-rl divides by the mean reward, which a divergence can bring near 0: use kl_coef"
            )
        return self


class MaxRL(PlainPolicyGradient[MaxRLOptions]):
    """A policy gradient that maximises the log of the success rate, so hard prompts weigh more."""

    paper = "arXiv 2602.02710"

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus the group's mean, divided by the mean instead of the standard deviation.

        Raises ValueError for a negative reward.
        """
        least = float(groups.rewards.min()) if groups.rewards.numel() else 0.0
        if least < 0:
            fix = "max-rl divides by a group's mean reward: give rewards of 0 or more, such as 0 and 1, or use rloo"
            raise ValueError(f"rewards: got {least:g}; {fix}")
        return learn.group_mean_relative(groups.rewards, groups.valid)
