# SPDX-License-Identifier: Apache-2.0
"""Maximum Likelihood Reinforcement Learning (MaxRL, arXiv 2602.02710).

    gradient of J = E[ 1/N sum_i (r_i - mean(r)) / mean(r) grad log p(y_i | x) ]

With rewards 0 and 1 this is the gradient of the log of the success rate, to the order that N samples can tell: the mean
of grad log p over the right answers, less the mean over all. A prompt without a right answer has none.
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
    """The paper's estimator; rewards are meant to be 0 or 1."""

    aggregation: Aggregation = "sum"
    """As in every algorithm: `sequence`, `token`, `sum`, `fixed` or `trajectory`."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """For samples of an older version or of an engine that rounds otherwise: weigh by `min(w, cap)`, w the step's starting
    policy over the one that sampled (`truncate`); by w, 0 outside `floor .. cap` (`mask`); by 1 there (`reject`); or
    nothing."""


class MaxRL(PolicyGradient[MaxRLOptions]):
    """Maximises the likelihood of being right, so that hard prompts weigh more."""

    paper = "arXiv 2602.02710"
    min_group_size = 2
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """Divided by the group's mean reward in place of its standard deviation."""
        return learn.group_mean_relative(groups.rewards, groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The log-prob of each token; their sum is the answer's."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
