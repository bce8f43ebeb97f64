# SPDX-License-Identifier: Apache-2.0
"""Group reward-Decoupled normalisation Policy Optimization (GDPO, arXiv 2601.05242): for several rewards.

    A_i = sum_k w_k (r_ik - mean(r_k)) / std(r_k),   then (A_i - mean) / std over the batch
    and GRPO's clipped surrogate

GRPO adds the rewards first, so different combinations of rewards can get equal advantages. GDPO normalises each reward
within its group before the sum. The batch's mean and std are over samples, as in the paper (verl: over tokens). They
need the whole batch, so training can't begin before a step's last rows have arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core import learn
from relax_core.api import Groups, Scope
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import ClippedOptions, ClippedPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class GDPOOptions(ClippedOptions):
    """Options of GDPO; the defaults are the paper's, except `correction`."""

    weights: dict[str, float] = {}
    """Weight w_k of each reward by the reward's name; a missing name has weight 1. The weights in `[[rewards]]` scale
    only the logged rewards, because normalisation removes them from advantages."""
    aggregation: Aggregation = "sequence"
    """Aggregation of the tokens' losses. `sequence`: mean over each sequence, then over sequences. `token`, `sum`,
    `fixed` and `trajectory` mean the same as in `grpo`."""


class GDPO(ClippedPolicyGradient[GDPOOptions]):
    """GRPO with several rewards, each normalised separately."""

    paper = "arXiv 2601.05242"
    statistics = Scope.BATCH

    def credit(self, groups: Groups) -> Tensor:
        """Return the weighted sum of the rewards, each normalised within its group; normalise the sum over the batch.

        If samples have only a total reward, use that. Raises ValueError if `weights` names an unknown reward.
        """
        unknown = sorted(set(self.options.weights) - set(groups.parts)) if groups.parts else []
        if unknown:
            raise ValueError(f"weights: got {', '.join(unknown)}; use names of {', '.join(sorted(groups.parts))}")
        parts = groups.parts or {"reward": groups.rewards}
        return learn.whiten(learn.per_reward(parts, groups.valid, self.options.weights), groups.valid)
