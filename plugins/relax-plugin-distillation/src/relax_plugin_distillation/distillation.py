# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation (Agarwal et al., GKD, arXiv 2306.13649): policy q learns from teacher p on its own samples.

    L(q) = E_{y ~ q} [ 1/|y| sum_t D(p || q)(y_t | y_<t, x) ]                                          (eq. 2, lambda = 1)

D is KL(q || p), KL(p || q) or the generalised JSD (eq. 1). If `mode` is "loss", D is the loss: over the k likeliest
tokens of policy or teacher, or estimated from the sampled token. If `mode` is "advantage", each sampled token's term of
D gives the token's advantage. For KL(q || p) this is log p - log q, as in Thinking Machines' "On-Policy Distillation"
(2025, `discount = 0`) and MiniLLM (arXiv 2306.08543, eq. 4, which sums over later tokens: `discount = 1`). Log-probs
are of logits / `rollout.temperature`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from relax_core import learn
from relax_core.api import (
    ADVANTAGES,
    REF_LOG_PROBS,
    ROLLOUT_LOG_PROBS,
    TEACHER_LOG_PROBS,
    Column,
    Groups,
    Loss,
    LossBatch,
    Output,
    PolicyOutputs,
    log_probs_at,
    student_top_k_ids,
    teacher_log_probs_at,
    teacher_top_k,
)
from relax_core.learn.policy_gradient import ClippedPolicyGradient, Sums
from relax_plugin_distillation.options import DistillationOptions

if TYPE_CHECKING:
    from torch import Tensor


class Distillation(ClippedPolicyGradient[DistillationOptions]):
    """On-policy distillation: a teacher model scores every token that the policy samples."""

    paper = "arXiv 2306.13649"
    reads_rewards = False
    min_group_size = 1

    def __init__(self, options: DistillationOptions | None = None) -> None:
        super().__init__(options)
        self.reads_rewards = self.options.reward_coef > 0
        self.zero_advantage_skips = self.zero_advantage_skips and self.options.mode == "advantage"

    def columns(self) -> frozenset[Column]:
        own = {ADVANTAGES, *self._teacher()}
        if self.options.samples:
            return super().columns() | own
        unbiased = {ROLLOUT_LOG_PROBS} if self._unbiased else set()
        return frozenset(own | unbiased | ({REF_LOG_PROBS} if self.options.kl_coef else set()))

    def advantage_columns(self) -> frozenset[Column]:
        compared = {ROLLOUT_LOG_PROBS, TEACHER_LOG_PROBS} if self.options.mode == "advantage" else set()
        return super().advantage_columns() | compared

    def outputs(self) -> frozenset[Output]:
        ids = self._ids()
        return super().outputs() | ({log_probs_at(ids)} if ids else set())

    # -- mode = "advantage" --------------------------------------------------------------------------------------

    def credit(self, groups: Groups) -> Tensor:
        """Return advantages [tokens]: the teacher's term plus the weighted reward, normalised within the group.

        If `mode` is "loss", return only the weighted rewards, [groups, samples].
        """
        options = self.options
        rewards = options.reward_coef * learn.group_mean_std(groups.rewards, groups.valid)
        if options.mode == "loss":
            return rewards
        columns = groups.token_columns
        mask = columns["loss_mask"].bool() & learn.of_samples(groups.valid, groups)
        student, teacher = columns["rollout_log_probs"].double(), columns["teacher_log_probs"].double()
        credit = mask * learn.sampled_credit(options.divergence, student, teacher, options.beta)
        if options.discount:
            credit = learn.reward_to_go(credit, mask, cast("Tensor", groups.row_lengths), options.discount)
        return options.coef * credit + mask * learn.of_samples(rewards, groups)

    # -- mode = "loss" -------------------------------------------------------------------------------------------

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        if self.options.mode == "advantage":
            loss = super().loss(batch, policy)
            return replace(loss, metrics={**loss.metrics, **_of_samples(batch, policy)})
        values, metrics = self._divergences(batch, policy)
        loss = super().loss(batch, policy) if self.options.reward_coef else Loss(self._regularisers(batch, policy))
        terms = {**loss.terms, "distillation": self._term(batch, values, self.options.coef)}
        return Loss(terms, {**loss.metrics, **metrics})

    def _divergences(self, batch: LossBatch, policy: PolicyOutputs) -> tuple[Tensor, Sums]:
        """Return the divergence between policy and teacher, [tokens], and its metrics."""
        options, ids = self.options, self._ids()
        if ids is None:
            values = learn.sampled_divergence(
                policy.log_probs, batch.column("teacher_log_probs"), reverse=options.divergence == "reverse"
            )
            weight, metrics = self._weight(batch, policy)
            return values if weight is None else values * weight, {**metrics, **_of_samples(batch, policy)}
        theirs = "teacher_log_probs_at" if options.tokens == "student-top-k" else "teacher_top_k_log_probs"
        student = self._over(policy.output(log_probs_at(ids).key))
        teacher = self._over(batch.column(theirs))
        values = learn.token_divergence(options.divergence, student, teacher, options.beta)
        return values, _of_support(batch, student.detach(), teacher, values.detach())

    def _over(self, log_probs: Tensor) -> Tensor:
        """Turn log-probs of k tokens, [tokens, k], into log-probs of a distribution that sums to 1 (option `rest`)."""
        if self.options.rest == "bucket":
            return learn.with_rest(log_probs)
        return log_probs - log_probs.logsumexp(-1, keepdim=True)

    def _ids(self) -> Column | None:
        """Return the column with the ids of the compared tokens; None if only the sampled token is compared."""
        columns = {
            "student-top-k": student_top_k_ids(self.options.k),
            "teacher-top-k": teacher_top_k(self.options.k)[0],
        }
        return columns.get(self.options.tokens)

    def _teacher(self) -> tuple[Column, ...]:
        """Return the columns that the teacher computes."""
        k = self.options.k
        if self.options.tokens == "student-top-k":
            return student_top_k_ids(k), teacher_log_probs_at(k)
        return teacher_top_k(k) if self.options.tokens == "teacher-top-k" else (TEACHER_LOG_PROBS,)


def _of_samples(batch: LossBatch, policy: PolicyOutputs) -> Sums:
    """Return metrics estimated from the sampled tokens: KL(q || p), and agreement (1 minus the total variation)."""
    mask, count = batch.loss_mask, batch.loss_mask.sum()
    ratio = batch.column("teacher_log_probs") - policy.log_probs.detach()
    return {
        "distill/kl": ((-ratio * mask).sum(), count),
        "distill/agreement": ((ratio.clamp(max=0.0).exp() * mask).sum(), count),
    }


def _of_support(batch: LossBatch, student: Tensor, teacher: Tensor, values: Tensor) -> Sums:
    """Return metrics over the compared tokens: KL(q || p), agreement, and the divergence that is trained."""
    mask, count = batch.loss_mask, batch.loss_mask.sum()
    agreement = student.exp().minimum(teacher.exp()).sum(-1)
    return {
        "distill/kl": ((learn.token_divergence("reverse", student, teacher) * mask).sum(), count),
        "distill/agreement": ((agreement * mask).sum(), count),
        "distill/divergence": ((values * mask).sum(), count),
    }
