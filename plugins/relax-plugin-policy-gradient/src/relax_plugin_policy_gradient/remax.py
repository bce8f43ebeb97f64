# SPDX-License-Identifier: Apache-2.0
"""ReMax (Li et al., arXiv 2310.10505, algorithm 1).

    gradient of J = E[ 1/k sum_i (R_i - R(greedy)) sum_t grad log p(y_it | x, y_i<t) ]                    (eq. 4)

The baseline of a task is the reward of the policy's greedy answer, which is generated with the others and never trained:
it depends on no sampled token, so the gradient stays unbiased. One sample a prompt is enough, as in the paper. The paper
takes the divergence from the reference off the reward: `reward_kl_coef`. Where the greedy answer has no verdict, the task
gives no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class ReMaxOptions(PolicyGradientOptions):
    """The paper's setting, apart from the correction and its divergence."""

    aggregation: Aggregation = "sum"
    """As in every algorithm: `sequence`, `token`, `sum`, `fixed` or `trajectory`."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """For samples of an older version or of an engine that rounds otherwise: weigh by `min(w, cap)`, w the step's starting
    policy over the one that sampled (`truncate`); by w, 0 outside `floor .. cap` (`mask`); by 1 there (`reject`); or
    nothing."""


class ReMax(PolicyGradient[ReMaxOptions]):
    """An algorithm whose advantage is the reward of a sample beyond that of the greedy answer."""

    paper = "arXiv 2310.10505"
    greedy_baseline = True
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """Unbiased, since no sampled token is in the baseline."""
        return learn.beyond_baseline(groups.rewards, groups.valid, groups.baseline)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The log-prob of each token; their sum is the answer's."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
