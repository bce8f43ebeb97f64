# SPDX-License-Identifier: Apache-2.0
"""Second-Moment Trust Policy Optimization (Zheng et al., M2PO, arXiv 2510.01161).

    J  = E[ 1/(sum_i |o_i|) sum_i sum_t M_it r_it A_it ],   r = p / p_behaviour
    M2 = mean of (log r)^2 over the tokens that move away: A > 0 and r > 1, or A < 0 and r < 1

M leaves out the tokens that move away furthest, as few as bring M2 of the others to `second_moment`: the bound is on the
batch, so stale samples keep their rare, informative tokens, which a clip of each token would take first. M is chosen
once a step, at its starting policy, over all rows; the authors' code chooses it for each update anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from relax_core import learn
from relax_core.api import Column, Groups, LossBatch, PolicyOutputs
from relax_core.api.batch import OLD_LOG_PROBS, ROLLOUT_LOG_PROBS
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor

TRUSTED = Column("trusted")


class M2POOptions(PolicyGradientOptions):
    """The paper's setting."""

    second_moment: float = Field(0.04, gt=0.0)
    """Largest mean of (log r)^2 over the tokens that move away from what sampled them; 0.04 in all of the paper."""
    correction: Literal["behaviour"] = "behaviour"
    """The ratio is to the policy that sampled."""


class M2PO(PolicyGradient[M2POOptions]):
    """GRPO's advantages, and a trust region of the batch in place of a clip of each token."""

    paper = "arXiv 2510.01161"
    min_group_size = 2

    def columns(self) -> frozenset[Column]:
        return super().columns() | {OLD_LOG_PROBS, ROLLOUT_LOG_PROBS}

    def prepared(self) -> frozenset[Column]:
        return frozenset({TRUSTED})

    def prepare(self, batch: LossBatch) -> Mapping[str, Tensor]:
        """M, 1 where a token is trained."""
        log_ratio = batch.column("old_log_probs") - batch.column("rollout_log_probs")
        away = batch.loss_mask & (log_ratio * batch.advantages > 0)
        kept = learn.second_moment_mask(log_ratio, away, self.options.second_moment)
        return {TRUSTED.name: kept.to(log_ratio.dtype)}

    def credit(self, groups: Groups) -> Tensor:
        return learn.group_mean_std(groups.rewards, groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """The ratio times the advantage, where M trusts it."""
        trusted, ratio = batch.column(TRUSTED.name), learn.log_ratio(batch, policy.log_probs, anchor).exp()
        return Surrogate(-ratio * batch.advantages * trusted, trusted == 0)
