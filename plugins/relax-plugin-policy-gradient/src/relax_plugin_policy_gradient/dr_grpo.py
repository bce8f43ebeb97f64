# SPDX-License-Identifier: Apache-2.0
"""Dr.GRPO, GRPO done right (Liu et al., arXiv 2503.20783, section 3.2).

    J = E[ 1/G sum_i sum_t min(r_it A_i, clip(r_it, 1 - e, 1 + e) A_i) ],   A_i = R_i - mean(R)

This removes two biases of GRPO: by length (no 1/|o_i|) and by difficulty (no 1/std). The authors' code also divides by
a constant, the maximum length of answers; set `aggregation = "fixed"` and `fixed_length` to do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core import learn
from relax_core.api import Groups
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import ClippedOptions, ClippedPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class DrGRPOOptions(ClippedOptions):
    """Options of Dr.GRPO; the defaults are the paper's, except `correction`."""

    aggregation: Aggregation = "sum"
    """Aggregation of the tokens' losses. `sum`: sum over each sequence, then mean over sequences. `sequence`, `token`,
    `fixed` and `trajectory` mean the same as in `grpo`."""


class DrGRPO(ClippedPolicyGradient[DrGRPOOptions]):
    """GRPO without division by an answer's length and by the rewards' standard deviation."""

    paper = "arXiv 2503.20783"

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus the group's mean, not divided by the standard deviation."""
        return learn.group_mean(groups.rewards, groups.valid)
