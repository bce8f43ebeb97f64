# SPDX-License-Identifier: Apache-2.0
"""Frozen parts of the Megatron trainer's model stay, and the rest learns as with the torch trainer."""

from pathlib import Path

import numpy as np
import pytest
from relax_plugin_megatron.architecture import Architecture
from relax_plugin_megatron.freezing import frozen, parts, trained
from relax_plugin_megatron.layout import Grid
from relax_plugin_megatron.lora import Lora
from safetensors.numpy import load_file

from relax_core.api import ConfigError, OptimizerSpec, TrainerSpec, Version, Workload
from relax_core.testing.moe import tiny_moe
from relax_core.testing.trainer import forward, make_rows, tiny_model
from relax_core.trainer_kit.model_folder import read_json
from tests.megatron_on_cpu.layouts import (
    EP2,
    ONE,
    OPTIMIZER,
    PP2,
    PP2_VP2,
    SAVED,
    STEPS,
    TP2_SP,
    Layout,
    assert_near,
    curve,
    megatron,
    of_family,
    steps,
)  # fmt: skip
from tests.megatron_on_cpu.trainer import DISK
from tests.trainers import ALGORITHM, running, train

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once
FIRST = {"freeze": ["embed_tokens", "layers.0.*"]}
"""All of a pipeline's first stage."""
LORA = {"lora": {"rank": 4, "alpha": 8.0}}
EXPERTS = {"freeze": ["mlp.experts"]}


def architecture(folder) -> Architecture:
    return Architecture.of(read_json(Path(folder), "config.json"), str(folder))


def spec(folder, role="actor", **model):
    return TrainerSpec({"path": str(folder), **model}, ALGORITHM, OptimizerSpec(1e-3), role=role)


@pytest.fixture(scope="session")
def expected(dense, tmp_path_factory):
    with running(dense, optimizer=OPTIMIZER, model=FIRST) as trainer:
        return trainer.facts["trainable"], curve(trainer, tmp_path_factory.mktemp("torch"))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ONE, marks=pytest.mark.faults), pytest.param(TP2_SP, marks=pytest.mark.faults),
        Layout({"pipeline_parallel": 2, "recompute": "full"}, 2),
    ],
    ids=["1", "TP2 SP", "PP2 recomputed"],
)  # fmt: skip
def test_the_other_parts_learn_as_with_torch_and_either_trainer_continues(dense, expected, layout, tmp_path):
    trainable, torch = expected
    with megatron(dense, layout, FIRST) as trainer:
        assert trainer.facts["trainable"] == trainable < trainer.facts["parameters"]
        made = curve(trainer, tmp_path)
        assert_near(made, torch)
        trainer.load(torch.checkpoint)
        assert np.allclose(steps(trainer, SAVED, STEPS), torch.late, rtol=2e-4, atol=1e-6)
        trainer.export(str(tmp_path / "export"))
    before, after = (load_file(f"{folder}/model.safetensors") for folder in (dense, tmp_path / "export"))
    stayed = {name for name, value in before.items() if np.array_equal(after[name], value)}
    assert stayed == {name for name in before if "embed_tokens" in name or "layers.0." in name}
    with running(dense, optimizer=OPTIMIZER, model=FIRST) as trainer:
        trainer.load(made.checkpoint)
        assert np.allclose(steps(trainer, SAVED, STEPS), made.late, rtol=2e-4, atol=1e-6)


@pytest.mark.faults
def test_a_frozen_chunk_of_interleaved_stages_goes_with_a_state_in_host_memory(tmp_path):
    path = tiny_model(tmp_path / "model", key_value_heads=2, layers=4)
    with running(path, optimizer=OPTIMIZER, model=FIRST) as trainer:
        expected = curve(trainer, tmp_path / "torch")
    with megatron(path, Layout({**PP2_VP2.options, "offload_optimizer": True}, 2), FIRST) as trainer:
        assert_near(curve(trainer, tmp_path / "megatron", budget=32), expected)


@pytest.mark.faults
@pytest.mark.parametrize("layout", [EP2, PP2, TP2_SP], ids=["EP2", "PP2", "TP2 SP"])
def test_frozen_experts_stay_and_routers_learn_as_with_torch(mixture, layout, tmp_path):
    with running(mixture, optimizer=OPTIMIZER, model=EXPERTS) as trainer:
        expected = curve(trainer, tmp_path / "torch")
    with megatron(mixture, layout, EXPERTS) as trainer:
        assert_near(curve(trainer, tmp_path / "megatron"), expected)


@pytest.mark.faults
def test_frozen_parts_are_published_and_saved_as_the_folder_has_them(dense, tmp_path):
    """A trainer in bfloat16 rounds what it computes with; engines in float32 get the folder's own values."""
    frozen = {**FIRST, "dtype": "bfloat16"}
    with megatron(dense, TP2_SP, frozen, publish_dtype="float32") as trainer:
        train(trainer, 0)
        first = trainer.publish(Version("actor", 0, 1), DISK, str(tmp_path))
        trainer.save(str(tmp_path / "checkpoint"))
        train(trainer, 1)
        trainer.load(str(tmp_path / "checkpoint"))
        again = trainer.publish(Version("actor", 0, 1), DISK, str(tmp_path))
    assert again.fingerprint == first.fingerprint
    with running(dense, optimizer=OPTIMIZER) as plain:
        before = plain.publish(Version("actor", 0, 0), DISK, str(tmp_path / "plain"))
    kept = {info.name: info.fingerprint for info in before.tensors}
    same = {info.name for info in first.tensors if kept[info.name] == info.fingerprint}
    assert same == {name for name in kept if "embed_tokens" in name or "layers.0." in name}


