# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++ with a baseline of the group (Hu et al., arXiv 2501.03262): for several samples a prompt.

    A_i = R_i - mean(R of its group),   normalised by mean and standard deviation over all tokens of the batch
    J = E[ min(r_t A_i, clip(r_t, 1 - e, 1 + e) A_i) ] - beta E[ (log p_t / p_ref_t)^2 / 2 ]

The group's mean is its baseline, but the batch's spread its scale: one of a small group is a poor estimate. The divergence
is in the loss, estimated by k2. The batch's statistics turn streaming off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs, Scope
from relax_core.learn.policy_gradient import ClippedOptions, PolicyGradient, Surrogate, clipped_ratio

if TYPE_CHECKING:
    from torch import Tensor


class ReinforcePlusPlusBaselineOptions(ClippedOptions):
    """The paper's setting, apart from the correction and `kl_coef`, which needs a reference in memory."""

    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = "k2"
    """Of the divergence: log p/q; (log p/q)^2 / 2, the paper's; q/p - log(q/p) - 1; or k3 times the ratio."""


class ReinforcePlusPlusBaseline(PolicyGradient[ReinforcePlusPlusBaselineOptions]):
    """The group's mean as the baseline, the batch's spread as the scale."""

    paper = "arXiv 2501.03262"
    min_group_size = 2
    statistics = Scope.BATCH

    def credit(self, groups: Groups) -> Tensor:
        """Return the advantages of tokens: the batch's statistics weigh a sample by its length."""
        mask, lengths = groups.token_columns["loss_mask"].bool(), groups.row_lengths
        valid = groups.valid.reshape(-1)[groups.row_sample].repeat_interleave(lengths)
        centred = learn.group_mean(groups.rewards, groups.valid)
        of_token = centred.reshape(-1)[groups.row_sample].repeat_interleave(lengths)
        return learn.whiten(of_token, mask & valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The clipped surrogate of each token."""
        ratio = learn.log_ratio(batch, policy.log_probs, anchor).exp()
        return clipped_ratio(self.options, ratio, batch.advantages)
