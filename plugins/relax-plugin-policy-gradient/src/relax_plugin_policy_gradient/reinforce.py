# SPDX-License-Identifier: Apache-2.0
"""REINFORCE (Williams 1992, "Simple statistical gradient-following algorithms", theorem 1).

    gradient of J = E[ sum_t (R - b) grad log p_t ]

Here b is a constant. RLOO takes b from the group, and REINFORCE++ takes b from the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.api import Groups, Scope
from relax_core.learn.policy_gradient import PlainOptions, PlainPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class ReinforceOptions(PlainOptions):
    """Options of REINFORCE. Rewards are not normalised, so keep them small or set `baseline`."""

    baseline: float = 0.0
    """Constant b that is subtracted from every reward; a value near the mean reward gives the least variance."""


class Reinforce(PlainPolicyGradient[ReinforceOptions]):
    """The plain policy gradient with a constant baseline."""

    paper = "Williams 1992"
    statistics = Scope.SAMPLE
    min_group_size = 1

    def credit(self, groups: Groups) -> Tensor:
        """Return the sample's reward minus `baseline`."""
        import torch

        return torch.where(groups.valid, groups.rewards - self.options.baseline, 0.0)