def test_frozen_layers_get_no_adapters(dense):
    shape = architecture(dense)
    given = spec(dense, **LORA, freeze=["layers.0.self_attn.q_proj", "layers.1"])
    names = frozen(given, shape, scalar=False)
    adapted = [one.module for one in Lora.of(given, shape, names).layers]
    assert adapted and all("layers.0" in one and "q_proj" not in one for one in adapted)
    both = spec(dense, lora={**LORA["lora"], "targets": ["q_proj"]}, freeze=["layers.1"])
    with pytest.raises(
        ConfigError, match=r"model.lora.targets: .*model.freeze freezes model.layers.1.self_attn.q_proj"
    ):
        Lora.of(both, shape, frozen(both, shape, scalar=False))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"freeze": ["vision"]}, r"model.freeze: got 'vision'; this model has no such part; it has .*embed_tokens"),
        ({"freeze": ["layers.7"]}, r"model.freeze: got 'layers.7'"),
        ({"freeze": ["model"]}, r"model.freeze: got model; this freezes the whole model"),
        ({"freeze": ["k_proj"]}, r"model.freeze: got model.layers.0.self_attn.k_proj.weight; .* freeze both or none"),
        ({**LORA, "freeze": ["self_attn", "mlp"]}, r"model.lora: .* freezes every layer that may have an adapter"),
    ],
)
def test_what_cannot_be_frozen_is_refused(dense, model, said):
    shape, given = architecture(dense), spec(dense, **model)
    with pytest.raises(ConfigError, match=said):
        Lora.of(given, shape, frozen(given, shape, scalar=False))


def test_a_critic_skips_patterns_without_a_match_and_a_reference_freezes_nothing(dense):
    shape, model = architecture(dense), {"freeze": ["lm_head", "norm"]}
    assert frozen(spec(dense, "critic", **model), shape, scalar=True) == {"model.norm.weight"}
    assert frozen(spec(dense, "reference", **model), shape, scalar=False) == frozenset()


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_the_parts_are_the_tensors_of_the_folder(request, kind):
    folder = request.getfixturevalue(kind)
    names = [source for part in parts(architecture(folder), scalar=False) for source in part.sources]
    assert sorted(names) == sorted(load_file(f"{folder}/model.safetensors"))


def test_the_parts_of_every_family_are_the_tensors_of_transformers(tmp_path):
    for family in ("llama", "qwen2"):
        of_family(family, tmp_path / family)
        names = [source for part in parts(architecture(tmp_path / family), scalar=False) for source in part.sources]
        assert sorted(names) == sorted(load_file(tmp_path / family / "model.safetensors"))
    mixtral = tiny_moe(str(tmp_path / "mixtral"), 0, "mixtral", pad_token_id=None)
    names = [source for part in parts(architecture(mixtral), scalar=False) for source in part.sources]
    assert sorted(names) == sorted(load_file(f"{mixtral}/model.safetensors"))


@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("grid", [Grid(1), Grid(4, pipeline=2), Grid(2, tensor=2), Grid(2, expert=2)], ids=str)
def test_frozen_and_trained_parts_are_all_parts_of_a_rank(request, kind, grid):
    shape = architecture(request.getfixturevalue(kind))
    if grid.expert > 1 and not shape.experts:
        return
    names = {source for part in parts(shape, False) for source in part.sources}
    chosen = {name for name in names if "layers.0." in name or "embed_tokens" in name}
    for rank in range(grid.world):
        sizes = shape.sizes(grid, rank)
        some, rest = (trained(shape, grid, rank, sizes, False, held) for held in (chosen, names - chosen))
        assert (some.dense + rest.dense, some.experts + rest.experts) == (sizes.dense, sizes.experts)
        assert some.multiplied + rest.multiplied == sizes.multiplied
        none = trained(shape, grid, rank, sizes, False, names)
        assert (none.all, none.multiplied) == (0, 0)


def test_a_plan_counts_the_trained_parts(dense, expected):
    from relax_plugin_megatron.trainer import MegatronTrainer

    from relax_core.testing.trainer import Reinforce

    trainer = MegatronTrainer(MegatronTrainer.options_model()())
    trainer.build = lambda chosen: Reinforce()
    estimate = trainer.estimate(spec(dense, **FIRST), Workload(2, 2, 8, 8))
    assert estimate.phases["train"]["gradients"] == 4 * expected[0]
    assert estimate.phases["train"]["optimizer"] == 8 * expected[0]
    assert any(f"trains {expected[0]:,} of " in note for note in estimate.notes)


@pytest.mark.faults
def test_a_critic_with_a_frozen_body_learns_as_with_torch(dense):
    model = {"freeze": ["model.layers", "embed_tokens"]}
    with running(dense, role="critic", optimizer=OPTIMIZER, model=model) as trainer:
        expected = [train(trainer, step).grad_norm for step in range(3)]
        values = forward(trainer, make_rows(9), 0, ("values",)).values
    with megatron(dense, PP2, model, role="critic") as trainer:
        assert np.allclose([train(trainer, step).grad_norm for step in range(3)], expected, rtol=2e-4)
        assert np.allclose(forward(trainer, make_rows(9), 0, ("values",)).values, values, rtol=0, atol=1e-5)
