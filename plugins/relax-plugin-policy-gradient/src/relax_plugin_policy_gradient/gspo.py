# SPDX-License-Identifier: Apache-2.0
"""Group Sequence Policy Optimization (Zheng et al., GSPO, arXiv 2507.18071, section 4).

    J = E[ 1/G sum_i min(s_i A_i, clip(s_i, 1 - e_low, 1 + e_high) A_i) ]                           (eq. 5)
    s_i = (p(y_i | x) / p_old(y_i | x))^(1/|y_i|) = exp(1/|y_i| sum_t log(p_t / p_old_t))           (eq. 7)
    A_i = (r_i - mean(r)) / std(r)                                                                  (eq. 6)

Rewards belong to whole sequences, so whole sequences are clipped. The correction's weight also belongs to the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import ClippedOptions, PolicyGradient, Surrogate, clipped_ratio

if TYPE_CHECKING:
    from torch import Tensor


class GSPOOptions(ClippedOptions):
    """The paper's setting (section 5.1), except the correction."""

    clip_low: float = Field(3e-4, gt=0.0, lt=1.0)
    """Lower bound of a sequence's ratio is 1 - clip_low; several hundred times smaller than for tokens."""
    clip_high: float = Field(4e-4, gt=0.0)
    """Upper bound of a sequence's ratio is 1 + clip_high."""
    aggregation: Aggregation = "sequence"
    """Averaging of token losses: `sequence`, `token`, `sum`, `fixed` or `trajectory`, as in every algorithm."""
    correction_level: Literal["token", "sequence", "geometric"] = "geometric"
    """Level of the correction's weight: `geometric`: geometric mean over the sequence, like the ratio; `token`: of each
    token; `sequence`: product over the sequence."""


class GSPO(PolicyGradient[GSPOOptions]):
    """GRPO with one ratio for each sequence."""

    paper = "arXiv 2507.18071"
    min_group_size = 2

    def credit(self, groups: Groups) -> Tensor:
        """Return A_i (eq. 6)."""
        return learn.group_mean_std(groups.rewards, groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the sequence's term of eq. 5 at each of its tokens, so that their mean is the term."""
        ratio = learn.log_ratio(batch, policy.log_probs, anchor, "geometric").exp()
        return clipped_ratio(self.options, ratio, batch.advantages)
