# SPDX-License-Identifier: Apache-2.0
"""A new advantage estimator, or a new surrogate, is a class with one function; the base gives the other part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from relax_plugin_policy_gradient.grpo import GRPO, GRPOOptions
from relax_plugin_policy_gradient.rloo import RLOO, RLOOOptions
from torch import Tensor

from relax_core import learn
from relax_core.api import Groups, LossBatch, PolicyOutputs
from relax_core.testing.algorithm import AlgorithmSuite


class Estimator(learn.ClippedPolicyGradient[learn.ClippedOptions]):
    def credit(self, groups: Groups) -> Tensor:
        return learn.group_mean_std(groups.rewards, groups.valid)


class PlainEstimator(learn.PlainPolicyGradient[learn.PlainOptions]):
    def credit(self, groups: Groups) -> Tensor:
        return learn.leave_one_out(groups.rewards, groups.valid)


class NewSurrogate(learn.PolicyGradient[learn.PolicyGradientOptions]):
    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> learn.Surrogate:
        ratio = learn.log_ratio(batch, policy.log_probs, anchor).exp()
        return learn.Surrogate(learn.clipped_surrogate(ratio, batch.advantages, 0.2, 0.2, dual_clip=3.0))


@pytest.mark.parametrize(
    ("own", "known"),
    [
        (Estimator(), GRPO(GRPOOptions(aggregation="token"))),
        (NewSurrogate(), GRPO(GRPOOptions(aggregation="token"))),
        (PlainEstimator(), RLOO(RLOOOptions())),
    ],
)
def test_an_algorithm_from_one_function_equals_the_built_in_algorithm(own: Any, known: Any) -> None:
    assert AlgorithmSuite.exercise(own) == AlgorithmSuite.exercise(known)
    assert (own.columns(), own.denominators, own.min_group_size) == (
        known.columns(), known.denominators, known.min_group_size,
    )  # fmt: skip


def test_a_credit_of_another_type_is_refused_by_its_class() -> None:
    class Wrong(Estimator):
        def credit(self, groups: Groups) -> Any:
            return 0.0

    rewards = torch.zeros(1, 2)
    with pytest.raises(TypeError, match=r"Wrong\.credit gave a float; give a tensor"):
        Wrong().advantages(Groups(rewards, torch.ones(1, 2, dtype=torch.bool), rewards))


def two_rows_of_one_sample_and_one_of_another(**columns: Tensor) -> Groups:
    mask = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    return Groups(
        torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]]), torch.tensor([[2, 2]]),
        token_columns={"loss_mask": mask, **columns}, row_lengths=torch.tensor([2, 2, 3]),
        row_sample=torch.tensor([0, 0, 1]),
    )  # fmt: skip


def test_a_sample_s_value_is_repeated_for_the_tokens_of_all_its_rows() -> None:
    groups = two_rows_of_one_sample_and_one_of_another()
    assert learn.of_samples(groups.rewards, groups).tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert learn.of_samples(groups.valid, groups).tolist() == [True] * 4 + [False] * 3
    with pytest.raises(ValueError, match="of_samples: .* row_sample and row_lengths"):
        learn.of_samples(groups.rewards, Groups(groups.rewards, groups.valid, groups.lengths))


def test_a_token_earns_its_row_s_reward_at_the_end_and_pays_for_its_divergence() -> None:
    sampled, reference = torch.arange(7.0), torch.arange(7.0) - 1
    groups = two_rows_of_one_sample_and_one_of_another(rollout_log_probs=sampled, ref_log_probs=reference)
    assert learn.token_rewards(groups).tolist() == [0, 1, 0, 1, 0, 0, 2]
    assert learn.token_rewards(groups, 0.5).tolist() == [-0.5, 0.5, -0.5, 0.5, -0.5, -0.5, 1.5]


def test_a_truncated_distribution_adds_its_missing_mass_to_the_divergence_in_the_reward() -> None:
    """Policy and reference are equal; the engine sampled from tokens of mass 0.97, so its log-probs are higher."""
    mask, reference = torch.ones(1000, dtype=torch.int64), torch.full((1000,), math.log(0.1), dtype=torch.float64)
    groups = Groups(
        torch.ones(1, 1, dtype=torch.float64), torch.tensor([[True]]), torch.tensor([[1000]]),
        token_columns={
            "loss_mask": mask, "rollout_log_probs": reference - math.log(0.97), "ref_log_probs": reference
        },
        row_lengths=torch.tensor([1000]), row_sample=torch.tensor([0]),
    )  # fmt: skip
    assert learn.less_divergence(groups, 0.05).item() == pytest.approx(1 + 0.05 * 1000 * math.log(0.97), rel=1e-5)
