# SPDX-License-Identifier: Apache-2.0
"""REINFORCE Leave-One-Out (Ahmadian et al., RLOO, arXiv 2402.14740).

    gradient of J = E[ 1/k sum_i (R_i - 1/(k-1) sum_{j != i} R_j) grad log p(y_i | x) ]

The whole answer is one action: log p(y | x) is the sum over the answer's tokens. The paper reduces the reward by the
divergence from a reference model; set `reward_kl_coef` to do so. (TRL's RLOO clips the sequence's ratio as PPO does;
the paper argues against clipping.)
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
    """Options of RLOO; the defaults are the paper's, except `correction` and `reward_kl_coef` (paper: 0.03 to 0.1)."""

    aggregation: Aggregation = "sum"
    """Aggregation of the tokens' losses. `sum`: sum over each sequence, then mean over sequences. `sequence`, `token`,
    `fixed` and `trajectory` mean the same as in `grpo`."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """Weight of tokens, to correct for an older version or an engine that rounds differently. w is a token's probability
    at the step's start over that under the policy that sampled. `truncate`: min(w, `correction_cap`); `mask`: w between
    `correction_floor` and `correction_cap`, else 0; `reject`: 1 between them, else 0; `none`: 1."""


class RLOO(PolicyGradient[RLOOOptions]):
    """REINFORCE with a leave-one-out baseline: the mean reward of the rest of the group."""

    paper = "arXiv 2402.14740"
    min_group_size = 2
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus the mean reward of the rest of the group; this keeps the gradient unbiased."""
        return learn.leave_one_out(groups.rewards, groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the negative of each token's log-prob times its advantage."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
