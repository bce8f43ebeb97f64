# SPDX-License-Identifier: Apache-2.0
"""The common base of policy-gradient algorithms: options, columns and the sum of terms.

An algorithm is a credit and a surrogate, and defines only the part that is new:

    class Mine(ClippedPolicyGradient[ClippedOptions]):        # or PlainPolicyGradient[PlainOptions]
        def credit(self, groups): ...                         # rewards to advantages

    class Mine(PolicyGradient[MineOptions]):                  # credits as GRPO does
        def surrogate(self, batch, policy, anchor): ...       # the loss of each token

Off-policy corrections, the divergence from a reference, entropy and aggregation come from options that mean the same in
every algorithm. This module loads no torch until it computes. Algorithms of a different shape derive from `Algorithm`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import Field, model_validator

from relax_core import learn
from relax_core.api.algorithm import (
    ENTROPY,
    LOG_PROBS,
    Advantages,
    Algorithm,
    Groups,
    Loss,
    LossBatch,
    Output,
    PolicyOutputs,
    Term,
)
from relax_core.api.batch import (
    ADVANTAGES,
    CONTEXTS,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    ROLLOUT_LOG_PROBS,
    STATES,
    STEP_REWARDS,
    TURNS,
    Column,
)
from relax_core.api.errors import ConfigError
from relax_core.api.files import load_function
from relax_core.api.options import Options
from relax_core.learn.counts import DENOMINATOR, MAX_LOG_RATIO, Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.learn.off_policy import Level

WEIGHS = ("truncate", "mask", "reject")
"""Corrections that weigh a token by w, the policy at the step's start over the policy that sampled."""
Sums = dict[str, tuple["Tensor", "Tensor"]]


class PolicyGradientOptions(Options):
    """Options that mean the same in every algorithm; each algorithm sets its paper's values as defaults."""

    advantages: str | Path = ""
    """Function of your own that replaces the algorithm's credit, as `file.py:name` or `module:name`. It takes
    `relax_core.api.Groups`, with all data of turns and contexts, and returns an advantage for each sample [groups,
    samples] or for each token [tokens]. Empty: the algorithm's credit.
    """
    aggregation: Aggregation = "token"
    """Aggregation of the tokens' losses. `token`: mean over all tokens. `sequence`: mean over each sequence, then over
    sequences. `sum`: sum over each sequence, then mean over sequences. `fixed`: as `sum`, divided by `fixed_length`
    tokens. `trajectory`: mean over the tokens of all rows of a sample, then over samples. A sequence is a row; a sample
    has several rows if an agent branches or restarts its conversation.
    """
    fixed_length: int = Field(0, ge=0)
    """Tokens by which every sequence's sum is divided, with `aggregation = "fixed"`."""
    correction: Literal["truncate", "mask", "reject", "behaviour", "none"] = "behaviour"
    """Correction for samples of an older version, or of an engine that rounds differently. `behaviour`: take the ratio
    to the policy that sampled, so that its clip bounds the lag as well. The remaining values take the ratio to the
    policy that starts the step, and weigh a token by w, this policy's probability over that of the policy that sampled.
    `truncate`: by `min(w, cap)` (the decoupled objective). `mask`: by w, and 0 outside `floor .. cap`. `reject`: by 1,
    and 0 outside. `none`: no weight.
    """
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Level of w. `token`: each token's own w. `sequence`: their product. `geometric`: their geometric mean, which with
    `truncate` and `mask` is no importance weight of the sequence, but a bounded substitute of low variance."""
    correction_cap: float = Field(2.0, gt=0.0)
    """Upper bound of w. With `mask` and `reject`, tokens with a larger w have weight 0."""
    correction_floor: float = Field(0.0, ge=0.0)
    """Lower bound of w: `mask` and `reject` give weight 0 below. IcePop is `mask` with a floor of 0.5, a cap of 5."""
    sequence_mask_delta: float = Field(0.0, ge=0.0)
    """Largest mean of log(behaviour / policy) over a sequence with a negative advantage. Sequences above this bound are
    left out of the loss; 0: none.
    """
    kl_coef: float = Field(0.0, ge=0.0)
    """Weight of the divergence from the reference model in the loss; 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """Estimator of `kl_coef`'s divergence. `k1`: log p/q, whose gradient is 0 on average. `k2`: (log p/q)^2 / 2. `k3`:
    q/p - log(q/p) - 1. `unbiased`: k3 times the ratio to the policy that sampled, with every `correction`; its value
    and gradient are unbiased, also with lag.
    """
    reward_kl_coef: float = Field(0.0, ge=0.0)
    """Weight of the divergence from the reference model (k1) in the reward instead of the loss; excludes `kl_coef`. The
    divergence is that of the policy that sampled. With `rollout.top_p` below 1 or `rollout.top_k`, its log-probs are of
    the truncated distribution, and each token adds -log(mass) to the divergence: use `kl_coef` there.
    """
    entropy_coef: float = Field(0.0, ge=0.0)
    """Weight of an entropy bonus in the loss; 0: no bonus."""

    @model_validator(mode="after")
    def _every_option_has_an_effect(self) -> Self:
        if (self.aggregation == "fixed") != (self.fixed_length > 0):
            raise ValueError(
                f'fixed_length: got {self.fixed_length}; set it above 0 with aggregation = "fixed", else to 0'
            )
        if self.correction in ("behaviour", "none"):
            for name in ("correction_level", "correction_cap"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f'{name}: got {getattr(self, name)} with correction = "{self.correction}"; '
                                     'it has no effect there, leave it out or use "truncate"')  # fmt: skip
        bands = self.correction in ("mask", "reject")
        if self.correction_floor and not bands:
            raise ValueError(
                f'correction_floor: got {self.correction_floor}; it has no effect without correction "mask" or "reject"'
            )
        if bands and self.correction_floor >= self.correction_cap:
            raise ValueError(f"correction_floor: got {self.correction_floor}; set it below {self.correction_cap}")
        if not self.kl_coef and self.kl_estimator != type(self).model_fields["kl_estimator"].default:
            raise ValueError(f"kl_estimator: got {self.kl_estimator} with kl_coef = 0; set kl_coef or leave this out")
        if self.kl_coef and self.reward_kl_coef:
            raise ValueError(f"reward_kl_coef: got {self.reward_kl_coef} with kl_coef = {self.kl_coef}; keep one")
        return self


