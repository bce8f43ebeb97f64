# SPDX-License-Identifier: Apache-2.0
"""On-Policy RL with Optimal reward baseline (Hao et al., OPO, arXiv 2505.23585).

    gradient of J = E[ (R_i - b*) grad log p(y_i | x) ],   b* = sum_i l_i R_i / sum_i l_i

b* has the least variance where the squared gradient of an answer grows with its length l. It is right on-policy only: one
update a step, staleness 0; the correction is for the engine's rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class OPOOptions(PolicyGradientOptions):
    """The paper's setting."""

    aggregation: Aggregation = "sum"
    """As in every algorithm: `sequence`, `token`, `sum`, `fixed` or `trajectory`."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """For samples of an older version or of an engine that rounds otherwise: weigh by `min(w, cap)`, w the step's starting
    policy over the one that sampled (`truncate`); by w, 0 outside `floor .. cap` (`mask`); by 1 there (`reject`); or
    nothing."""


class OPO(PolicyGradient[OPOOptions]):
    """REINFORCE with the baseline of least variance."""

    paper = "arXiv 2505.23585"
    min_group_size = 2
    has_ratio = False
    max_staleness = 0

    def credit(self, groups: Groups) -> Tensor:
        """The baseline is the group's mean reward, weighted by length."""
        return learn.length_weighted_baseline(groups.rewards, groups.valid, groups.lengths)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The log-prob of each token; their sum is the answer's."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
