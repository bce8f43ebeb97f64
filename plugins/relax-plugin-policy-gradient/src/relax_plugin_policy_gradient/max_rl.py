# SPDX-License-Identifier: Apache-2.0
"""Maximum Likelihood Reinforcement Learning (MaxRL, arXiv 2602.02710).

    gradient of J = E[ 1/N sum_i (r_i - mean(r)) / mean(r) grad log p(y_i | x) ]

With rewards 0 and 1 this is the gradient of the log of the success rate, up to the order that N samples can estimate:
the mean of grad log p over right answers minus the mean over all answers. A prompt without a right answer gives no
gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class MaxRLOptions(PolicyGradientOptions):
    """Options of MaxRL; the defaults are the paper's, except `correction`. Rewards should be 0 or 1."""

    aggregation: Aggregation = "sum"
    """Aggregation of the tokens' losses. `sum`: sum over each sequence, then mean over sequences. `sequence`, `token`,
    `fixed` and `trajectory` mean the same as in `grpo`."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """Weight of tokens, to correct for an older version or an engine that rounds differently. w is a token's probability
    at the step's start over that under the policy that sampled. `truncate`: min(w, `correction_cap`); `mask`: w between
    `correction_floor` and `correction_cap`, else 0; `reject`: 1 between them, else 0; `none`: 1."""


class MaxRL(PolicyGradient[MaxRLOptions]):
    """A policy gradient that maximises the log of the success rate, so hard prompts weigh more."""

    paper = "arXiv 2602.02710"
    min_group_size = 2
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus the group's mean, divided by the mean instead of the standard deviation."""
        return learn.group_mean_relative(groups.rewards, groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the negative of each token's log-prob times its advantage."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
