# SPDX-License-Identifier: Apache-2.0
"""Matrices in parts: two ranks that compute the same rows together are one, alone and beside copies and shares."""

from contextlib import contextmanager

import numpy as np
import pytest
from relax_plugin_torch.tensor_parallel import check_heads, planned
from relax_plugin_torch.trainer import TorchTrainer
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from relax_core.api import Chosen, ConfigError, OptimizerSpec, TrainerSpec, Version
from relax_core.learn.counts import count
from relax_core.testing.trainer import InMemory, Reinforce, chunk, forward, make_rows, tiny_model, update
from relax_core.testing.trainer_ranks import RankedTrainer

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), key_value_heads=2)


@contextmanager
def started(folder, ranks=1, dtype="float32", **options):
    if ranks == 1:
        trainer, held = TorchTrainer(TorchTrainer.options_model()()), InMemory()
        trainer.build = lambda chosen: Reinforce(chosen.options) if chosen.kind == "algorithm" else held
    else:
        trainer = RankedTrainer(TorchTrainer, {"tensor_parallel": 2, **options}, ranks, tensor_parallel=2)
    model = {"path": folder, "dtype": dtype}
    trainer.start(TrainerSpec(model, Chosen("algorithm", "reinforce"), OptimizerSpec(1e-3, weight_decay=0.1)))
    try:
        yield trainer
    finally:
        trainer.stop()


def train(trainer, number):
    """A step in several micro-batches: gradients in parts are added up once, whatever their number."""
    rows = make_rows(number, version=number)
    trainer.begin_step(Version("actor", 0, number))
    return update(trainer, [chunk(trainer, rows, 40)], count(rows), count(rows))


def trained(folder, path, ranks=1, **options):
    with started(folder, ranks, **options) as trainer:
        results = [train(trainer, number) for number in range(2)]
        trainer.export(str(path))
        return results, load_file(path / "model.safetensors"), forward(trainer, make_rows(2), 40).values


@pytest.mark.parametrize(("ranks", "options"), [
    (2, {}),
    pytest.param(4, {"sharding": "none"}, marks=pytest.mark.faults),
    pytest.param(4, {"sharding": "fsdp"}, marks=pytest.mark.faults),
])  # fmt: skip
def test_a_tensor_parallel_group_trains_as_one_rank_does(folder, tmp_path, ranks, options):
    alone, weights, scores = trained(folder, tmp_path / "one")
    together, others, others_scores = trained(folder, tmp_path / "group", ranks, **options)
    for one, other in zip(alone, together, strict=True):
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=TOLERANCE)
        assert other.metrics.keys() == one.metrics.keys()
        assert other.metrics["train/loss"] == pytest.approx(one.metrics["train/loss"], rel=1e-5, abs=TOLERANCE)
    assert others.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(others[name], value, rtol=0, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(others_scores, scores, atol=1e-4)


def test_a_checkpoint_of_a_tensor_parallel_group_continues_on_one_rank(folder, tmp_path):
    with started(folder, 2) as group:
        train(group, 0)
        group.save(str(tmp_path / "checkpoint"))
        want = train(group, 1).grad_norm
    with started(folder) as alone:
        alone.load(str(tmp_path / "checkpoint"))
        assert train(alone, 1).grad_norm == pytest.approx(want, rel=TOLERANCE)


def test_ranks_of_a_group_get_the_same_rows():
    trainer = TorchTrainer(TorchTrainer.options_model()(tensor_parallel=2))
    batches = trainer.plan([3, 9, 1, 16, 4, 4, 7], 4, 16).micro_batches
    assert batches[0] == batches[1] != batches[2] == batches[3]
    assert sorted(row for rank in batches[::2] for batch in rank for row in batch) == list(range(7))


@pytest.mark.parametrize(("changes", "message"), [
    ({"ranks": 3}, r"trainer\.tensor_parallel: got 2 with 3 ranks"),
    ({"ranks": 2, "key_value_heads": 1}, r"num_key_value_heads is 1"),
    ({"ranks": 2, "lora": {"rank": 2, "alpha": 4.0}}, r"adapters need whole matrices"),
])  # fmt: skip
def test_what_can_not_be_cut_is_refused_at_start(tmp_path, changes, message):
    path = tiny_model(tmp_path, key_value_heads=changes.get("key_value_heads", 2))
    trainer = RankedTrainer(TorchTrainer, {"tensor_parallel": 2}, changes["ranks"], tensor_parallel=2)
    model = {"path": path, **({"lora": changes["lora"]} if "lora" in changes else {})}
    with pytest.raises(ConfigError, match=message):
        trainer.start(TrainerSpec(model, Chosen("algorithm", "reinforce"), OptimizerSpec(1e-3)))


def test_a_model_without_a_plan_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match="set for GPT2LMHeadModel.*transformers has no plan for this model"):
        list(planned(model))


def test_every_matrix_of_a_layer_has_a_style(folder):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    check_heads(model, 2)
    styles = [style for _, style in planned(model)]
    assert (styles.count("colwise"), styles.count("rowwise")) == (2 * 5, 2 * 2)
