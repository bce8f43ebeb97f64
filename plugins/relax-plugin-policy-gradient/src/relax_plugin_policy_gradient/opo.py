# SPDX-License-Identifier: Apache-2.0
"""On-Policy RL with Optimal reward baseline (Hao et al., OPO, arXiv 2505.23585).

    gradient of J = E[ (R_i - b*) grad log p(y_i | x) ],   b* = sum_i l_i R_i / sum_i l_i

b* has the least variance if the squared gradient of an answer grows with its length l. It is valid on-policy only: one
update per step, staleness 0. The correction then only compensates for rounding differences of the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class OPOOptions(PolicyGradientOptions):
    """The paper's setting."""

    aggregation: Aggregation = "sum"
    """Averaging of token losses: `sequence`, `token`, `sum`, `fixed` or `trajectory`, as in every algorithm."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """Weight of samples from an older version, or from an engine that rounds differently. w is the step's starting
    policy over the policy that sampled. `truncate`: min(w, `correction_cap`); `mask`: w inside `correction_floor ..
    correction_cap`, else 0; `reject`: 1 inside, else 0; `none`: 1."""


class OPO(PolicyGradient[OPOOptions]):
    """On-policy REINFORCE with the baseline of least variance."""

    paper = "arXiv 2505.23585"
    min_group_size = 2
    has_ratio = False
    max_staleness = 0

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus the group's mean reward, weighted by length."""
        return learn.length_weighted_baseline(groups.rewards, groups.valid, groups.lengths)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the negative of each token's log-prob times its advantage."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
