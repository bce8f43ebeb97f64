# SPDX-License-Identifier: Apache-2.0
"""ReMax (Li et al., arXiv 2310.10505, algorithm 1).

    gradient of J = E[ 1/k sum_i (R_i - R(greedy)) sum_t grad log p(y_it | x, y_i<t) ]                    (eq. 4)

The baseline of a task is the reward of the policy's greedy answer, which is generated with the samples and never
trained. This baseline does not depend on sampled tokens, so the gradient stays unbiased. One sample per prompt is
enough, as in the paper. The paper reduces the reward by the divergence from a reference model; set `reward_kl_coef` to
do so. A task whose greedy answer has no reward gives no gradient.
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
    """Options of ReMax; the defaults are the paper's, except `correction` and `reward_kl_coef`."""

    aggregation: Aggregation = "sum"
    """Aggregation of the tokens' losses. `sum`: sum over each sequence, then mean over sequences. `sequence`, `token`,
    `fixed` and `trajectory` mean the same as in `grpo`."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """Weight of tokens, to correct for an older version or an engine that rounds differently. w is a token's probability
    at the step's start over that under the policy that sampled. `truncate`: min(w, `correction_cap`); `mask`: w between
    `correction_floor` and `correction_cap`, else 0; `reject`: 1 between them, else 0; `none`: 1."""


class ReMax(PolicyGradient[ReMaxOptions]):
    """REINFORCE with the reward of the greedy answer as baseline."""

    paper = "arXiv 2310.10505"
    greedy_baseline = True
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus the reward of the group's greedy answer."""
        return learn.beyond_baseline(groups.rewards, groups.valid, groups.baseline)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the negative of each token's log-prob times its advantage."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
