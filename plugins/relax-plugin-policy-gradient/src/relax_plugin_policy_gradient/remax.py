# SPDX-License-Identifier: Apache-2.0
"""ReMax (Li et al., arXiv 2310.10505, algorithm 1).

    gradient of J = E[ 1/k sum_i (R_i - R(greedy)) sum_t grad log p(y_it | x, y_i<t) ]                    (eq. 4)

The baseline of a task is the reward of the policy's greedy answer, which is generated with the samples and never
trained. It does not depend on sampled tokens, so the gradient stays unbiased. One sample per prompt is enough, as in
the paper. The paper subtracts the divergence from the reference from the reward; set `reward_kl_coef`. A task whose
greedy answer has no reward gives no gradient.
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
    """The paper's setting, except the correction and the divergence from the reference."""

    aggregation: Aggregation = "sum"
    """Averaging of token losses: `sequence`, `token`, `sum`, `fixed` or `trajectory`, as in every algorithm."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """Weight of samples from an older version, or from an engine that rounds differently. w is the step's starting
    policy over the policy that sampled. `truncate`: min(w, `correction_cap`); `mask`: w inside `correction_floor ..
    correction_cap`, else 0; `reject`: 1 inside, else 0; `none`: 1."""


class ReMax(PolicyGradient[ReMaxOptions]):
    """REINFORCE with the reward of the greedy answer as baseline."""

    paper = "arXiv 2310.10505"
    greedy_baseline = True
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus that of the group's greedy answer."""
        return learn.beyond_baseline(groups.rewards, groups.valid, groups.baseline)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the negative of each token's log-prob times its advantage."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
