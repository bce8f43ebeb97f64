# SPDX-License-Identifier: Apache-2.0
"""REINFORCE Leave-One-Out (Ahmadian et al., RLOO, arXiv 2402.14740).

    gradient of J = E[ 1/k sum_i (R_i - 1/(k-1) sum_{j != i} R_j) grad log p(y_i | x) ]

The whole answer is one action: log p(y | x) is the sum over the answer's tokens. The paper reduces the reward by the
divergence from a reference model; set `reward_kl_coef` to do so. (TRL's RLOO clips the sequence's ratio as PPO does;
the paper argues against clipping.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core import learn
from relax_core.api import Groups
from relax_core.learn.policy_gradient import PlainOptions, PlainPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class RLOOOptions(PlainOptions):
    """Options of RLOO; the defaults are the paper's, except `correction` and `reward_kl_coef` (paper: 0.03 to 0.1)."""


class RLOO(PlainPolicyGradient[RLOOOptions]):
    """REINFORCE with a leave-one-out baseline: the mean reward of the rest of the group."""

    paper = "arXiv 2402.14740"

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus the mean reward of the rest of the group; this keeps the gradient unbiased."""
        return learn.leave_one_out(groups.rewards, groups.valid)
