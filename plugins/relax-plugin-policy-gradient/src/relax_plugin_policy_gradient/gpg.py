# SPDX-License-Identifier: Apache-2.0
"""Group Policy Gradient (Chu et al., GPG, arXiv 2504.02546).

    J = E[ 1/(sum_i |o_i|) sum_i sum_t log p_it alpha A_i ],   A_i = (r_i - mean(r)) / F_norm, F_norm = 1
    alpha = B / (B - M): B samples in the batch, M of them in groups whose rewards are all equal

alpha compensates for the M samples without a gradient, which the mean still counts (verl counts samples with reward 0
instead). alpha needs the whole batch, so training can't begin before a step's last rows have arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core import learn
from relax_core.api import Groups, Scope
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import PlainOptions, PlainPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class GPGOptions(PlainOptions):
    """Options of GPG; the defaults are the paper's, except `correction`."""

    aggregation: Aggregation = "token"
    """Aggregation of the tokens' losses. `token` (the paper): mean over all tokens. `sequence`, `sum`, `fixed` and
    `trajectory` mean the same as in `grpo`."""


class GPG(PlainPolicyGradient[GPGOptions]):
    """The plain policy gradient, without a surrogate or a reference model."""

    paper = "arXiv 2504.02546"
    statistics = Scope.BATCH

    def credit(self, groups: Groups) -> Tensor:
        """Return the reward minus the group's mean, times the batch's alpha."""
        telling = (groups.valid & learn.informative(groups.rewards, groups.valid)[:, None]).sum()
        alpha = groups.valid.sum().to(groups.rewards.dtype) / telling.clamp(min=1)
        return learn.group_mean(groups.rewards, groups.valid) * alpha
