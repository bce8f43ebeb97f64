# SPDX-License-Identifier: Apache-2.0
"""Parts of a rank's estimate, for which nothing of the model is loaded. `test_estimate_sizes.py` compares it with peaks."""

from dataclasses import replace

import pytest
from relax_plugin_torch import estimate
from transformers import Qwen3Config, Qwen3ForCausalLM

from relax_core.api import ConfigError, OptimizerSpec, TrainerSpec, Workload
from relax_core.api.algorithm import Output
from relax_core.testing.trainer import Reinforce, tiny_model
from tests.trainers import ALGORITHM, make_trainer, running


class Judged(Reinforce):
    def outputs(self):
        return frozenset({Output("rewards")})


WORK = Workload(prompts=4, group_size=4, prompt_tokens=24, new_tokens=40)


@pytest.fixture(scope="module")
def as_wide_as_its_vocabulary(tmp_path_factory):
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        intermediate_size=48, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("wide")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


def spec_of(folder, **changes):
    return TrainerSpec({"path": folder}, ALGORITHM, OptimizerSpec(1e-3), tokens_per_micro_batch=512, **changes)


@pytest.fixture(scope="module")
def told(folder):
    """Return the estimate of an actor alone."""
    return make_trainer().estimate(spec_of(folder), WORK)


def test_the_parts_of_state_are_exact(told, folder):
    with running(folder) as trainer:
        parameters = trainer.facts["parameters"]
    parts = told.phases["train"]
    assert parts["gradients"] == 4 * parameters
    assert parts["parameters"] == pytest.approx(4 * parameters, rel=0.01)  # and a few buffers
    assert parts["optimizer"] == pytest.approx(8 * parameters, rel=0.01)
    assert told.phases["checkpoint"]["snapshot"] == parts["parameters"] + parts["optimizer"]


def test_ranks_that_share_weights_hold_less_each(told, folder):
    shared = make_trainer(sharding="fsdp").estimate(spec_of(folder, world_size=2, rank=1), WORK)
    assert shared.phases["train"]["optimizer"] == pytest.approx(told.phases["train"]["optimizer"] / 2, rel=0.01)
    assert shared.flops["train"] < told.flops["train"]
    assert "arithmetic" in shared.notes[0]


def test_ranks_that_the_group_size_does_not_divide_are_refused_by_the_plan(folder):
    with pytest.raises(ConfigError, match=r"trainer\.tensor_parallel: got 2 with 3 ranks; it must divide the ranks"):
        make_trainer(tensor_parallel=2).estimate(spec_of(folder, world_size=3), WORK)


def test_an_offloaded_optimizer_uses_device_memory_only_in_its_step(folder):
    trainers = [make_trainer(offload_optimizer=one, device="cuda") for one in (False, True)]
    whole, apart = (trainer.estimate(spec_of(folder), WORK).phases for trainer in trainers)
    assert whole["train"] == {**apart["train"], "optimizer": apart["update"]["optimizer"]}
    assert apart["update"].keys() == {"parameters", "gradients", "optimizer"}
    assert "optimizer" not in apart["publish"] and apart["checkpoint"] == whole["checkpoint"]


def test_a_plan_for_a_cpu_with_an_optimizer_apart_is_refused(folder):
    with pytest.raises(ConfigError, match=r"trainer\.offload_optimizer: got true on cpu.*leave it out"):
        make_trainer(offload_optimizer=True, device="cpu").estimate(spec_of(folder), WORK)


def test_a_model_that_learns_to_judge_has_no_logits_but_is_published(as_wide_as_its_vocabulary):
    told = make_trainer(Judged).estimate(spec_of(as_wide_as_its_vocabulary), WORK)
    assert "logits" not in told.phases["train"] and "published" in told.phases["publish"]


def test_a_role_that_only_reads_has_no_gradients(folder):
    told = make_trainer().estimate(spec_of(folder, role="reference"), WORK)
    assert list(told.phases) == ["forward"]
    assert {"gradients", "optimizer"}.isdisjoint(told.phases["forward"])


def test_a_float32_head_takes_room_for_its_weights(tmp_path):
    folder = tiny_model(tmp_path / "model", vocab_size=4096)

    def activations(**model):
        spec = spec_of(folder)
        spec = replace(spec, model={**spec.model, "dtype": "bfloat16", **model})
        return make_trainer(logits_mb=1).estimate(spec, WORK).phases["train"]["activations"]

    assert activations(head_dtype="float32") - activations() == pytest.approx(4 * 4096 * 16, rel=0.1)


def test_a_deep_model_is_estimated_from_shallow_ones_as_from_all_its_layers(tmp_path, monkeypatch):
    """The head needs most with two layers, the blocks with many: the largest peak is not linear in the layers."""
    Qwen3Config(
        vocab_size=49152, hidden_size=576, num_hidden_layers=6, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        intermediate_size=1536, max_position_embeddings=1024, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    (tmp_path / "model.safetensors").touch()  # an estimate reads no weights
    spec, trainer = replace(spec_of(str(tmp_path)), tokens_per_micro_batch=2048), make_trainer()
    told = trainer.estimate(spec, Workload(8, 8, 40, 16))
    monkeypatch.setattr(estimate, "SHALLOW", (6, 12))
    whole = trainer.estimate(spec, Workload(8, 8, 40, 16))
    assert told.tensors("train") == pytest.approx(whole.tensors("train"), rel=1e-3)
    assert told.flops["train"] == pytest.approx(whole.flops["train"], rel=0.01)
