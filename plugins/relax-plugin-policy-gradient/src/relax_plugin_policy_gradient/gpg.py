# SPDX-License-Identifier: Apache-2.0
"""Group Policy Gradient (Chu et al., GPG, arXiv 2504.02546).

    J = E[ 1/(sum_i |o_i|) sum_i sum_t log p_it alpha A_i ],   A_i = (r_i - mean(r)) / F_norm, F_norm = 1
    alpha = B / (B - M): B samples in the batch, M of them in groups whose rewards are all equal

alpha compensates for the M samples without a gradient, which the mean still counts (verl counts samples with reward 0
instead). alpha needs the whole batch, so training can't begin before a step's last rows have arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs, Scope
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class GPGOptions(PolicyGradientOptions):
    """Options of GPG; the defaults are the paper's, except `correction`."""

    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """Weight of tokens, to correct for an older version or an engine that rounds differently. w is a token's probability
    at the step's start over that under the policy that sampled. `truncate`: min(w, `correction_cap`); `mask`: w between
    `correction_floor` and `correction_cap`, else 0; `reject`: 1 between them, else 0; `none`: 1."""


class GPG(PolicyGradient[GPGOptions]):
    """The plain policy gradient, without a surrogate or a reference model."""

    paper = "arXiv 2504.02546"
    min_group_size = 2
    statistics = Scope.BATCH
    has_ratio = False

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus the group's mean, times the batch's alpha."""
        telling = (groups.valid & learn.informative(groups.rewards, groups.valid)[:, None]).sum()
        alpha = groups.valid.sum().to(groups.rewards.dtype) / telling.clamp(min=1)
        return learn.group_mean(groups.rewards, groups.valid) * alpha

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the negative of each token's log-prob times its advantage."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
