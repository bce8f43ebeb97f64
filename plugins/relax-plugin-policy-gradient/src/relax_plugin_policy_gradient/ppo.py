# SPDX-License-Identifier: Apache-2.0
"""Proximal Policy Optimization (Schulman et al., arXiv 1707.06347) with a critic and GAE (arXiv 1506.02438).

    A_t = sum_l (gamma lambda)^l d_(t+l),   d_t = r_t + gamma V_(t+1) - V_t,   R_t = A_t + V_t           (GAE, eq. 16)
    J   = E[ min(r_t A_t, clip(r_t, 1 - e, 1 + e) A_t) ]                                                  (eq. 7)
    L_V = 1/2 E[ max((V - R_t)^2, (clip(V, V_old - c, V_old + c) - R_t)^2) ]

V is of the critic that valued the row, R_t is taken before advantages are normalised over the batch. A row's reward is
earned at its last token; with `reward_kl_coef` each token also loses its divergence from the reference (k1), as in
InstructGPT. The critic is a model of its own with its own optimizer, so L_V needs no weight against J.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from relax_core import learn
from relax_core.api import Advantages, Column, Groups, Loss, LossBatch, PolicyOutputs, Scope, Term
from relax_core.api.batch import RETURNS, VALUES
from relax_core.learn.policy_gradient import ClippedOptions, PolicyGradient, Surrogate, clipped_ratio

if TYPE_CHECKING:
    from torch import Tensor


class PPOOptions(ClippedOptions):
    """Undiscounted, as answers are judged at their end."""

    value_clip: float = Field(0.2, ge=0.0)
    """A value gains nothing by going further than this from the one that the advantages were made with; 0: no bound."""
    gamma: float = Field(1.0, gt=0.0, le=1.0)
    """Discount of what later tokens earn."""
    lam: float = Field(0.95, ge=0.0, le=1.0)
    """GAE's lambda: 1 trusts what was earned, 0 the critic's next value."""
    normalise: bool = True
    """Take off the mean of the batch's advantages and divide by their standard deviation."""


class PPO(PolicyGradient[PPOOptions]):
    """The critic's values are the baseline: one sample a prompt is enough."""

    paper = "arXiv 1707.06347"
    statistics = Scope.BATCH
    fits = ("critic",)

    def advantage_columns(self) -> frozenset[Column]:
        return super().advantage_columns() | {VALUES}

    def fit_columns(self, fit: str) -> frozenset[Column]:
        return frozenset({VALUES, RETURNS})

    def advantages(self, groups: Groups) -> Advantages:
        """GAE of each row, and the critic's targets."""
        columns, lengths = groups.token_columns, groups.row_lengths
        mask = columns["loss_mask"].bool()
        earned = learn.at_last_token(groups.rewards.reshape(-1)[groups.row_sample], mask, lengths)
        if self.options.reward_kl_coef:
            divergence = learn.kl_k1(columns["rollout_log_probs"], columns["ref_log_probs"]).to(earned.dtype)
            earned = earned - self.options.reward_kl_coef * divergence
        values = columns["values"].to(earned.dtype)
        advantages, returns = learn.gae(earned, values, mask, lengths, self.options.gamma, self.options.lam)
        judged = mask & groups.valid.reshape(-1)[groups.row_sample].repeat_interleave(lengths)
        advantages, returns = advantages * judged, values.where(mask & ~judged, returns)
        if self.options.normalise:
            advantages = learn.whiten(advantages, judged)
        spread = self.options.aggregation == "trajectory"
        return Advantages(learn.per_trajectory(advantages, groups) if spread else advantages, returns)

    def credit(self, groups: Groups) -> Tensor:
        return self.advantages(groups).values

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Eq. 7 of each token."""
        ratio = learn.log_ratio(batch, policy.log_probs, anchor).exp()
        return clipped_ratio(self.options, ratio, batch.advantages)

    def fit_loss(self, fit: str, batch: LossBatch, outputs: PolicyOutputs) -> Loss:
        """L_V, the mean over all tokens."""
        values, old, returns = outputs.output("values"), batch.column("values"), batch.column("returns")
        loss, bound = learn.clipped_value_loss(values, old, returns, self.options.value_clip)
        mask = batch.loss_mask
        return Loss({"value": Term(loss, 0.5)}, {"critic/clip_fraction": ((bound & mask).sum(), mask.sum())})
