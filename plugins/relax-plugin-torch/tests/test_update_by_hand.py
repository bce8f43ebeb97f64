# SPDX-License-Identifier: Apache-2.0
"""Whole updates against what torch's own optimizer makes of the same gradients, and what reaches the loss of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from relax_core import learn
from relax_core.api import Algorithm, Loss, OptimizerSpec, Ragged, RowBatch, Term, Version
from relax_core.api.algorithm import LOG_PROBS, LossBatch, Output, PolicyOutputs
from relax_core.testing.trainer import forward, make_rows
from tests.trainers import accumulate, gradients, train

MATRIX = 2


class Weighted(Algorithm):
    """The ratio to the old policy times the advantage, a token; a critic's is the square of its value."""

    fits = ("critic",)
    zero_advantage_skips = True

    def outputs(self) -> frozenset[Output]:
        return frozenset({LOG_PROBS})

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        ratio = (policy.log_probs - batch.column("old_log_probs")).exp()
        return Loss({"policy": Term(ratio * batch.advantages, -1.0)})

    def fit_loss(self, fit: str, batch: LossBatch, outputs: PolicyOutputs) -> Loss:
        return Loss({"value": Term((outputs.output("values") - 1.0).square())})


@pytest.fixture
def start(start, folder):
    """Start a trainer of `Weighted`; arguments are those of `running`."""
    return partial(start, folder, algorithm=Weighted)


def _accumulated(trainer: Any, rows: RowBatch, step: int = 0, nominal: float = 1.0) -> dict[str, float]:
    """Begin a step and compute its gradient; the counts that end the update. `nominal`: how far off the first ones are."""
    counts = dict(learn.count(rows))
    trainer.begin_step(Version("actor", 0, step))
    accumulate(trainer, rows, nominal={name: number * nominal for name, number in counts.items()})
    return counts


def _parameters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer._model.named_parameters()}