class ClippedOptions(PolicyGradientOptions):
    """Options of algorithms that clip the ratio."""

    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0.0)
    """Upper bound of the ratio is 1 + clip_high."""
    dual_clip: float = Field(3.0, ge=0.0)
    """Upper bound of the ratio for negative advantages, where `clip_high` has no effect; above 1 (Ye et al., arXiv
    1912.09729). Without a bound, a single token that the policy likes much better than the policy in the ratio's
    denominator outweighs the rest of a batch. 0: no bound.
    """

    @model_validator(mode="after")
    def _dual_clip_bounds_what_grows(self) -> Self:
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip: got {self.dual_clip}; ratios begin at 1: set a bound above 1, or 0 for none")
        return self


class PlainOptions(PolicyGradientOptions):
    """Options of algorithms without a ratio."""

    aggregation: Aggregation = "sum"
    """Aggregation of the tokens' losses. `sum`: sum over each sequence, then mean over sequences. `sequence`, `token`,
    `fixed` and `trajectory` mean the same as in `grpo`."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """Weight of tokens, to correct for an older version or an engine that rounds differently. w is a token's probability
    at the step's start over that under the policy that sampled. `truncate`: min(w, `correction_cap`); `mask`: w between
    `correction_floor` and `correction_cap`, else 0; `reject`: 1 between them, else 0; `none`: 1."""


PolicyGradientOptionsT = TypeVar("PolicyGradientOptionsT", bound=PolicyGradientOptions)
ClippedOptionsT = TypeVar("ClippedOptionsT", bound=ClippedOptions)
PlainOptionsT = TypeVar("PlainOptionsT", bound=PlainOptions)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The loss of each token of a chunk, as an algorithm computes it."""

    values: Tensor
    """Loss of each token, [tokens]: minus the surrogate objective."""
    clipped: Tensor | None = None
    """True for tokens at which a bound is active, bool [tokens]; None for a surrogate without bounds."""
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class PolicyGradient(Algorithm[PolicyGradientOptionsT], Generic[PolicyGradientOptionsT]):
    """An algorithm whose loss is a weighted surrogate, plus optional terms for divergence and entropy."""

    min_group_size: ClassVar[int] = 2
    """Smallest group with samples to compare; an algorithm whose credit compares no samples of a group sets 1."""
    has_ratio: ClassVar[bool] = True
    """True if the surrogate reads the anchor's log-probs."""

    def __init__(self, options: PolicyGradientOptionsT | None = None) -> None:
        super().__init__(options)
        place = str(self.options.advantages or "")
        if place and type(self).advantages is not PolicyGradient.advantages:
            fix = f"{type(self).__name__} defines its own advantages: take another algorithm, or leave the function out"
            raise ConfigError("algorithm.advantages", place, fix)
        self._own_credit: Callable[[Groups], Tensor] | None = (
            load_function("algorithm.advantages", place) if place else None
        )
        """The user's function that replaces `credit`; None if the option `advantages` is empty."""
        self.zero_advantage_skips = self.options.kl_coef == 0 and self.options.entropy_coef == 0
        self.denominators = frozenset({DENOMINATOR[self.options.aggregation]})

    def columns(self) -> frozenset[Column]:
        options, columns = self.options, {ADVANTAGES}
        weighs = options.correction in WEIGHS
        if weighs or options.correction == "behaviour" or options.sequence_mask_delta or self._unbiased:
            columns.add(ROLLOUT_LOG_PROBS)
        if weighs or (self.has_ratio and options.correction != "behaviour"):
            columns.add(OLD_LOG_PROBS)
        return frozenset(columns | ({REF_LOG_PROBS} if options.kl_coef else set()))

    def advantage_columns(self) -> frozenset[Column]:
        asked = {ROLLOUT_LOG_PROBS, REF_LOG_PROBS} if self.options.reward_kl_coef else set()
        return frozenset(asked | ({TURNS, STATES, CONTEXTS, STEP_REWARDS} if self.options.advantages else set()))

    def outputs(self) -> frozenset[Output]:
        return frozenset({LOG_PROBS} | ({ENTROPY} if self.options.entropy_coef else set()))

    # -- defined by each algorithm -------------------------------------------------------------------------------

    def credit(self, groups: Groups) -> Tensor:
        """Return advantages of samples [groups, samples], or of tokens [tokens].

        The default is GRPO's, the reward normalised within its group (arXiv 2402.03300, section 4.1.2).
        """
        return learn.group_mean_std(groups.rewards, groups.valid)

    @abstractmethod
    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the loss of each token; `anchor` [tokens] has log-probs of the policy in the ratio's denominator."""
        raise NotImplementedError

    # -- shared by all algorithms --------------------------------------------------------------------------------

    def advantages(self, groups: Groups) -> Advantages:
        """Return the advantages from `credit` or from the user's function.

        With `reward_kl_coef`, the divergence is first subtracted from the rewards.
        """
        if self.options.reward_kl_coef:
            rewards = learn.less_divergence(groups, self.options.reward_kl_coef)
            groups = replace(groups, rewards=rewards)
        values = self.credit(groups) if self._own_credit is None else self._own_credit(groups)
        if not hasattr(values, "shape"):
            source = "algorithm.advantages: the function" if self._own_credit else f"{type(self).__name__}.credit"
            got = type(values).__name__
            raise TypeError(f"{source} gave a {got}; give a tensor [groups, samples] or [tokens]")
        return Advantages(values)

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        options, mask = self.options, batch.loss_mask
        anchor = policy.log_probs.detach()  # no term needs the policy at the step's start: the ratio is 1 by definition
        if options.correction == "behaviour":
            anchor = batch.column("rollout_log_probs")
        elif OLD_LOG_PROBS in self.columns():
            anchor = batch.column("old_log_probs")
        surrogate = self.surrogate(batch, policy, anchor)
        weight, metrics = self._weight(batch, policy)
        terms = {"policy": self._term(batch, surrogate.values if weight is None else surrogate.values * weight)}
        count = mask.sum()
        log_ratio = learn.log_ratio(batch, policy.log_probs.detach(), anchor)
        ratio = log_ratio.exp()
        metrics |= {
            "policy/ratio_max": ((ratio * mask).max(), count.clamp(max=1)),
            "policy/approx_kl": (((ratio - 1 - log_ratio) * mask).sum(), count),
        }
        if surrogate.clipped is not None:
            metrics["policy/clip_fraction"] = ((surrogate.clipped & mask).sum(), count)
        if options.kl_coef:
            log_probs, reference = policy.log_probs.detach(), batch.column("ref_log_probs")
            metrics["policy/ref_kl"] = ((learn.kl_k3(log_probs, reference) * mask).sum(), count)
            metrics["policy/ref_kl_clamped"] = (((reference - log_probs > MAX_LOG_RATIO) & mask).sum(), count)
        if options.entropy_coef:
            metrics["policy/entropy"] = ((policy.output("entropy").detach() * mask).sum(), count)
        return Loss(terms | self._regularisers(batch, policy), metrics | dict(surrogate.metrics))

    def _regularisers(self, batch: LossBatch, policy: PolicyOutputs) -> dict[str, Term]:
        """Return the optional terms of the loss: divergence from the reference and entropy."""
        terms = {}
        if self.options.kl_coef:
            reference = batch.column("ref_log_probs")
            if self._unbiased:
                divergence = learn.kl_unbiased(policy.log_probs, reference, batch.column("rollout_log_probs"))
            else:
                estimates = {"k1": learn.kl_k1, "k2": learn.kl_k2, "k3": learn.kl_k3}
                divergence = estimates[self.options.kl_estimator](policy.log_probs, reference)
            terms["kl"] = self._term(batch, divergence, self.options.kl_coef)
        if self.options.entropy_coef:
            terms["entropy"] = self._term(batch, policy.output("entropy"), -self.options.entropy_coef)
        return terms

    def _term(self, batch: LossBatch, values: Tensor, weight: float = 1.0) -> Term:
        return learn.aggregate(batch, values, self.options.aggregation, weight, self.options.fixed_length)

    @property
    def _unbiased(self) -> bool:
        return self.options.kl_coef > 0 and self.options.kl_estimator == "unbiased"

    def _weight(self, batch: LossBatch, policy: PolicyOutputs) -> tuple[Tensor | None, Sums]:
        """Return each token's weight in the correction, None without a correction, and metrics of its effect."""
        options, mask = self.options, batch.loss_mask
        weight, metrics = None, Sums()
        if options.correction in WEIGHS:
            old, rollout = batch.column("old_log_probs"), batch.column("rollout_log_probs")
            ratio = learn.importance_ratio(batch, old, rollout, options.correction_level)
            if options.correction == "mask":
                weight = learn.mask_outside(ratio, options.correction_floor, options.correction_cap)
            elif options.correction == "reject":
                weight = learn.within(ratio, options.correction_floor, options.correction_cap).to(ratio.dtype)
            else:
                weight = learn.truncate(ratio, options.correction_cap)
            count = mask.sum()
            metrics = {
                "policy/importance_weight": ((weight * mask).sum(), count),
                "policy/importance_weight_max": ((ratio * mask).max(), count.clamp(max=1)),
                "policy/importance_clipped": ((((weight == 0) | (ratio > options.correction_cap)) & mask).sum(), count),
            }
        if options.sequence_mask_delta:
            rollout = batch.column("rollout_log_probs")
            delta = options.sequence_mask_delta
            kept = learn.off_policy_sequence_mask(batch, policy.log_probs, rollout, batch.advantages, delta)
            metrics["policy/sequence_masked"] = ((~kept & mask).sum(), mask.sum())
            weight = kept.to(policy.log_probs.dtype) if weight is None else weight * kept
        return weight, metrics


