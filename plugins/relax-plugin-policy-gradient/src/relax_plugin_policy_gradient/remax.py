# SPDX-License-Identifier: Apache-2.0
"""ReMax (Li et al., arXiv 2310.10505, algorithm 1).

    gradient of J = E[ 1/k sum_i (R_i - R(greedy)) sum_t grad log p(y_it | x, y_i<t) ]                    (eq. 4)

The baseline of a task is the reward of the policy's greedy answer, which is generated with the samples and never
trained. This baseline does not depend on sampled tokens, so the gradient stays unbiased. One sample per prompt is
enough, as in the paper. The paper reduces the reward by the divergence from a reference model; set `reward_kl_coef` to
do so. A task whose greedy answer has no reward gives no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core import learn
from relax_core.api import Groups
from relax_core.learn.policy_gradient import PlainOptions, PlainPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class ReMaxOptions(PlainOptions):
    """Options of ReMax; the defaults are the paper's, except `correction` and `reward_kl_coef`."""


class ReMax(PlainPolicyGradient[ReMaxOptions]):
    """REINFORCE with the reward of the greedy answer as baseline."""

    paper = "arXiv 2310.10505"
    greedy_baseline = True
    min_group_size = 1

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus the reward of the group's greedy answer."""
        return learn.beyond_baseline(groups.rewards, groups.valid, groups.baseline)
