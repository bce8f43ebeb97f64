# SPDX-License-Identifier: Apache-2.0
"""The algorithm contract at its hardest: ratios of sequences, a critic of its own, teachers, data without rollout."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from relax_core.api import (
    ADVANTAGES,
    LOG_PROBS,
    OLD_LOG_PROBS,
    RETURNS,
    VALUES,
    VALUES_OUTPUT,
    Advantages,
    Algorithm,
    AttemptId,
    Column,
    Groups,
    Loss,
    LossBatch,
    Options,
    Outcome,
    Output,
    PolicyOutputs,
    Ragged,
    RowBatch,
    RowId,
    Scope,
    Sealed,
    Source,
    Term,
    log_probs_at,
    top_k,
)
from relax_core.learn import clipped_surrogate
from relax_core.learn.counts import Denominators, reduce
from relax_core.learn.groups import Grouping
from relax_core.learn.packed import Outputs, PackedBatch


class ClipOptions(Options):
    clip: float = 0.2
    dual_clip: float = 3.0
    discount: float = 1.0
    trace: float = 0.95


class GSPO(Algorithm[ClipOptions]):
    """Group Sequence Policy Optimization (arXiv 2507.18071): eq. 7's ratio belongs to a whole sequence."""

    statistics: ClassVar[Scope] = Scope.GROUP
    min_group_size: ClassVar[int] = 2

    def columns(self) -> frozenset[Column]:
        return frozenset({ADVANTAGES, OLD_LOG_PROBS})

    def advantages(self, groups: Groups) -> Advantages:
        mean = groups.rewards.sum(1, keepdim=True) / groups.valid.sum(1, keepdim=True).clamp(min=1)
        return Advantages(torch.where(groups.valid, groups.rewards - mean, 0.0))

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        ratio = batch.sequence_mean(policy.log_probs - batch.column("old_log_probs")).exp()
        surrogate = clipped_surrogate(
            ratio, batch.sequence_mean(batch.advantages), self.options.clip, self.options.clip
        )
        return Loss({"policy": Term(surrogate, per="row", denominator="rows")})


class DualClipPPO(Algorithm[ClipOptions]):
    """Dual-clip PPO (arXiv 1912.09729) with generalised advantages (arXiv 1506.02438) and its critic."""

    fits: ClassVar[tuple[str, ...]] = ("critic",)
    statistics: ClassVar[Scope] = Scope.SAMPLE

    def columns(self) -> frozenset[Column]:
        return frozenset({ADVANTAGES, OLD_LOG_PROBS, VALUES, RETURNS})

    def advantage_columns(self) -> frozenset[Column]:
        return frozenset({VALUES})

    def advantages(self, groups: Groups) -> Advantages:
        """Eq. 16 backwards over each row's trained tokens; the sample's reward comes with its last one."""
        values, mask = groups.token_columns["values"], groups.token_columns["loss_mask"].bool()
        assert groups.row_lengths is not None and groups.row_sample is not None
        advantages, start = torch.zeros_like(values), 0
        for length, sample in zip(groups.row_lengths.tolist(), groups.row_sample.tolist(), strict=True):
            following, carried, reward = 0.0, 0.0, float(groups.rewards.flatten()[sample])
            for token in reversed(range(start, start + length)):
                if mask[token]:
                    delta = reward + self.options.discount * following - float(values[token])
                    carried = delta + self.options.discount * self.options.trace * carried
                    advantages[token], following, reward = carried, float(values[token]), 0.0
            start += length
        return Advantages(advantages, returns=advantages + values)

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        ratio = (policy.log_probs - batch.column("old_log_probs")).exp()
        options = self.options
        surrogate = clipped_surrogate(ratio, batch.advantages, options.clip, options.clip, options.dual_clip)
        return Loss({"policy": Term(surrogate)})

    def fit_loss(self, fit: str, batch: LossBatch, outputs: PolicyOutputs) -> Loss:
        values, old, returns = outputs.output("values"), batch.column("values"), batch.column("returns")
        clipped = old + (values - old).clamp(-self.options.clip, self.options.clip)
        return Loss({"value": Term(torch.maximum((values - returns) ** 2, (clipped - returns) ** 2), 0.5)})


STUDENT_IDS = Column("student_top_ids", "int32", shape=(2,))
TEACHER_AT_STUDENT = Column("teacher_top_log_probs", shape=(2,))


class TopKDistillation(Algorithm[Options]):
    """Reverse divergence over the student's likeliest tokens, where it sampled them."""

    statistics: ClassVar[Scope] = Scope.SAMPLE

    def columns(self) -> frozenset[Column]:
        return frozenset({STUDENT_IDS, TEACHER_AT_STUDENT})

    def outputs(self) -> frozenset[Output]:
        return frozenset({log_probs_at(STUDENT_IDS)})

    def advantages(self, groups: Groups) -> Advantages:
        return Advantages(torch.zeros_like(groups.rewards))

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        student = policy.output(log_probs_at(STUDENT_IDS).key)
        divergence = (student.exp() * (student - batch.column(TEACHER_AT_STUDENT.name))).sum(-1)
        return Loss({"distillation": Term(divergence)})


class SFT(Algorithm[Options]):
    """Maximum likelihood of a data set; the planner builds no rollout for it."""

    source: ClassVar[Source] = Source.DATASET

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        return Loss({"likelihood": Term(-policy.log_probs)})


