# SPDX-License-Identifier: Apache-2.0
"""REINFORCE (Williams 1992, "Simple statistical gradient-following algorithms", theorem 1).

    gradient of J = E[ sum_t (R - b) grad log p_t ]

Here b is a constant. RLOO takes b from the group, and REINFORCE++ takes b from the batch.
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
    """Options of REINFORCE. Rewards are not normalised, so keep them small or set `baseline`."""

    baseline: float = 0.0
    """Constant b that is subtracted from every reward; a value near the mean reward gives the least variance."""
    aggregation: Aggregation = "sum"
    """Aggregation of the tokens' losses. `sum`: sum over each sequence, then mean over sequences. `sequence`, `token`,
    `fixed` and `trajectory` mean the same as in `grpo`."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """Weight of tokens, to correct for an older version or an engine that rounds differently. w is a token's probability
    at the step's start over that under the policy that sampled. `truncate`: min(w, `correction_cap`); `mask`: w between
    `correction_floor` and `correction_cap`, else 0; `reject`: 1 between them, else 0; `none`: 1."""


class Reinforce(PolicyGradient[ReinforceOptions]):
    """The plain policy gradient with a constant baseline."""

    paper = "Williams 1992"
    statistics = Scope.SAMPLE
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """Return the sample's reward minus `baseline`."""
        import torch

        return torch.where(groups.valid, groups.rewards - self.options.baseline, 0.0)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the negative of each token's log-prob times its advantage."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
