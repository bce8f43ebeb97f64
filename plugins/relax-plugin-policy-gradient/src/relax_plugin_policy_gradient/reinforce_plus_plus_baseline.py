# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++ with a baseline from the group (Hu et al., arXiv 2501.03262): for several samples per prompt.

    A_i = R_i - mean(R of its group),   normalised by mean and standard deviation over all tokens of the batch
    J = E[ min(r_t A_i, clip(r_t, 1 - e, 1 + e) A_i) ] - beta E[ (log p_t / p_ref_t)^2 / 2 ]

The baseline is the group's mean. The scale is the batch's standard deviation, because a small group gives only a poor
estimate. The divergence is in the loss, estimated by k2. The statistics need the whole batch, so training can't begin
before a step's last rows have arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_core import learn
from relax_core.api import Groups, Scope
from relax_core.learn.policy_gradient import ClippedOptions, ClippedPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class ReinforcePlusPlusBaselineOptions(ClippedOptions):
    """Options of REINFORCE++ with a group baseline; the defaults are the paper's, except `correction` and `kl_coef`."""

    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = "k2"
    """Estimator of the divergence from the reference q: `k1`: log p/q; `k2` (the paper): (log p/q)^2 / 2; `k3`:
    q/p - log(q/p) - 1; `unbiased`: k3 times the ratio to the policy that sampled."""


class ReinforcePlusPlusBaseline(ClippedPolicyGradient[ReinforcePlusPlusBaselineOptions]):
    """PPO's surrogate with the group's mean as baseline and the batch's standard deviation as scale."""

    paper = "arXiv 2501.03262"
    statistics = Scope.BATCH

    def credit(self, groups: Groups) -> Tensor:
        """Return advantages [tokens]; the batch's statistics are over tokens, so long samples weigh more."""
        centred = learn.of_samples(learn.group_mean(groups.rewards, groups.valid), groups)
        return learn.whiten(centred, groups.token_columns["loss_mask"].bool() & learn.of_samples(groups.valid, groups))
