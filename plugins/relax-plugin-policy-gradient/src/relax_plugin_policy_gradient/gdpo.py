# SPDX-License-Identifier: Apache-2.0
"""Group reward-Decoupled normalisation Policy Optimization (GDPO, arXiv 2601.05242): for several rewards.

    A_i = sum_k w_k (r_ik - mean(r_k)) / std(r_k),   then (A_i - mean) / std over the batch
    and GRPO's clipped surrogate

Adding rewards first, as GRPO does, gives equal advantages to different combinations; each is normalised in its group
before. The batch's mean and std are over samples, as the paper writes (verl's over tokens); they turn streaming off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs, Scope
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import ClippedOptions, PolicyGradient, Surrogate, clipped_ratio

if TYPE_CHECKING:
    from torch import Tensor


class GDPOOptions(ClippedOptions):
    """The paper's setting, apart from the correction; the surrogate is GRPO's."""

    weights: dict[str, float] = {}
    """Weight of a reward by its name, 1 where it is not named: the weights of `[[rewards]]` scale what is shown, and a
    normalised reward has lost its scale."""
    aggregation: Aggregation = "sequence"
    """As in every algorithm: `sequence`, `token`, `sum`, `fixed` or `trajectory`."""


class GDPO(PolicyGradient[GDPOOptions]):
    """Every reward has its own scale."""

    paper = "arXiv 2601.05242"
    min_group_size = 2
    statistics = Scope.BATCH

    def credit(self, groups: Groups) -> Tensor:
        """Each reward within its group, their sum over the batch; with one reward alone, that one."""
        unknown = sorted(set(self.options.weights) - set(groups.parts)) if groups.parts else []
        if unknown:
            raise ValueError(f"weights: got {', '.join(unknown)}; the rewards are {', '.join(sorted(groups.parts))}")
        parts = groups.parts or {"reward": groups.rewards}
        return learn.whiten(learn.per_reward(parts, groups.valid, self.options.weights), groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The clipped surrogate of each token."""
        ratio = learn.log_ratio(batch, policy.log_probs, anchor).exp()
        return clipped_ratio(self.options, ratio, batch.advantages)
