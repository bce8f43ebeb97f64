# SPDX-License-Identifier: Apache-2.0
"""REINFORCE Leave-One-Out (Ahmadian et al., RLOO, arXiv 2402.14740).

    gradient of J = E[ 1/k sum_i (R_i - 1/(k-1) sum_{j != i} R_j) grad log p(y_i | x) ]

The whole answer is one action: log p(y | x) is the sum over its tokens. The paper takes the divergence from the reference
off the reward: `reward_kl_coef`. (TRL's clips the ratio of the sequence as PPO does; the paper argues against it.)
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
    """The paper's setting, apart from the correction and its divergence (0.03 to 0.1 there, with a reference in memory)."""

    aggregation: Aggregation = "sum"
    """As in every algorithm: `sequence`, `token`, `sum`, `fixed` or `trajectory`."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """For samples of an older version or of an engine that rounds otherwise: weigh by `min(w, cap)`, w the step's starting
    policy over the one that sampled (`truncate`); by w, 0 outside `floor .. cap` (`mask`); by 1 there (`reject`); or
    nothing."""


class RLOO(PolicyGradient[RLOOOptions]):
    """Each sample's baseline is the mean of the others."""

    paper = "arXiv 2402.14740"
    min_group_size = 2
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """Unbiased, since a sample is not in its own baseline."""
        return learn.leave_one_out(groups.rewards, groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The log-prob of each token; their sum is the answer's."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
