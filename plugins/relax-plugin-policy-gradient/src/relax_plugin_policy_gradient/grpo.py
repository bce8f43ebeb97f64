# SPDX-License-Identifier: Apache-2.0
"""Group Relative Policy Optimization (Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from relax_core import learn
from relax_core.api import (
    ADVANTAGES,
    ENTROPY,
    LOG_PROBS,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    Advantages,
    Algorithm,
    Column,
    Groups,
    Loss,
    LossBatch,
    Options,
    Output,
    PolicyOutputs,
    Scope,
    Source,
    Term,
)

if TYPE_CHECKING:
    from torch import Tensor


class GRPOOptions(Options):
    """The paper's setting, apart from `kl_coef` (0.04 there, with a reference model in memory)."""

    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0.0)
    """Upper bound of the ratio is 1 + clip_high."""
    kl_coef: float = Field(0.0, ge=0.0)
    """Weight of the divergence from the reference model; 0 needs no reference."""
    aggregation: Literal["sequence", "token", "fixed"] = "sequence"
    """Mean over each sequence, then over sequences (the paper); over all tokens; or by `fixed_length` tokens a sequence."""
    fixed_length: int = Field(0, ge=0)
    """Tokens that every sequence counts as, with `aggregation = "fixed"`."""
    entropy_coef: float = Field(0.0, ge=0.0)
    """Weight of an entropy bonus."""

    @model_validator(mode="after")
    def _length_belongs_to_fixed(self) -> Self:
        if (self.aggregation == "fixed") != (self.fixed_length > 0):
            raise ValueError(
                f'fixed_length: got {self.fixed_length}; set it above 0 with aggregation = "fixed" and only there'
            )
        return self


class GRPO(Algorithm[GRPOOptions]):
    """No critic: a sample's advantage is how its reward compares with those of the same prompt."""

    source, statistics = Source.ROLLOUT, Scope.GROUP
    paper = "arXiv 2402.03300"
    min_group_size = 2

    def __init__(self, options: GRPOOptions | None = None) -> None:
        super().__init__(options)
        self.zero_advantage_skips = self.options.kl_coef == 0 and self.options.entropy_coef == 0

    def columns(self) -> frozenset[Column]:
        return frozenset({ADVANTAGES, OLD_LOG_PROBS} | ({REF_LOG_PROBS} if self.options.kl_coef else set()))

    def outputs(self) -> frozenset[Output]:
        return frozenset({LOG_PROBS} | ({ENTROPY} if self.options.entropy_coef else set()))

    def advantages(self, groups: Groups) -> Advantages:
        """Section 4.1.2, outcome supervision: `A_i = (r_i - mean(r)) / std(r)` for every token of sample i."""
        return Advantages(learn.group_mean_std(groups.rewards, groups.valid))

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        """Minus the objective of eq. 3: the clipped surrogate, less `kl_coef` times the divergence of eq. 4."""
        options, advantages = self.options, batch.advantages
        log_ratio = policy.log_probs - batch.column("old_log_probs")
        ratio = log_ratio.exp()
        surrogate = learn.clipped_surrogate(ratio, advantages, options.clip_low, options.clip_high)
        terms = {"policy": self._mean(batch, surrogate)}
        if options.kl_coef:
            kl = learn.kl_k3(policy.log_probs, batch.column("ref_log_probs"))
            terms["kl"] = self._mean(batch, kl, options.kl_coef)
        if options.entropy_coef:
            terms["entropy"] = self._mean(batch, policy.output("entropy"), -options.entropy_coef)
        return Loss(terms, self._metrics(batch, policy, ratio.detach(), log_ratio.detach()))

    def _mean(self, batch: LossBatch, values: Tensor, weight: float = 1.0) -> Term:
        """Eq. 3 averages over the tokens of a sequence, then over sequences; the other two are deviations."""
        if self.options.aggregation == "token":
            return Term(values, weight, "tokens")
        if self.options.aggregation == "fixed":
            return Term(values, weight / self.options.fixed_length, "rows")
        return Term(batch.sequence_mean(values), weight, "rows", per="row")

    def _metrics(
        self, batch: LossBatch, policy: PolicyOutputs, ratio: Tensor, log_ratio: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        mask, options = batch.loss_mask, self.options
        count = mask.sum()
        clipped = learn.clipped(ratio, batch.advantages, options.clip_low, options.clip_high)
        metrics = {
            "policy/clip_fraction": ((clipped & mask).sum(), count),
            "policy/ratio_max": ((ratio * mask).max(), count.clamp(max=1)),
            "policy/approx_kl": (((ratio - 1 - log_ratio) * mask).sum(), count),
        }
        if options.kl_coef:
            metrics["policy/ref_kl"] = (
                (learn.kl_k3(policy.log_probs.detach(), batch.column("ref_log_probs")) * mask).sum(),
                count,
            )
        if options.entropy_coef:
            metrics["policy/entropy"] = ((policy.output("entropy").detach() * mask).sum(), count)
        return metrics
