# SPDX-License-Identifier: Apache-2.0
"""Group Policy Gradient (Chu et al., GPG, arXiv 2504.02546).

    J = E[ 1/(sum_i |o_i|) sum_i sum_t log p_it alpha A_i ],   A_i = (r_i - mean(r)) / F_norm, F_norm = 1
    alpha = B / (B - M): B samples in the batch, M of them in groups whose rewards are all equal

alpha makes up for samples without a gradient, which the mean still counts (verl counts samples with reward 0 in its place).
It belongs to the batch, so streaming is off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs, Scope
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class GPGOptions(PolicyGradientOptions):
    """The paper's setting, apart from the correction."""

    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """For samples of an older version or of an engine that rounds otherwise: weigh by `min(w, cap)`, w the step's starting
    policy over the one that sampled (`truncate`); by w, 0 outside `floor .. cap` (`mask`); by 1 there (`reject`); or
    nothing."""


class GPG(PolicyGradient[GPGOptions]):
    """The policy gradient, no surrogate and no reference."""

    paper = "arXiv 2504.02546"
    min_group_size = 2
    statistics = Scope.BATCH
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """The group's mean is the baseline; alpha is the batch's."""
        telling = (groups.valid & learn.informative(groups.rewards, groups.valid)[:, None]).sum()
        alpha = groups.valid.sum().to(groups.rewards.dtype) / telling.clamp(min=1)
        return learn.group_mean(groups.rewards, groups.valid) * alpha

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The log-prob of each token."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
