# SPDX-License-Identifier: Apache-2.0
"""Proximal Policy Optimization (Schulman et al., arXiv 1707.06347) with a critic and GAE (arXiv 1506.02438).

    A_t = sum_l (gamma lambda)^l d_(t+l),   d_t = r_t + gamma V_(t+1) - V_t,   R_t = A_t + V_t           (GAE, eq. 16)
    J   = E[ min(r_t A_t, clip(r_t, 1 - e, 1 + e) A_t) ]                                                  (eq. 7)
    L_V = 1/2 E[ max((V - R_t)^2, (clip(V, V_old - c, V_old + c) - R_t)^2) ]

V_t in GAE, and V_old in L_V, are values from the critic version that scored the row. R_t is computed before advantages
are normalised over the batch. The last token of a row gets the row's reward. `reward_kl_coef` reduces each token's
reward by the token's divergence from the reference (k1), as in InstructGPT. The critic is a separate model with its own
optimizer, so L_V needs no weight relative to J.

A critic without `critic.path` starts with values of 0. Therefore lambda is 1 by default, as in verl: with 0.95, the
first 85 % of an answer of 1000 tokens would get no credit for its reward until the critic has learnt. The critic
learns at `critic.lr`, faster than the policy, and `critic.warmup_steps` trains it before the policy.
"""

from __future__ import annotations

from pydantic import Field

from relax_core import learn
from relax_core.api import Advantages, Column, Groups, Loss, LossBatch, PolicyOutputs, Scope, Term
from relax_core.api.batch import RETURNS, VALUES
from relax_core.learn.policy_gradient import ClippedOptions, ClippedPolicyGradient


class PPOOptions(ClippedOptions):
    """Options of PPO; by default, rewards are neither discounted nor bootstrapped: answers are judged at their end."""

    value_clip: float = Field(0.2, ge=0.0)
    """Clip range c in L_V: the critic gains nothing by moving a value further than c from V_old; 0: no clipping."""
    gamma: float = Field(1.0, gt=0.0, le=1.0)
    """Discount factor per token for the rewards of later tokens."""
    lam: float = Field(1.0, ge=0.0, le=1.0)
    """GAE's lambda: 1 uses all rewards to the row's end, 0 only the next token's value from the critic. A lambda below 1
    needs a trained critic: with values of 0, a reward reaches a token only by the factor lam^(tokens to the end)."""
    normalise: bool = True
    """Normalise advantages by the mean and standard deviation of the batch."""


class PPO(ClippedPolicyGradient[PPOOptions]):
    """The clipped surrogate with a critic's values as baseline; one sample per prompt is enough."""

    paper = "arXiv 1707.06347"
    statistics = Scope.BATCH
    min_group_size = 1
    fits = ("critic",)

    def advantage_columns(self) -> frozenset[Column]:
        return super().advantage_columns() | {VALUES}

    def fit_columns(self, fit: str) -> frozenset[Column]:
        return frozenset({VALUES, RETURNS})

    def advantages(self, groups: Groups) -> Advantages:
        """Return advantages [tokens] by GAE over each row, and the critic's targets R_t [tokens]."""
        options, mask = self.options, groups.token_columns["loss_mask"].bool()
        earned = learn.token_rewards(groups, options.reward_kl_coef)
        values = groups.token_columns["values"].to(earned.dtype)
        advantages, returns = learn.gae(earned, values, mask, groups.row_lengths, options.gamma, options.lam)
        judged = mask & learn.of_samples(groups.valid, groups)
        advantages, returns = advantages * judged, values.where(mask & ~judged, returns)
        if options.normalise:
            advantages = learn.whiten(advantages, judged)
        return Advantages(advantages, returns)

    def fit_loss(self, fit: str, batch: LossBatch, outputs: PolicyOutputs) -> Loss:
        """Return L_V, averaged over all tokens."""
        values, old, returns = outputs.output("values"), batch.column("values"), batch.column("returns")
        loss, bound = learn.clipped_value_loss(values, old, returns, self.options.value_clip)
        mask = batch.loss_mask
        return Loss({"value": Term(loss, 0.5)}, {"critic/clip_fraction": ((bound & mask).sum(), mask.sum())})
