# SPDX-License-Identifier: Apache-2.0
"""On-Policy RL with Optimal reward baseline (Hao et al., OPO, arXiv 2505.23585).

    gradient of J = E[ (R_i - b*) grad log p(y_i | x) ],   b* = sum_i l_i R_i / sum_i l_i

b* gives the least variance if the squared gradient of an answer grows with the answer's length l. This holds only
on-policy: one update per step, staleness 0. The correction then compensates only for the engine's rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core import learn
from relax_core.api import Groups
from relax_core.learn.policy_gradient import PlainOptions, PlainPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class OPOOptions(PlainOptions):
    """Options of OPO; the defaults are the paper's, except `correction`."""


class OPO(PlainPolicyGradient[OPOOptions]):
    """On-policy REINFORCE with the baseline of least variance."""

    paper = "arXiv 2505.23585"
    max_staleness = 0

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus b*, the group's mean reward weighted by the length of answers."""
        return learn.length_weighted_baseline(groups.rewards, groups.valid, groups.lengths)
