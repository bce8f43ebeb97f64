# SPDX-License-Identifier: Apache-2.0
"""Matrices in parts: two ranks that compute the same rows together are one, alone and beside copies and shares."""

import numpy as np
import pytest
from relax_plugin_torch.tensor_parallel import check_heads, planned
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from relax_core.api import ConfigError, OptimizerSpec
from relax_core.testing.trainer import forward, make_rows
from tests.trainers import assert_updated_alike, make_trainer, running, train

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once
TOLERANCE = 1e-5
"""Largest relative difference of sums of thousands of float32 numbers in another order; one processor gave 1.2e-6."""
GROUP = {"tensor_parallel": 2}


def trained(folder, path, ranks=1, **options):
    """Train in several micro-batches: gradients in parts are added up once, whatever their number."""
    with running(folder, ranks, options=options, optimizer=OptimizerSpec(1e-3, weight_decay=0.1)) as trainer:
        results = [train(trainer, number, budget=40) for number in range(2)]
        trainer.export(str(path))
        return results, load_file(path / "model.safetensors"), forward(trainer, make_rows(2), 40).values


@pytest.mark.parametrize(("ranks", "options"), [
    (2, {}),
    pytest.param(4, {"sharding": "none"}, marks=pytest.mark.faults),
    pytest.param(4, {"sharding": "fsdp"}, marks=pytest.mark.faults),
])  # fmt: skip
def test_a_tensor_parallel_group_trains_as_one_rank_does(divisible, tmp_path, ranks, options):
    alone, weights, scores = trained(divisible, tmp_path / "one")
    together, others, others_scores = trained(divisible, tmp_path / "group", ranks, **GROUP, **options)
    for one, other in zip(alone, together, strict=True):
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=TOLERANCE)
        assert other.metrics.keys() == one.metrics.keys()
        assert other.metrics["train/loss"] == pytest.approx(one.metrics["train/loss"], rel=1e-5, abs=TOLERANCE)
    assert_updated_alike(others, weights)
    np.testing.assert_allclose(others_scores, scores, atol=1e-4)


def test_a_checkpoint_of_a_tensor_parallel_group_continues_on_one_rank(divisible, tmp_path):
    with running(divisible, 2, options=GROUP) as group:
        train(group, 0, budget=40)
        group.save(str(tmp_path / "checkpoint"))
        want = train(group, 1, budget=40).grad_norm
    with running(divisible) as alone:
        alone.load(str(tmp_path / "checkpoint"))
        assert train(alone, 1, budget=40).grad_norm == pytest.approx(want, rel=TOLERANCE)


def test_ranks_of_a_group_get_the_same_rows():
    batches = make_trainer(**GROUP).plan([3, 9, 1, 16, 4, 4, 7], 4, 16).micro_batches
    assert batches[0] == batches[1] != batches[2] == batches[3]
    assert sorted(row for rank in batches[::2] for batch in rank for row in batch) == list(range(7))


@pytest.mark.parametrize(("path", "ranks", "model", "message"), [
    ("divisible", 3, {}, r"trainer\.tensor_parallel: got 2 with 3 ranks"),
    ("folder", 2, {}, r"num_key_value_heads is 1"),
    ("divisible", 2, {"lora": {"rank": 2, "alpha": 4.0}}, r"adapters need whole matrices"),
])  # fmt: skip
def test_a_model_that_cannot_be_sharded_is_refused_at_the_start(request, path, ranks, model, message):
    path = request.getfixturevalue(path)
    with pytest.raises(ConfigError, match=message), running(path, ranks, options=GROUP, model=model):
        pass


def test_a_model_without_a_plan_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match="set for GPT2LMHeadModel.*transformers has no plan for this model"):
        list(planned(model))


def test_every_matrix_of_a_layer_has_a_style(divisible):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(divisible))
    check_heads(model, 2)
    styles = [style for _, style in planned(model)]
    assert (styles.count("colwise"), styles.count("rowwise")) == (2 * 5, 2 * 2)