class ClippedPolicyGradient(PolicyGradient[ClippedOptionsT], Generic[ClippedOptionsT]):
    """A policy gradient with PPO's surrogate, which clips the ratio (arXiv 1707.06347, eq. 7)."""

    ratio_level: ClassVar[Level] = "token"
    """Level of the ratio: of each token, or the product (`sequence`) or geometric mean (`geometric`) of its row."""

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the clipped surrogate of each token."""
        options, ratio = self.options, learn.log_ratio(batch, policy.log_probs, anchor, self.ratio_level).exp()
        bounds = options.clip_low, options.clip_high, options.dual_clip
        values = learn.clipped_surrogate(ratio, batch.advantages, *bounds)
        outside = learn.clipped(ratio.detach(), batch.advantages, *bounds)
        if self.ratio_level == "token":
            return Surrogate(values, outside)
        # The shares of sequences whose tokens are all clipped, by the sign of the sequence's advantage.
        credit = batch.sequence_mean(batch.advantages)
        gone = batch.sequence_mean(outside.to(credit.dtype)) == 1
        shares = {
            f"policy/sequences_clipped_{sign}": ((gone & chosen).sum(), chosen.sum())
            for sign, chosen in (("positive", credit > 0), ("negative", credit < 0))
        }
        return Surrogate(values, outside, shares)


class PlainPolicyGradient(PolicyGradient[PlainOptionsT], Generic[PlainOptionsT]):
    """A policy gradient without a ratio: the surrogate is the log-prob times the advantage (Williams 1992)."""

    has_ratio = False
    max_updates_per_step = 1  # later updates would have neither a ratio nor a bound on the policy's change

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Return the negative of each token's log-prob times its advantage."""
        return Surrogate(learn.reinforce(policy.log_probs, batch.advantages))