@pytest.mark.parametrize("clip", [0.05, 1e6, 0.0])
def test_steps_are_those_of_adamw_with_the_tables_betas_decay_schedule_and_bound(start: Any, clip: float) -> None:
    """Vectors do not decay, the norm is told as it was, and step n has the rate of n: 2 steps of warm-up, then a line to 0."""
    spec = OptimizerSpec(1e-2, "linear", 2, (0.7, 0.8), 0.3, clip, total_steps=5)
    trainer = start(optimizer=spec)
    mine = {name: torch.nn.Parameter(tensor) for name, tensor in _parameters(trainer).items()}
    groups = [
        {"params": [p for p in mine.values() if (p.dim() >= MATRIX) is decays], "weight_decay": 0.3 if decays else 0.0}
        for decays in (True, False)
    ]
    assert all(group["params"] for group in groups)
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.7, 0.8))
    for step, rate in enumerate((5e-3, 1e-2, 1e-2, 1e-2 * 2 / 3)):
        counts = _accumulated(trainer, make_rows(step, version=step), step)
        slopes = gradients(trainer)
        norm = torch.stack([slope.norm() for slope in slopes.values()]).norm()
        assert 0.05 < norm < 1e6
        for name, parameter in mine.items():
            parameter.grad = slopes.get(name, torch.zeros_like(parameter)) * min(1.0, clip / norm if clip else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        result = trainer.finish_update(counts)
        assert (result.lr, result.grad_norm) == (pytest.approx(rate), pytest.approx(float(norm), rel=1e-4))
        for name, weights in _parameters(trainer).items():
            assert torch.allclose(weights, mine[name], rtol=1e-4, atol=1e-5), name


def test_an_update_that_no_row_reaches_still_moves_weights_by_their_moments(start: Any) -> None:
    """A gradient of 0 is not the same as no gradient, for which torch's optimizers leave out the parameter."""
    spec = OptimizerSpec(1e-2, betas=(0.7, 0.8), weight_decay=0.0, grad_clip=0.0)
    trainer = start(optimizer=spec)
    mine = {name: torch.nn.Parameter(tensor) for name, tensor in _parameters(trainer).items()}
    optimizer = torch.optim.AdamW(mine.values(), lr=1e-2, betas=(0.7, 0.8), weight_decay=0.0)
    for step in range(3):
        rows = make_rows(step, version=step)
        advantages = rows.columns["advantages"]
        idle = {"advantages": Ragged(np.zeros_like(advantages.values), advantages.lengths)} if step else {}
        counts, before = _accumulated(trainer, rows.with_columns(idle), step), _parameters(trainer)
        slopes = gradients(trainer)
        assert bool(slopes) is (step == 0)
        for name, parameter in mine.items():
            parameter.grad = slopes.get(name, torch.zeros_like(parameter))
        optimizer.step()
        norm = trainer.finish_update(counts).grad_norm
        assert (norm > 0) is (step == 0)
        after = _parameters(trainer)
        assert any(not torch.equal(after[name], before[name]) for name in after)
        for name, weights in after.items():
            assert torch.allclose(weights, mine[name], rtol=1e-4, atol=1e-5), name


def test_an_update_that_begins_again_keeps_no_gradient_of_the_abandoned_one(start: Any) -> None:
    trainer, rows = start(), make_rows()
    counts = _accumulated(trainer, rows)
    once = gradients(trainer)
    accumulate(trainer, rows, nominal=counts)
    assert once and all(torch.equal(once[name], slope) for name, slope in gradients(trainer).items())


def test_losses_are_reported_with_true_counts_for_any_nominal_count(start: Any) -> None:
    rows, told = make_rows(), []
    for nominal in (1.0, 4.0):
        trainer = start()
        counts = _accumulated(trainer, rows, nominal=nominal)
        told.append(trainer.finish_update(counts).metrics)
    for name in ("train/loss", "train/loss/policy"):
        assert told[0][name] == (pytest.approx(told[1][name][0], rel=1e-4), 1.0) and told[0][name][0]


def test_old_log_probs_that_are_given_are_those_of_the_ratio(start: Any) -> None:
    """Also in the first update of a step, where the policy's own are at hand."""
    trainer, rows = start(), make_rows()
    own = forward(trainer, rows, 0)
    losses = []
    for apart in (0.0, float(np.log(2.0))):
        old = Ragged((own.values - apart).astype(np.float32), own.lengths)
        trainer.abort_update()
        _accumulated(trainer, rows.with_columns({"old_log_probs": old}))
        trainer._update.join([trainer._update.share()])
        losses.append(trainer._update.metrics(1.0)["train/loss/policy"][0])
    assert losses[1] == pytest.approx(2 * losses[0], rel=1e-3) and losses[0]


def test_the_difference_without_lag_is_of_tokens_that_the_steps_own_policy_sampled(start: Any) -> None:
    trainer = start(max_staleness=1)
    rows = make_rows(version=0)
    train(trainer, 0, rows)
    own = forward(trainer, rows, 0)
    mask, lengths = rows.columns["loss_mask"].values == 1, own.lengths
    fresh = mask & (np.cumsum(mask) % 2 == 0)
    versions = Ragged(np.where(mask, fresh.astype(np.int32), -1).astype(np.int32), lengths)
    far = Ragged((own.values + np.where(fresh, 0.25, 0.75)).astype(np.float32), lengths)
    given = rows.with_columns({"weight_versions": versions, "rollout_log_probs": far})
    counts = _accumulated(trainer, given, 1)
    total, number = trainer.finish_update(counts).metrics["train/rollout_log_prob_diff_lag0"]
    assert (number, total / number) == (fresh.sum(), pytest.approx(0.25, abs=1e-4))


def test_tokens_that_engines_may_not_sample_have_no_share_of_the_distribution(start: Any) -> None:
    rows = make_rows()
    ids = rows.columns["tokens"].values
    never = next(token for token in range(64) if token not in set(ids.tolist()))
    free, bound = forward(start(), rows, 0).values, forward(start(suppress_tokens=(never,)), rows, 0).values
    mask = rows.columns["loss_mask"].values == 1
    assert (bound[mask] > free[mask]).all(), "what it had is the others'"


def test_rows_without_advantage_are_skipped_for_a_policy_and_not_for_a_critic(start: Any) -> None:
    rows = make_rows()
    advantages = rows.columns["advantages"]
    flat = rows.with_columns({"advantages": Ragged(np.zeros_like(advantages.values), advantages.lengths)})
    for role, learns in (("actor", False), ("critic", True)):
        trainer = start(role=role)
        counts = _accumulated(trainer, flat)
        assert (trainer.finish_update(counts).grad_norm > 0) is learns
