# SPDX-License-Identifier: Apache-2.0
"""REINFORCE Leave-One-Out (Ahmadian et al., RLOO, arXiv 2402.14740).

    gradient of J = E[ 1/k sum_i (R_i - 1/(k-1) sum_{j != i} R_j) grad log p(y_i | x) ]

The whole answer is one action: log p(y | x) is the sum over its tokens. The paper subtracts the divergence from the
reference from the reward; set `reward_kl_coef`. (TRL's RLOO clips the sequence's ratio as PPO does; the paper argues
against clipping.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class RLOOOptions(PolicyGradientOptions):
    """The paper's setting, except the correction and `reward_kl_coef` (0.03 to 0.1; needs a reference model)."""

    aggregation: Aggregation = "sum"
    """Averaging of token losses: `sequence`, `token`, `sum`, `fixed` or `trajectory`, as in every algorithm."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """Weight of samples from an older version, or from an engine that rounds differently. w is the step's starting
    policy over the policy that sampled. `truncate`: min(w, `correction_cap`); `mask`: w inside `correction_floor ..
    correction_cap`, else 0; `reject`: 1 inside, else 0; `none`: 1."""


class RLOO(PolicyGradient[RLOOOptions]):
    """REINFORCE with a leave-one-out baseline: the mean reward of the rest of the group."""

    paper = "arXiv 2402.14740"
    min_group_size = 2
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus the mean of the rest of the group, which keeps the gradient unbiased."""
        return learn.leave_one_out(groups.rewards, groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the negative of each token's log-prob times its advantage."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