class DPO(Algorithm[Options]):
    """Direct preference optimization (arXiv 2305.18290), eq. 7; beta is 1."""

    source: ClassVar[Source] = Source.PAIRS

    def columns(self) -> frozenset[Column]:
        return frozenset({Column("ref_log_probs")})

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        chosen, rejected = batch.pair(batch.sequence_sum(policy.log_probs - batch.column("ref_log_probs")))
        loss = -torch.nn.functional.logsigmoid(chosen - rejected)
        return Loss({"preference": Term(loss, per="pair", denominator="pairs")})


IDS = (RowId(0, 0, 0, 0), RowId(0, 1, 0, 0))
LENGTHS = np.array([4, 3])
MASK = np.array([0, 1, 1, 1, 0, 1, 1], np.uint8)


def rows(**columns: np.ndarray) -> RowBatch:
    """Two samples of one group: 3 and 2 trained tokens."""
    base: dict[str, np.ndarray] = {"tokens": np.arange(7, dtype=np.int32), "loss_mask": MASK}
    return RowBatch(IDS, {name: Ragged(values, LENGTHS) for name, values in {**base, **columns}.items()})


def samples(*rewards: float) -> dict[AttemptId, Sealed]:
    return {
        row.attempt_id: Sealed(row.attempt_id, 1, Outcome.FINISHED, reward)
        for row, reward in zip(IDS, rewards, strict=True)
    }


def total(loss: Loss, batch: LossBatch, **denominators: float) -> Tensor:
    return torch.stack(list(reduce(loss, batch, Denominators(denominators)).values())).sum()


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def test_a_ratio_of_sequences_reaches_every_token_of_its_row_alike() -> None:
    algorithm, old = GSPO(), np.zeros(7, np.float32)
    given = rows(old_log_probs=old)
    credited = Grouping(given, samples(1.0, 0.0))
    batch = PackedBatch(given.with_columns(credited.columns(algorithm.advantages(credited.groups))))
    log_probs = leaf(*[0.0] * 7)
    loss = total(algorithm.loss(batch, Outputs({"log_probs": log_probs})), batch, rows=2)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    expected = torch.tensor([0, -1 / 12, -1 / 12, -1 / 12, 0, 1 / 8, 1 / 8])
    torch.testing.assert_close(gradient, expected)


def test_a_critic_credits_tokens_and_is_fitted_on_the_same_rows() -> None:
    algorithm = DualClipPPO(ClipOptions(trace=1.0))
    given = rows(old_log_probs=np.zeros(7, np.float32), values=np.full(7, 0.5, np.float32))
    credited = Grouping(
        given, samples(1.0, 0.0), ("loss_mask", *(column.name for column in algorithm.advantage_columns()))
    )
    columns = credited.columns(algorithm.advantages(credited.groups))
    np.testing.assert_allclose(columns["advantages"].values, [0, 0.5, 0.5, 0.5, 0, -0.5, -0.5])
    np.testing.assert_allclose(columns["returns"].values, [0, 1, 1, 1, 0, 0, 0])
    batch = PackedBatch(given.with_columns(columns))
    far = Outputs({"log_probs": torch.full((7,), 9.0)})
    assert float(total(algorithm.loss(batch, far), batch, tokens=5)) == pytest.approx(
        (-1.2 * 0.5 * 3 + 3.0 * 0.5 * 2) / 5
    )
    fit = algorithm.fit_loss("critic", batch, Outputs({"values": torch.full((7,), 0.5)}))
    assert float(total(fit, batch, tokens=5)) == pytest.approx(0.125)
    assert VALUES_OUTPUT.key == "values" and LOG_PROBS in algorithm.outputs()


def test_a_teacher_is_read_at_the_tokens_the_student_likes() -> None:
    algorithm = TopKDistillation()
    assert {output.key for output in algorithm.outputs()} == {"log_probs_at:student_top_ids"}
    assert top_k(2).k == 2
    half = np.full((7, 2), np.log(0.5), np.float32)
    given = rows(
        advantages=np.zeros(7, np.float32), student_top_ids=np.zeros((7, 2), np.int32), teacher_top_log_probs=half
    )
    batch = PackedBatch(given)
    student = torch.log(torch.tensor([[0.5, 0.5]])).repeat(7, 1).requires_grad_()
    loss = total(algorithm.loss(batch, Outputs({"log_probs_at:student_top_ids": student})), batch, tokens=5)
    assert abs(float(loss.detach())) < 1e-6
    surer = torch.log(torch.tensor([[0.9, 0.1]])).repeat(7, 1)
    assert float(total(algorithm.loss(batch, Outputs({"log_probs_at:student_top_ids": surer})), batch, tokens=5)) > 0.3


def test_a_data_set_needs_neither_advantages_nor_rollout() -> None:
    batch = PackedBatch(rows())
    assert SFT.source is Source.DATASET and not SFT().columns()
    loss = SFT().loss(batch, Outputs({"log_probs": torch.arange(7.0)}))
    assert float(total(loss, batch, tokens=5)) == pytest.approx(-(1 + 2 + 3 + 5 + 6) / 5)


def test_pairs_are_two_samples_of_one_group() -> None:
    batch = PackedBatch(rows(ref_log_probs=np.zeros(7, np.float32)))
    loss = DPO().loss(batch, Outputs({"log_probs": torch.zeros(7)}))
    torch.testing.assert_close(total(loss, batch, pairs=1), torch.log(torch.tensor(2.0)))
