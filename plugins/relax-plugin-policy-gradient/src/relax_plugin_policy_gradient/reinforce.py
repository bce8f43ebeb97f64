# SPDX-License-Identifier: Apache-2.0
"""REINFORCE (Williams 1992, "Simple statistical gradient-following algorithms", theorem 1).

    gradient of J = E[ sum_t (R - b) grad log p_t ]

b is a constant here; a baseline that the group gives makes it RLOO, one of the batch REINFORCE++.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs, Scope
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class ReinforceOptions(PolicyGradientOptions):
    """Nothing is normalised: rewards should be small, or have a baseline."""

    baseline: float = 0.0
    """Taken off every reward: about their mean has the least variance."""
    aggregation: Aggregation = "sum"
    """As in every algorithm: `sequence`, `token`, `sum`, `fixed` or `trajectory`."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """For samples of an older version or of an engine that rounds otherwise: weigh by `min(w, cap)`, w the step's starting
    policy over the one that sampled (`truncate`); by w, 0 outside `floor .. cap` (`mask`); by 1 there (`reject`); or
    nothing."""


class Reinforce(PolicyGradient[ReinforceOptions]):
    """The policy gradient itself."""

    paper = "Williams 1992"
    statistics = Scope.SAMPLE
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """The sample's own reward, less a constant."""
        import torch

        return torch.where(groups.valid, groups.rewards - self.options.baseline, 0.0)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The log-prob of each token, times what its sample earned."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
