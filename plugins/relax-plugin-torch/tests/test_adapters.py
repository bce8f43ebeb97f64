# SPDX-License-Identifier: Apache-2.0
"""Adapters and frozen parts: what is trained, what travels, what is folded and kept, and what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from relax_plugin_torch.adapters import Dropout
from safetensors.torch import load_file

from relax_core.api import Algorithm, ConfigError, Loss, OptimizerSpec, Term, TrainerSpec, Version, Workload
from relax_core.api.algorithm import Output
from relax_core.tensor_files.transport import Disk
from relax_core.testing.trainer import InMemory, forward, make_rows, tiny_model
from tests.trainers import ALGORITHM, TRANSPORT, train, weights

LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=32, max_position_embeddings=128, tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("untied")
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)


def step(trainer, *numbers):
    """Train these steps, each in two chunks of several micro-batches."""
    return [train(trainer, number, cuts=[8], budget=40) for number in numbers]


def moved(trainer, before):
    """Names of the tensors that are not as they were."""
    return {name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])}


def publish(trainer, step, payload="full", base="", location=""):
    return trainer.publish(Version("actor", 0, step), TRANSPORT, location, payload, base)


def assert_as_peft(base, export, model):
    """peft itself, from the adapter's own folder over the base, says what the logits must be."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), export / "adapter").eval()
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(peft(ids).logits, model.cpu()(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [{}, {"dora": True}, {"rslora": True, "targets": ["q_proj", "layers.1.mlp"]}])
def test_an_export_is_the_model_with_its_adapters_folded_in(folder, start, tmp_path, kind):
    trainer, rows = start(folder, model={"lora": {**LORA, **kind}}), make_rows(9)
    step(trainer, 0, 1)
    trainer.export(str(tmp_path / "export"))
    want = forward(trainer, rows, 0).values
    exported = start(str(tmp_path / "export"), role="reference")
    np.testing.assert_allclose(forward(exported, rows, 0).values, want, atol=2e-5)
    assert np.abs(want - forward(start(folder, role="reference"), rows, 0).values).max() > 0.01
    assert_as_peft(folder, tmp_path / "export", exported._model)


def test_before_any_update_it_scores_bit_for_bit_as_the_base_does(folder, start):
    rows = make_rows(2)
    for dtype in ("float32", "bfloat16"):
        reference = forward(start(folder, role="reference", model={"dtype": dtype}), rows, 0).values
        trainer = start(folder, model={"dtype": dtype, "lora": LORA})
        assert np.array_equal(forward(trainer, rows, 0).values, reference)


def test_only_adapters_are_trained(folder, start):
    trainer = start(folder, model={"lora": LORA})
    before = weights(trainer)
    step(trainer, 0, 1)
    changed = moved(trainer, before)
    assert changed == {name for name in before if ".lora_" in name}
    assert trainer.facts["trainable"] == sum(before[name].numel() for name in changed) < trainer.facts["parameters"]
    assert len(trainer._optimizer.state) == len(changed) == 2 * 7 * 2


def test_in_bf16_what_is_frozen_takes_half_the_memory_and_adapters_are_float32(folder, start):
    trainer = start(folder, model={"dtype": "bfloat16", "lora": LORA})
    for name, tensor in weights(trainer).items():
        linear = name.endswith("base_layer.weight")
        assert tensor.dtype == (torch.bfloat16 if linear else torch.float32), name
    step(trainer, 0)
    assert {info.dtype for info in publish(trainer, 1, "lora", trainer.facts["base"]).tensors} == {"F32"}
    assert {info.dtype for info in publish(trainer, 1).tensors} == {"BF16"}


def test_an_adapter_travels_alone_under_pefts_names_and_a_follower_has_the_same_policy(folder, start):
    transport, rows = InMemory(), make_rows(4)
    trainer = start(folder, transport=transport, model={"lora": LORA})
    follower = start(folder, transport=transport, role="actor_fwd", model={"lora": LORA})
    base = trainer.facts["base"]
    assert base == trainer.facts["fingerprint"] == publish(start(folder), 0).fingerprint
    step(trainer, 0)
    manifest = publish(trainer, 1, "lora", base)
    assert (manifest.payload, manifest.base) == ("lora", base)
    assert len(manifest.tensors) == 2 * 7 * 2
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in {info.name for info in manifest.tensors}
    follower.load_published(manifest, TRANSPORT)
    assert np.array_equal(forward(follower, rows, 0).values, forward(trainer, rows, 0).values)
    follower.load_published(publish(trainer, 1), TRANSPORT)
    np.testing.assert_allclose(forward(follower, rows, 0).values, forward(trainer, rows, 0).values, atol=2e-5)
    with pytest.raises(ValueError, match="these adapters belong to base"):
        follower.load_published(manifest, TRANSPORT)


def test_an_adapter_over_another_base_or_one_that_is_more_than_pairs_is_not_sent_alone(folder, start):
    for model, base, says in (
        ({"lora": LORA}, "elsewhere", "got base elsewhere; these adapters belong to base"),
        ({"lora": {**LORA, "dora": True}}, "", "no adapters of pairs"),
        ({}, "", "no adapters of pairs"),
    ):
        with pytest.raises(ValueError, match=says):
            publish(start(folder, model=model), 0, "lora", base)


def test_a_checkpoint_holds_the_adapter_alone_and_continues_bit_for_bit(folder, start, tmp_path):
    model = {"lora": {**LORA, "dora": True, "dropout": 0.3}}
    trainer = start(folder, model=model, deterministic=True)
    step(trainer, 0, 1)
    trainer.save(str(tmp_path / "checkpoint"))
    kept = load_file(tmp_path / "checkpoint" / "shard-00001-model-00001-of-00001.safetensors")
    assert all(".lora_" in name for name in kept)
    want = step(trainer, 2, 3), publish(trainer, 4).fingerprint
    other = start(folder, model=model, deterministic=True)
    other.load(str(tmp_path / "checkpoint"))
    assert (step(other, 2, 3), publish(other, 4).fingerprint) == want


def test_a_checkpoint_over_another_base_or_of_another_kind_is_refused(folder, untied, start, tmp_path):
    lora = {"lora": LORA}
    start(folder, model=lora).save(str(tmp_path / "adapters"))
    start(folder).save(str(tmp_path / "whole"))
    other = tiny_model(tmp_path / "other", seed=1)
    for trainer, saved, says in (
        (start(other, model=lora), "adapters", "its adapters belong to model"),
        (start(folder), "adapters", r"saved with adapters, but this run has no \[model.lora\]"),
        (start(folder, model=lora), "whole", r"saved with a whole model, but this run has \[model.lora\]"),
        (start(folder, model={"lora": {**LORA, "rank": 2}}), "adapters", "another architecture"),
    ):
        with pytest.raises(ConfigError, match=says):
            trainer.load(str(tmp_path / saved))


def test_dropout_is_on_while_training_only(folder, start):
    rows = make_rows(1)
    plain, dropping = (start(folder, model={"lora": {**LORA, "dropout": drop}}) for drop in (0.0, 0.5))
    step(plain, 0), step(dropping, 0)
    assert not np.array_equal(forward(plain, rows, 0).values, forward(dropping, rows, 0).values)
    assert np.array_equal(forward(dropping, rows, 0).values, forward(dropping, rows, 0).values)
    again = start(folder, model={"lora": {**LORA, "dropout": 0.5}})
    assert step(again, 0) == step(start(folder, model={"lora": {**LORA, "dropout": 0.5}}), 0)


def test_dropout_draws_anew_for_each_chunk_and_rank_and_alike_in_each_run():
    layer = torch.nn.Identity()
    layer.lora_dropout = None
    adapters = SimpleNamespace(table=SimpleNamespace(dropout=0.5))

    def draws(rank):
        torch.manual_seed(1)
        dropout = Dropout(layer, rank, torch.device("cpu"), adapters)
        found = []
        for _ in range(2):  # updates of two chunks each
            dropout.begin()
            for _ in range(2):
                with dropout.on():
                    assert layer.training
                    found.append(float(torch.rand(())))
                assert not layer.training
        return found

    assert len({*draws(0), *draws(1)}) == 8 and draws(0) == draws(0)


def test_a_module_without_adapters_is_trained_completely(untied, start, tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = start(untied, model={"lora": {**LORA, "modules_to_save": ["lm_head"]}})
    before = weights(trainer)
    step(trainer, 0)
    changed = moved(trainer, before)
    assert "lm_head.weight" in changed and all(".lora_" in name or name == "lm_head.weight" for name in changed)
    trainer.export(str(tmp_path / "export"))
    assert_as_peft(untied, tmp_path / "export", AutoModelForCausalLM.from_pretrained(tmp_path / "export"))
    assert json.loads((tmp_path / "export" / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == [
        "lm_head"
    ]


# -- freezing -------------------------------------------------------------------------------------------------------


def test_frozen_parts_stay_and_a_delta_sends_nothing_of_them(folder, start, tmp_path):
    trainer = start(folder, transport=Disk(), model={"freeze": ["embed_tokens", "layers.0.*", "norm"]})
    before = weights(trainer)
    publish(trainer, 0, location=str(tmp_path))
    step(trainer, 0)
    delta = publish(trainer, 1, "delta", "actor@0.0", str(tmp_path))
    changed = moved(trainer, before)
    assert changed == {name for name in before if "layers.1." in name} == {info.name for info in delta.sent}
    assert len(trainer._optimizer.state) == len(changed)


@pytest.mark.parametrize(("model", "field", "says"), [
    ({"freeze": ["vision"]}, "model.freeze", "this model has no such part; it has"),
    ({"freeze": ["layers.7"]}, "model.freeze", "got 'layers.7'"),
    ({"freeze": ["model"]}, "model.freeze", "freezes the whole model"),
    ({"lora": {**LORA, "targets": ["q_prj"]}}, "model.lora.targets", "it has q_proj"),
    ({"lora": {**LORA, "targets": ["embed_tokens"]}}, "model.lora.targets", "no linear layer"),
    ({"lora": {**LORA, "targets": ["lm_head"]}}, "model.lora.targets", "head and input embedding share one weight"),
    ({"lora": {**LORA, "targets": ["q_proj"]}, "freeze": ["layers.0"]}, "model.lora.targets", "model.freeze freezes"),
    ({"lora": {**LORA, "modules_to_save": ["head"]}}, "model.lora.modules_to_save", "no such part; it has lm_head"),
    ({"lora": {**LORA, "modules_to_save": ["embed_tokens"]}}, "model.lora.modules_to_save", "would come apart"),
    ({"lora": {**LORA, "modules_to_save": ["mlp"]}}, "model.lora.modules_to_save", "gets an adapter"),
])  # fmt: skip
def test_parts_that_are_not_there_are_refused_at_start(folder, start, model, field, says):
    with pytest.raises(ConfigError, match=says) as raised:
        start(folder, model=model)
    assert raised.value.field == field


@pytest.mark.parametrize("role", ["actor", "actor_fwd"])
def test_frozen_layers_get_no_adapters(folder, start, role):
    trainer = start(folder, model={"lora": LORA, "freeze": ["layers.0"]}, role=role)
    assert all("layers.1." in name for name in weights(trainer) if ".lora_" in name)


def test_the_adapters_folder_names_what_modules_end_in_or_each_one(folder, start, tmp_path):
    for number, (targets, want) in enumerate(((["q_proj"], ["q_proj"]), (["layers.1.mlp"], 3))):
        start(folder, model={"lora": {**LORA, "targets": targets}}).export(str(tmp_path / str(number)))
        config = json.loads((tmp_path / str(number) / "adapter" / "adapter_config.json").read_text())
        names = config["target_modules"]
        assert names == want if isinstance(want, list) else len(names) == want
        assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, folder)


# -- foretold -------------------------------------------------------------------------------------------------------


def test_a_plan_reports_the_trained_share_and_its_memory(folder, start):
    model = {"lora": {**LORA, "dora": True}, "freeze": ["layers.1"]}
    spec = TrainerSpec({"path": folder, **model}, ALGORITHM, OptimizerSpec(1e-2))
    work = Workload(prompts=2, group_size=2, prompt_tokens=4, new_tokens=8)
    trainer = start(folder, model=model)
    part, whole = (
        trainer.estimate(one, work) for one in (spec, TrainerSpec({"path": folder}, ALGORITHM, OptimizerSpec(1e-2)))
    )
    facts = trainer.facts
    assert any(f"trains {facts['trainable']:,} of {facts['parameters']:,} parameters" in note for note in part.notes)
    assert not any("trains" in note for note in whole.notes)
    assert 8 * facts["trainable"] <= part.phases["train"]["optimizer"] < 8 * facts["trainable"] + 1000


# -- models with a scalar head ----------------------------------------------------------------------------------------


class Judged(Algorithm):
    """Rewards of rows are pushed up."""

    fits = ("critic",)

    def outputs(self):
        return frozenset({Output("rewards")})

    def loss(self, batch, policy):
        return Loss({"reward": Term(policy.output("rewards"), -1.0, "rows", per="row")})

    def fit_loss(self, fit, batch, outputs):
        return Loss({"value": Term((outputs.output("values") - 1).square())})


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_scalar_head_is_trained_completely_next_to_adapters(folder, start, tmp_path, role):
    from transformers import AutoModelForSequenceClassification

    model = {"lora": {**LORA, "targets": ["q_proj", "lm_head"] if role == "critic" else []}}
    trainer = start(folder, algorithm=Judged, model=model, role=role)
    before, rows, column = weights(trainer), make_rows(), "rewards" if role == "actor" else "values"
    step(trainer, 0, 1)
    changed = moved(trainer, before)
    assert "score.weight" in changed and all(".lora_" in name or name == "score.weight" for name in changed)
    trainer.save(str(tmp_path / "checkpoint"))
    trainer.export(str(tmp_path / "export"))
    want = forward(trainer, rows, 0, (column,)).values
    trainer.load(str(tmp_path / "checkpoint"))
    assert np.array_equal(forward(trainer, rows, 0, (column,)).values, want)
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export", num_labels=1)
    trainer._model.load_state_dict(_unfolded(exported.state_dict(), weights(trainer)))
    np.testing.assert_allclose(forward(trainer, rows, 0, (column,)).values, want, atol=2e-5)


def _unfolded(folded, own):
    """The folded weights below adapters that add nothing."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in own.items() if ".lora_" in name}
    return {name: zeros[name] if name in zeros else folded[name.replace("base_layer.", "")] for name in own}
