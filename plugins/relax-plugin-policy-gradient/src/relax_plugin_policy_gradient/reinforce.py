# SPDX-License-Identifier: Apache-2.0
"""REINFORCE (Williams 1992, "Simple statistical gradient-following algorithms", theorem 1).

    gradient of J = E[ sum_t (R - b) grad log p_t ]

Here b is a constant. With a baseline from the group this is RLOO, with a baseline from the batch REINFORCE++.
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
    """Options of REINFORCE. Nothing is normalised, so keep rewards small or set `baseline`."""

    baseline: float = 0.0
    """Constant that is subtracted from every reward; a value near their mean has the least variance."""
    aggregation: Aggregation = "sum"
    """Averaging of token losses: `sequence`, `token`, `sum`, `fixed` or `trajectory`, as in every algorithm."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """Weight of samples from an older version, or from an engine that rounds differently. w is the step's starting
    policy over the policy that sampled. `truncate`: min(w, `correction_cap`); `mask`: w inside `correction_floor ..
    correction_cap`, else 0; `reject`: 1 inside, else 0; `none`: 1."""


class Reinforce(PolicyGradient[ReinforceOptions]):
    """The plain policy gradient with a constant baseline."""

    paper = "Williams 1992"
    statistics = Scope.SAMPLE
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """Return the sample's reward minus the constant."""
        import torch

        return torch.where(groups.valid, groups.rewards - self.options.baseline, 0.0)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the negative of each token's log-prob times its advantage."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
