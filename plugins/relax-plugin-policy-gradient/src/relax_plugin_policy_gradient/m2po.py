# SPDX-License-Identifier: Apache-2.0
"""Second-Moment Trust Policy Optimization (Zheng et al., M2PO, arXiv 2510.01161).

    J  = E[ 1/(sum_i |o_i|) sum_i sum_t M_it r_it A_it ],   r = p / p_behaviour
    M2 = mean of (log r)^2 over the tokens that move away: A > 0 and r > 1, or A < 0 and r < 1

M masks as few of these tokens as bring M2 of the rest down to `second_moment`, those with the largest |log r| first.
The bound is on the batch, so stale samples keep their rare, informative tokens, which per-token clipping would drop
first. M leaves tokens whose probability moves back, however large their ratio, so r is at most `ratio_cap` (not in the
paper). M is computed once per step, for the policy at the step's start and all rows; the authors' code computes M for
each update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from relax_core import learn
from relax_core.api import Column, LossBatch, PolicyOutputs
from relax_core.api.batch import OLD_LOG_PROBS, ROLLOUT_LOG_PROBS
from relax_core.learn.policy_gradient import PolicyGradient, PolicyGradientOptions, Surrogate

if TYPE_CHECKING:
    from torch import Tensor

TRUSTED = Column("trusted")


class M2POOptions(PolicyGradientOptions):
    """Options of M2PO; the defaults are the paper's, except `ratio_cap`."""

    second_moment: float = Field(0.04, gt=0.0)
    """Maximum of M2, the mean of (log r)^2 over unmasked tokens that move away; 0.04 throughout the paper."""
    ratio_cap: float = Field(20.0, gt=1.0)
    """Maximum ratio r as a weight. A token with a larger ratio keeps a gradient, of this weight."""
    correction: Literal["behaviour"] = "behaviour"
    """The ratio always refers to the policy that sampled."""


class M2PO(PolicyGradient[M2POOptions]):
    """GRPO's advantages with a trust region over the batch instead of per-token clipping."""

    paper = "arXiv 2510.01161"

    def columns(self) -> frozenset[Column]:
        return super().columns() | {OLD_LOG_PROBS, ROLLOUT_LOG_PROBS}

    def prepared(self) -> frozenset[Column]:
        return frozenset({TRUSTED})

    def prepare(self, batch: LossBatch) -> Mapping[str, Tensor]:
        """Return M [tokens]: 1 for a token that keeps its gradient, 0 for a masked token."""
        log_ratio = batch.column("old_log_probs") - batch.column("rollout_log_probs")
        away = batch.loss_mask & (log_ratio * batch.advantages > 0)
        kept = learn.second_moment_mask(log_ratio, away, self.options.second_moment)
        return {TRUSTED.name: kept.to(log_ratio.dtype)}

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the negative of ratio times advantage where M = 1, else 0."""
        trusted, ratio = batch.column(TRUSTED.name), learn.log_ratio(batch, policy.log_probs, anchor).exp()
        ratio = learn.capped(ratio, self.options.ratio_cap)
        return Surrogate(-ratio * batch.advantages * trusted, trusted == 0)
