# SPDX-License-Identifier: Apache-2.0
"""In every layout, adapters of the Megatron trainer start, learn, travel and are saved as those of the torch trainer."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from relax_plugin_megatron.architecture import Architecture
from relax_plugin_megatron.layout import Grid
from relax_plugin_megatron.lora import Lora
from safetensors.torch import load_file

from relax_core.api import ConfigError, TensorInfo, TrainerSpec, Version
from relax_core.api.weights import combined_fingerprint, tensor_fingerprint
from relax_core.testing.moe import tiny_moe
from relax_core.testing.trainer import forward, make_rows, tiny_model
from tests.megatron_on_cpu.layouts import (
    CP2,
    DP2,
    EP2,
    ONE,
    OPTIMIZER,
    PP2,
    PP2_VP2,
    SAVED,
    STEPS,
    TP2,
    TP2_SP,
    Curve,
    Layout,
    assert_near,
    curve,
    megatron,
    steps,
)  # fmt: skip
from tests.megatron_on_cpu.trainer import DISK
from tests.trainers import ALGORITHM, TRANSPORT, running, train

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once
LORA = {"lora": {"rank": 4, "alpha": 8.0}}
FAST = replace(OPTIMIZER, lr=2e-2)
"""An optimizer with which matrix B grows enough in 20 steps that A gets a gradient too."""
ROWS = 99


@dataclass(frozen=True)
class Learned:
    base: str
    first: dict[str, str]
    """Fingerprints of the adapters by published name, before the first step."""
    curve: Curve
    scores: np.ndarray
    """Log-probs after the last step."""


def publish(trainer, step, payload="full", base="", transport=TRANSPORT, folder=""):
    return trainer.publish(Version("actor", 0, step), transport, folder, payload, base)


def learned(trainer, path) -> Learned:
    base = trainer.facts["base"]
    first = {info.name: info.fingerprint for info in publish(trainer, 0, "lora", base).tensors}
    made = curve(trainer, path)
    return Learned(base, first, made, forward(trainer, make_rows(ROWS), STEPS).values)


def assert_learned_alike(found: Learned, expected: Learned) -> None:
    assert (found.base, found.first) == (expected.base, expected.first)
    assert_near(found.curve, expected.curve)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def expected(dense, tmp_path_factory):
    with running(dense, optimizer=FAST, model=LORA) as trainer:
        return learned(trainer, tmp_path_factory.mktemp("torch"))


@pytest.fixture(scope="module")
def split(dense, tmp_path_factory):
    """Return what tensor and sequence parallel ranks learned, and the folder of their checkpoint and export."""
    path = tmp_path_factory.mktemp("split")
    with megatron(dense, TP2_SP, LORA, FAST) as trainer:
        assert trainer.facts["trainable"] < trainer.facts["parameters"]
        found = learned(trainer, path)
        trainer.export(str(path / "export"))
    return found, path


def test_adapters_of_split_layers_learn_as_with_torch(split, expected):
    assert_learned_alike(split[0], expected)
    assert np.abs(expected.scores - expected.curve.scores["log_probs"]).max() > 0.1


def test_an_export_is_the_model_with_adapters_folded_in_and_peft_reads_the_adapters_alone(dense, split):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    found, path = split
    with running(path / "export", role="reference") as reference:
        np.testing.assert_allclose(forward(reference, make_rows(ROWS), 0).values, found.scores, rtol=0, atol=2e-5)
    base = AutoModelForCausalLM.from_pretrained(dense)
    adapted = PeftModel.from_pretrained(base, path / "export" / "adapter").eval()
    folded, ids = AutoModelForCausalLM.from_pretrained(path / "export"), torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, folded(ids).logits, atol=1e-4, rtol=1e-4)
    config = json.loads((path / "export" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, dense)


def test_a_checkpoint_has_the_adapters_alone_and_either_trainer_continues(dense, split, expected):
    found = split[0]
    saved = [load_file(path) for path in (split[1] / "checkpoint").glob("*.safetensors")]
    assert saved and all(".lora_" in name for one in saved for name in one)
    with running(dense, optimizer=FAST, model=LORA) as trainer:
        trainer.load(found.curve.checkpoint)
        np.testing.assert_allclose(steps(trainer, SAVED, STEPS), found.curve.late, rtol=2e-4, atol=1e-6)
    with megatron(dense, ONE, LORA, FAST) as trainer:
        trainer.load(expected.curve.checkpoint)
        np.testing.assert_allclose(steps(trainer, SAVED, STEPS), expected.curve.late, rtol=2e-4, atol=1e-6)


@pytest.mark.faults
@pytest.mark.parametrize(
    "layout",
    [
        ONE, DP2, TP2, PP2, CP2,
        Layout({"tensor_parallel": 2, "pipeline_parallel": 2, "recompute": "full"}, 4),
        Layout({**TP2_SP.options, "context_parallel": 2, "recompute": "full"}, 4),
        Layout(TP2_SP.options, 4),
    ],
    ids=["1", "DP2", "TP2", "PP2", "CP2", "TP2 PP2 recomputed", "TP2 SP CP2 recomputed", "TP2 SP DP2"],
)  # fmt: skip
def test_adapters_learn_as_with_torch_in_further_layouts(dense, expected, split, layout, tmp_path):
    with megatron(dense, layout, LORA, FAST) as trainer:
        assert_learned_alike(learned(trainer, tmp_path), expected)
        trainer.load(split[0].curve.checkpoint)
        np.testing.assert_allclose(steps(trainer, SAVED, STEPS), split[0].curve.late, rtol=2e-4, atol=1e-6)


@pytest.mark.faults
def test_interleaved_stages_have_the_adapters_of_their_layers_or_none(tmp_path):
    path, slow = tiny_model(tmp_path / "model", key_value_heads=2, layers=4), replace(OPTIMIZER, lr=5e-3)
    for targets in ([], ["layers.2.self_attn"]):
        model = {"lora": {**LORA["lora"], "targets": targets}}
        with running(path, optimizer=slow, model=model) as trainer:
            expected = learned(trainer, tmp_path / "torch")
        for layout in (PP2_VP2, Layout({**PP2_VP2.options, "recompute": "full"}, 2)):
            with megatron(path, layout, model, slow) as trainer:
                assert_learned_alike(learned(trainer, tmp_path / "megatron"), expected)


@pytest.mark.faults
@pytest.mark.parametrize("layout", [EP2, TP2_SP, Layout({"pipeline_parallel": 2, "recompute": "full"}, 2)])
def test_attention_of_a_mixture_gets_adapters_and_a_part_of_the_layers_may(layout, tmp_path):
    """Experts get none, as with torch; a stage of the pipeline without adapters waits for the others."""
    path = tiny_moe(str(tmp_path / "model"), 0, pad_token_id=None)
    for targets in ([], ["layers.1.self_attn"], ["layers.0.self_attn.v_proj"]):
        model = {"lora": {**LORA["lora"], "rslora": True, "targets": targets}}
        with running(path, optimizer=FAST, model=model) as trainer:
            expected = learned(trainer, tmp_path / "torch")
        with megatron(path, layout, model, FAST) as trainer:
            assert_learned_alike(learned(trainer, tmp_path / "megatron"), expected)


@pytest.mark.faults
@pytest.mark.parametrize("layout", [TP2_SP, PP2], ids=["TP2 SP", "PP2"])
def test_a_follower_in_another_layout_has_the_policy_of_adapters_and_of_folded_versions(dense, layout, tmp_path):
    rows, folder = make_rows(9), str(tmp_path)
    with megatron(dense, DP2, LORA, FAST) as actor, megatron(dense, layout, LORA, role="actor_fwd") as follower:
        base = actor.facts["base"]
        assert base == actor.facts["fingerprint"] == follower.facts["base"]
        steps(actor, 0, 3)
        alone = publish(actor, 3, "lora", base, DISK, folder)
        follower.load_published(alone, DISK)
        scores = forward(actor, rows, 3).values
        np.testing.assert_allclose(forward(follower, rows, 3).values, scores, rtol=0, atol=1e-5)
        folded = publish(actor, 3, transport=DISK, folder=folder)
        follower.load_published(folded, DISK)
        np.testing.assert_allclose(forward(follower, rows, 3).values, scores, rtol=0, atol=2e-5)
        with pytest.raises(ValueError, match="these adapters belong to base"):
            follower.load_published(alone, DISK)
        with pytest.raises(ValueError, match="got base elsewhere; these adapters belong to base"):
            publish(actor, 3, "lora", "elsewhere", DISK, folder)


@pytest.mark.faults
def test_a_critics_body_gets_adapters_and_its_head_is_trained_whole(dense, tmp_path):
    def values(trainer):
        norms = [train(trainer, step).grad_norm for step in range(5)]
        return norms, forward(trainer, make_rows(ROWS), 5, ("values",)).values

    how = {"role": "critic", "optimizer": FAST, "model": LORA}
    with running(dense, **how) as trainer:
        expected = values(trainer)
        trainer.save(str(tmp_path / "checkpoint"))
    for layout in (TP2_SP, PP2):
        with megatron(dense, layout, **how) as trainer:
            found = values(trainer)
            np.testing.assert_allclose(found[0], expected[0], rtol=2e-4)
            np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-4)
            trainer.load(str(tmp_path / "checkpoint"))
            np.testing.assert_allclose(
                forward(trainer, make_rows(ROWS), 5, ("values",)).values, expected[1], rtol=0, atol=1e-5
            )
            trainer.export(str(tmp_path / str(layout.options)))
        with running(tmp_path / str(layout.options), role="critic") as trainer:
            np.testing.assert_allclose(
                forward(trainer, make_rows(ROWS), 5, ("values",)).values, expected[1], rtol=0, atol=2e-5
            )


@pytest.mark.faults
def test_adapters_of_a_bfloat16_base_are_float32(dense):
    with megatron(dense, TP2_SP, {**LORA, "dtype": "bfloat16"}, FAST) as trainer:
        losses = [loss for loss, _ in steps(trainer, 0, 3)]
        assert np.isfinite(losses).all()
        assert {info.dtype for info in publish(trainer, 3, "lora", trainer.facts["base"]).tensors} == {"F32"}
        assert {info.dtype for info in publish(trainer, 3).tensors} == {"BF16"}
    with running(dense, optimizer=FAST, model={**LORA, "dtype": "bfloat16"}) as trainer:
        np.testing.assert_allclose([loss for loss, _ in steps(trainer, 0, 3)], losses, rtol=0.05, atol=0.01)


def test_a_rounded_base_is_published_as_an_engine_of_another_format_loads_it(dense, tmp_path):
    from safetensors.numpy import load_file as arrays

    model, folder = {**LORA, "dtype": "bfloat16"}, arrays(f"{dense}/model.safetensors")
    loaded = combined_fingerprint(
        TensorInfo(name, one.shape, "F32", tensor_fingerprint(one), one.nbytes) for name, one in folder.items()
    )
    with running(dense, model=model, publish_dtype="float32") as trainer:
        assert trainer.facts["base"] == loaded
    with megatron(dense, ONE, model, FAST, publish_dtype="float32") as trainer:
        assert trainer.facts["base"] == loaded
        assert publish(trainer, 0).fingerprint == loaded  # every matrix B is 0
        train(trainer, 0)
        whole = publish(trainer, 1, transport=DISK, folder=str(tmp_path))
        assert whole.fingerprint != loaded
        trainer.load_published(whole, DISK)
        assert publish(trainer, 1).fingerprint == whole.fingerprint


@pytest.mark.faults
def test_a_checkpoint_over_another_base_or_of_another_kind_is_refused(dense, tmp_path):
    with megatron(dense, ONE, LORA) as trainer:
        trainer.save(str(tmp_path / "adapters"))
    with megatron(dense, ONE) as trainer:
        trainer.save(str(tmp_path / "whole"))
    other = tiny_model(tmp_path / "other", seed=1, key_value_heads=2)
    for path, model, saved, says in (
        (other, LORA, "adapters", "its adapters belong to model"),
        (dense, {}, "adapters", r"saved with adapters, but this run has no \[model.lora\]"),
        (dense, LORA, "whole", r"saved with a whole model, but this run has \[model.lora\]"),
        (dense, {"lora": {"rank": 2, "alpha": 8.0}}, "adapters", "another architecture"),
    ):
        with megatron(path, ONE, model) as trainer, pytest.raises(ConfigError, match=says):
            trainer.load(str(tmp_path / saved))


# -- which layers -----------------------------------------------------------------------------------------------------

DENSE = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 256, "vocab_size": 512,
}  # fmt: skip
MIXTURE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]}


def lora(config=DENSE, role="actor", **table):
    spec = TrainerSpec({"lora": {"rank": 4, "alpha": 8.0, **table}}, ALGORITHM, OPTIMIZER, role=role)
    return Lora.of(spec, Architecture.of(config, "model"))


def names(found):
    return [one.module.removeprefix("model.layers.") for one in found.layers]


def test_targets_are_ends_of_names_patterns_or_modules_that_hold_layers():
    assert names(lora(targets=["v_proj", "q_proj"]))[:3] == [
        "0.self_attn.q_proj",
        "0.self_attn.v_proj",
        "1.self_attn.q_proj",
    ]
    assert names(lora(targets=["layers.1.mlp", "*.3.*.o_proj"])) == [
        "1.mlp.gate_proj", "1.mlp.up_proj", "1.mlp.down_proj", "3.self_attn.o_proj"
    ]  # fmt: skip
    assert len(names(lora())) == len(names(lora(targets=["model"]))) == 4 * 7
    assert len(names(lora(MIXTURE))) == 4 * 4 + 3  # experts get none


def test_roles_that_neither_train_nor_follow_get_no_adapters():
    assert lora(role="actor_fwd") is not None and lora(role="critic") is not None
    assert lora(role="reference") is None and lora(role="teacher") is None
    assert len(names(lora(role="critic", targets=["layers.3.self_attn", "layers.9"]))) == 4


@pytest.mark.parametrize(
    ("table", "field", "says"),
    [
        ({"targets": ["q_prj"]}, "model.lora.targets", "got 'q_prj'; megatron has adapters in q_proj, k_proj"),
        ({"targets": ["q_proj", "lm_head"]}, "model.lora.targets", "got 'lm_head'"),
        ({"targets": ["*"]}, "model.lora.targets", "got '\\*'"),
        ({"dropout": 0.1}, "model.lora.dropout", "got 0.1; .* use trainer = torch"),
        ({"dora": True}, "model.lora.dora", "use trainer = torch"),
        ({"modules_to_save": ["lm_head"]}, "model.lora.modules_to_save", "use trainer = torch"),
    ],
)
def test_adapters_that_this_trainer_does_not_have_are_refused(table, field, says):
    with pytest.raises(ConfigError, match=says) as raised:
        lora(**table)
    assert raised.value.field == field


def test_the_ranks_of_a_layout_hold_their_parts_of_the_adapters():
    found = lora()
    whole = found.size(Grid(1), 0, 4)
    assert whole == 4 * 4 * (64 + 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 256))
    assert sum(found.size(Grid(4, pipeline=4), rank, 4) for rank in range(4)) == whole
    replicated = 4 * 4 * (5 * 64 + 2 * 64)  # A of five layers and B of two, on each of the ranks
    assert sum(found.size(Grid(2, tensor=2), rank, 4) for rank in range(2)) == whole + replicated
