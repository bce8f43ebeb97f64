# SPDX-License-Identifier: Apache-2.0
"""Maximum Likelihood Reinforcement Learning (MaxRL, arXiv 2602.02710).

    gradient of J = E[ 1/N sum_i (r_i - mean(r)) / mean(r) grad log p(y_i | x) ]

With rewards 0 and 1 this is the gradient of the log of the success rate, up to the order that N samples can estimate:
the mean of grad log p over right answers minus the mean over all answers. A prompt without a right answer gives no
gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core import learn
from relax_core.api import Groups
from relax_core.learn.policy_gradient import PlainOptions, PlainPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class MaxRLOptions(PlainOptions):
    """Options of MaxRL; the defaults are the paper's, except `correction`. Rewards should be 0 or 1."""


class MaxRL(PlainPolicyGradient[MaxRLOptions]):
    """A policy gradient that maximises the log of the success rate, so hard prompts weigh more."""

    paper = "arXiv 2602.02710"

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus the group's mean, divided by the mean instead of the standard deviation."""
        return learn.group_mean_relative(groups.rewards, groups.valid)
