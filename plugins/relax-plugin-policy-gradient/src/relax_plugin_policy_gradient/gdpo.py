# SPDX-License-Identifier: Apache-2.0
"""Group reward-Decoupled normalisation Policy Optimization (GDPO, arXiv 2601.05242): for several rewards.

    A_i = sum_k w_k (r_ik - mean(r_k)) / std(r_k),   then (A_i - mean) / std over the batch
    and GRPO's clipped surrogate

GRPO adds the rewards first, so different combinations of rewards can get equal advantages. GDPO normalises each reward
within its group before the sum. The rewards are those of `[[rewards]]`, and w_k is the reward's weight: a negative
weight is a penalty, and a reward of weight 0 is only logged. A reward that does not apply to a task is left out there.
The environment's reward, and the parts of a score, are trained only if `weights` names them.

The batch's mean and std are over samples, as in the paper (verl: over tokens). The mean of sums of centred rewards is 0,
so it is not subtracted. The std needs the whole batch, so training can't begin before a step's last rows have arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from relax_core import learn
from relax_core.api import Groups, Scope
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import ClippedOptions, ClippedPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class GDPOOptions(ClippedOptions):
    """Options of GDPO; the defaults are the paper's, except `correction`."""

    weights: dict[str, float] = {}
    """Weights w_k that replace or extend those of `[[rewards]]`. A key is the name of a reward, `REWARD/PART` for a part
    of its score, or `environment` for the environment's own reward. A negative weight is a penalty; 0: not trained.
    """
    aggregation: Aggregation = "trajectory"
    """Aggregation of the tokens' losses. `trajectory`: mean over the tokens of all rows of a sample, then over samples.
    `sequence`, `token`, `sum` and `fixed` mean the same as in `grpo`."""

    @model_validator(mode="after")
    def _divergence_has_a_place(self) -> Self:
        if self.reward_kl_coef:
            got = f"reward_kl_coef: got {self.reward_kl_coef}"
            raise ValueError(f"{got}; gdpo reads each reward by itself, and not their sum: use kl_coef")
        return self


class GDPO(ClippedPolicyGradient[GDPOOptions]):
    """GRPO with several rewards, each normalised separately."""

    paper = "arXiv 2601.05242"
    statistics = Scope.BATCH

    def reward_names(self) -> frozenset[str]:
        return frozenset(self.options.weights)

    def credit(self, groups: Groups) -> Tensor:
        """Return the weighted sum of the rewards, each normalised within its group; normalise the sum over the batch.

        Without `[[rewards]]` and `weights`, the only reward is the sample's total.
        """
        weights = {**groups.weights, **self.options.weights}
        parts = {name: groups.parts[name] for name in weights if name in groups.parts}
        if not weights:
            weights, parts = {"total": 1.0}, {"total": groups.rewards}
        return learn.over_batch_std(learn.per_reward(parts, groups.valid, weights), groups.valid)
