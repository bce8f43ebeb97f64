# SPDX-License-Identifier: Apache-2.0
"""On-Policy RL with Optimal reward baseline (Hao et al., OPO, arXiv 2505.23585).

    gradient of J = E[ (R_i - b*) grad log p(y_i | x) ],   b* = sum_i l_i R_i / sum_i l_i

b* gives the least variance if the squared gradient of an answer grows with the answer's length l. This holds only
on-policy: one update per step, staleness 0. The correction then compensates only for the engine's rounding.
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
    """Options of OPO; the defaults are the paper's, except `correction`."""

    aggregation: Aggregation = "sum"
    """Aggregation of the tokens' losses. `sum`: sum over each sequence, then mean over sequences. `sequence`, `token`,
    `fixed` and `trajectory` mean the same as in `grpo`."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """Weight of tokens, to correct for an older version or an engine that rounds differently. w is a token's probability
    at the step's start over that under the policy that sampled. `truncate`: min(w, `correction_cap`); `mask`: w between
    `correction_floor` and `correction_cap`, else 0; `reject`: 1 between them, else 0; `none`: 1."""


class OPO(PolicyGradient[OPOOptions]):
    """On-policy REINFORCE with the baseline of least variance."""

    paper = "arXiv 2505.23585"
    min_group_size = 2
    has_ratio = False
    max_staleness = 0

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus b*, the group's mean reward weighted by the length of answers."""
        return learn.length_weighted_baseline(groups.rewards, groups.valid, groups.lengths)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the negative of each token's log-prob times its advantage."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
