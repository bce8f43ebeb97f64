# SPDX-License-Identifier: Apache-2.0
"""Models that see and hear: in every layout the Megatron trainer computes what the torch trainer computes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_plugin_megatron.architecture import Architecture
from relax_plugin_megatron.freezing import frozen, parts
from relax_plugin_megatron.layout import Grid
from relax_plugin_megatron.lora import Lora
from relax_plugin_megatron.trainer import MegatronTrainer
from relax_plugin_workbench.layouts import Machine, compare_layouts
from relax_plugin_workbench.memory import MEDIA_NOTE
from safetensors.numpy import load_file

from relax_contrib.recipes import families as tiny
from relax_core.api import ConfigError, OptimizerSpec, Ragged, RowBatch, TrainerSpec, Workload
from relax_core.testing.trainer import Reinforce, forward
from tests.megatron_on_cpu.layouts import CP2, DP2, EP2, ONE, PP2, PP2_VP2, TP2, TP2_SP, Layout, megatron
from tests.trainers import ALGORITHM, running, train
from tests.unit.media.test_families import Model, built, graded, rows

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once
BUDGET, STEPS, SAVED = 160, 4, 2
"""The tokens of a micro-batch, few enough that some have no media."""
RECOMPUTED = Layout({**PP2.options, "recompute": "full"}, 2)
FOUR = Layout({**TP2_SP.options, **RECOMPUTED.options}, 4)
EYES_SHUT: dict[str, Any] = {"freeze": ["visual"]}
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8}}


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return built("qwen3_vl", tmp_path_factory.mktemp("seeing") / "model", num_hidden_layers=4)


@pytest.fixture(scope="session")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return built("qwen3_omni_moe_thinker", tmp_path_factory.mktemp("hearing") / "model")


def batch(model: Model, step: int) -> RowBatch:
    """Return rows that show every kind of medium, and none, with random answers."""
    random, asked = np.random.default_rng(step), model.requests()
    said = {one.id: (list(random.integers(len(tiny.SPECIAL), 60, 3 + int(one.id[0]) % 3)), []) for one in asked}
    made = graded(rows(asked, said))
    made.columns["weight_versions"].values[made.columns["loss_mask"].values == 1] = step
    return made


def how(model: Model) -> dict[str, Any]:
    """Return what a trainer is started with; at a higher rate, rounding soon changes which experts a token visits."""
    rate = 3e-4 if model.media.keys() > {"sound"} else 1e-3
    return {
        "optimizer": OptimizerSpec(rate, warmup_steps=3, weight_decay=0.1), "media": str(model.folder / "media"),
        "suppress_tokens": tiny.NEVER,
    }  # fmt: skip


@dataclass(frozen=True)
class Curve:
    fingerprint: str
    trainable: int
    scores: np.ndarray
    steps: list[tuple[float, float]]
    checkpoint: str


def curve(trainer: Any, model: Model, path: Path) -> Curve:
    """Score rows, train, and save on the way."""
    scores = forward(trainer, batch(model, 99), BUDGET).values
    early = steps(trainer, model, 0, SAVED)
    trainer.save(str(path))
    facts = trainer.facts
    return Curve(
        facts["fingerprint"], facts["trainable"], scores, early + steps(trainer, model, SAVED, STEPS), str(path)
    )


def steps(trainer: Any, model: Model, start: int, stop: int) -> list[tuple[float, float]]:
    """Train steps; return (loss, gradient norm) of each."""
    results = [train(trainer, step, batch(model, step), budget=BUDGET) for step in range(start, stop)]
    return [(result.metrics["train/loss"][0], result.grad_norm) for result in results]


def assert_near(found: Curve, expected: Curve) -> None:
    assert (found.fingerprint, found.trainable) == (expected.fingerprint, expected.trainable)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=5e-5)
    np.testing.assert_allclose(found.steps, expected.steps, rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="session")
def expected(seeing: Model, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    with running(seeing.folder, **how(seeing)) as trainer:
        return curve(trainer, seeing, tmp_path_factory.mktemp("torch") / "saved")


@pytest.fixture(scope="session")
def expected_of_hearing(hearing: Model, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    with running(hearing.folder, **how(hearing)) as trainer:
        return curve(trainer, hearing, tmp_path_factory.mktemp("torch") / "saved")


@pytest.mark.parametrize(
    "layout",
    [
        TP2_SP, RECOMPUTED,
        *(pytest.param(one, marks=pytest.mark.faults) for one in (ONE, DP2, TP2, CP2, PP2, FOUR)),
    ],
    ids=lambda layout: f"{layout.options} {layout.ranks}",
)  # fmt: skip
def test_a_model_that_sees_learns_as_with_torch(seeing: Model, expected: Curve, layout: Layout, tmp_path: Path) -> None:
    with megatron(seeing.folder, layout, **how(seeing)) as trainer:
        assert_near(curve(trainer, seeing, tmp_path / "saved"), expected)
        trainer.export(str(tmp_path / "export"))
        scores = forward(trainer, batch(seeing, 98), BUDGET).values
    with running(tmp_path / "export", **how(seeing)) as trainer:
        np.testing.assert_allclose(forward(trainer, batch(seeing, 98), BUDGET).values, scores, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "layout",
    [EP2, *(pytest.param(one, marks=pytest.mark.faults) for one in (ONE, TP2_SP, CP2))],
    ids=lambda layout: f"{layout.options} {layout.ranks}",
)
def test_a_model_that_hears_learns_as_with_torch_and_continues(
    hearing: Model, expected_of_hearing: Curve, layout: Layout, tmp_path: Path
) -> None:
    with megatron(hearing.folder, layout, **how(hearing)) as trainer:
        found = curve(trainer, hearing, tmp_path / "saved")
        assert_near(found, expected_of_hearing)
        trainer.load(found.checkpoint)
        np.testing.assert_allclose(steps(trainer, hearing, SAVED, STEPS), found.steps[SAVED:], rtol=2e-4, atol=2e-5)


@pytest.mark.faults
def test_stages_and_split_experts_of_a_model_that_hears_learn_as_with_torch(tmp_path: Path) -> None:
    model = built("qwen3_omni_moe_thinker", tmp_path / "model", num_hidden_layers=4)
    with running(model.folder, **how(model)) as trainer:
        expected = curve(trainer, model, tmp_path / "torch")
    split = {**TP2_SP.options, "expert_parallel": 1, "expert_tensor_parallel": 2}
    for layout in (RECOMPUTED, Layout({**PP2.options, **EP2.options}, 4), Layout(split, 2)):
        with megatron(model.folder, layout, **how(model)) as trainer:
            assert_near(curve(trainer, model, tmp_path / str(layout.options)), expected)


@pytest.mark.faults
def test_interleaved_stages_of_a_model_that_sees_learn_as_with_torch(tmp_path: Path) -> None:
    model = built("qwen3_vl", tmp_path / "model", num_hidden_layers=8)
    with running(model.folder, **how(model)) as trainer:
        expected = curve(trainer, model, tmp_path / "torch")
    with megatron(model.folder, PP2_VP2, **how(model)) as trainer:
        assert_near(curve(trainer, model, tmp_path / "saved"), expected)


@pytest.mark.parametrize(
    ("table", "layout"),
    [
        (EYES_SHUT, RECOMPUTED),
        *(
            pytest.param(table, layout, marks=pytest.mark.faults)
            for table in ({"freeze": ["language_model"]}, {"freeze": ["visual.blocks", "embed_tokens"]}, LORA)
            for layout in (ONE, TP2_SP, RECOMPUTED)
        ),
    ],
    ids=str,
)
def test_frozen_encoders_and_decoders_and_adapters_learn_as_with_torch(
    seeing: Model, table: dict[str, Any], layout: Layout, tmp_path: Path
) -> None:
    with running(seeing.folder, model=table, **how(seeing)) as trainer:
        expected = curve(trainer, seeing, tmp_path / "torch")
    with megatron(seeing.folder, layout, table, **how(seeing)) as trainer:
        found = curve(trainer, seeing, tmp_path / "saved")
        assert_near(found, expected)
    with running(seeing.folder, model=table, **how(seeing)) as trainer:
        trainer.load(found.checkpoint)
        late = steps(trainer, seeing, SAVED, STEPS)
        np.testing.assert_allclose(late, found.steps[SAVED:], rtol=2e-4, atol=2e-5)


@pytest.mark.faults
@pytest.mark.parametrize("layout", [EP2, TP2_SP], ids=["EP2", "TP2 SP"])
def test_replayed_experts_of_tokens_and_media_give_what_they_give_with_torch(hearing: Model, layout: Layout) -> None:
    replay = {"routing_replay": "rollout"}
    with running(hearing.folder, model=replay, **how(hearing)) as trainer:
        expected = replayed(trainer, hearing)
    with megatron(hearing.folder, layout, replay, **how(hearing)) as trainer:
        found = replayed(trainer, hearing)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


def replayed(trainer: Any, model: Model) -> list[tuple[float, ...]]:
    """Train with random experts; return the figures of each step."""
    made = []
    for step in range(SAVED):
        given, random = batch(model, step), np.random.default_rng(step)
        lengths = given.columns["tokens"].lengths
        experts = np.array([random.permutation(8)[:2] for _ in range(2 * int(lengths.sum()))], np.uint8)
        given = given.with_columns({"routed_experts": Ragged(experts.reshape(-1, 2, 2), lengths)})
        result = train(trainer, step, given, budget=BUDGET)
        routing = result.metrics["routing/replayed"], result.metrics["routing/differs"]
        made.append((result.metrics["train/loss"][0], result.grad_norm, *routing[0], *routing[1]))
    return made


@pytest.mark.parametrize("layout", [TP2_SP, pytest.param(RECOMPUTED, marks=pytest.mark.faults)], ids=["TP2 SP", "PP2"])
def test_encoders_in_bfloat16_have_their_own_float32_weights(seeing: Model, layout: Layout, tmp_path: Path) -> None:
    """Norms of the decoder are in float32, and biases of the encoders are not, though neither decays."""
    half = {"dtype": "bfloat16"}
    with running(seeing.folder, model=half, **how(seeing)) as trainer:
        expected = curve(trainer, seeing, tmp_path / "torch")
    with megatron(seeing.folder, layout, half, **how(seeing)) as trainer:
        found = curve(trainer, seeing, tmp_path / "saved")
        assert found.fingerprint == expected.fingerprint
        np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=0.3)
        np.testing.assert_allclose(found.steps, expected.steps, rtol=0.1, atol=0.1)
        trainer.load(expected.checkpoint)
        trainer.save(str(tmp_path / "again"))
    with running(seeing.folder, model=half, **how(seeing)) as trainer:
        trainer.load(str(tmp_path / "again"))
        np.testing.assert_allclose(steps(trainer, seeing, SAVED, STEPS), expected.steps[SAVED:], rtol=1e-5)


# -- without a rank -----------------------------------------------------------------------------------------------------


def architecture(folder: Path) -> Architecture:
    return Architecture.of(json.loads((folder / "config.json").read_text()), str(folder))


@pytest.mark.parametrize("kind", ["seeing", "hearing"])
def test_the_parts_and_sizes_are_those_of_the_folder(request: pytest.FixtureRequest, kind: str) -> None:
    folder = request.getfixturevalue(kind).folder
    shape, tensors = architecture(folder), load_file(folder / "model.safetensors")
    assert sorted(source for part in parts(shape, scalar=False) for source in part.sources) == sorted(tensors)
    assert shape.sizes(Grid(1), 0).all == sum(tensor.size for tensor in tensors.values())


@pytest.mark.parametrize("kind", ["seeing", "hearing"])
def test_every_part_of_a_family_can_be_frozen_alone(request: pytest.FixtureRequest, kind: str) -> None:
    model = request.getfixturevalue(kind)
    shape, table = architecture(model.folder), {"path": str(model.folder)}
    names = {source for part in parts(shape, scalar=False) for source in part.sources}
    found = {
        name: frozen(TrainerSpec({**table, "freeze": patterns}, ALGORITHM, OptimizerSpec(1e-3)), shape, scalar=False)
        for name, patterns in model.family.parts(table).items()
    }
    assert all(found.values()) and set().union(*found.values()) == names
    assert sum(len(own) for own in found.values()) == len(names)


def test_a_plan_counts_the_encoders_on_the_first_stage_and_says_what_it_leaves_out(seeing: Model) -> None:
    trainer = MegatronTrainer(MegatronTrainer.options_model()(pipeline_parallel=2))
    trainer.build = lambda chosen: Reinforce()
    table, shape = {"path": str(seeing.folder)}, architecture(seeing.folder)
    estimates = [
        trainer.estimate(
            TrainerSpec(table, ALGORITHM, OptimizerSpec(1e-3), rank=rank, world_size=2), Workload(4, 2, 8, 8)
        )
        for rank in (0, 1)
    ]
    held = [one.phases["train"]["parameters"] // 4 for one in estimates]
    encoders = sum(size for _, size in shape.encoders)
    assert encoders > 0
    assert held[0] - held[1] == encoders - shape.hidden  # both hold the embedding, the last stage also the last norm
    assert any("encoders are left out" in note for note in estimates[0].notes)


def test_what_cannot_be_trained_is_refused_before_a_process_starts(
    seeing: Model, hearing: Model, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"trainer.pipeline_parallel: got 4; .* hold the first 2, which get features of images"
    ):
        architecture(seeing.folder).check(Grid(4, pipeline=4), sequence_parallel=False)
    with pytest.raises(
        ConfigError, match=r"trainer.virtual_pipeline: got 2; .* hold the first 2, which get features of images"
    ):
        architecture(seeing.folder).check(Grid(2, pipeline=2, virtual=2), sequence_parallel=False)
    table = {"path": str(hearing.folder), **LORA}
    with pytest.raises(
        ConfigError, match=r"model.lora: .* no adapters for qwen3_omni_moe_thinker; use trainer = torch"
    ):
        Lora.of(TrainerSpec(table, ALGORITHM, OptimizerSpec(1e-3)), architecture(hearing.folder))
    other = tiny.build_model("qwen3_vl_moe", 0, 64)
    other.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"family qwen3_vl_moe; megatron trains .* use trainer = torch"):
        architecture(tmp_path)


def test_a_critic_with_encoders_is_refused(seeing: Model) -> None:
    refused = pytest.raises(ConfigError, match=r"with vision or audio; the critic gives scalars")
    with refused, megatron(seeing.folder, ONE, role="critic"):
        pass


def test_a_comparison_of_layouts_says_what_a_medium_counts_and_which_layouts_are_refused(tmp_path: Path) -> None:
    model = built("qwen3_vl", tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "what is this ?", "answer": "this"}\n' * 8)
    run = {
        "trainer": "megatron", "media": ["image"], "model": {"path": str(model.folder)}, "rewards": ["exact"], "steps": 1,
        "data": {"train": str(tmp_path / "rows.jsonl")}, "eval": {"every": 0}, "placement": {"actor": {"ranks": 2}},
        "rollout": {"max_new_tokens": 8},
    }  # fmt: skip
    (compared,) = compare_layouts([run], [], Machine(0, False, 1 << 34, 0, 1e11, 1e10, 1e9))
    assert MEDIA_NOTE in compared.notes
    assert any("hold the first 2, which get features of images" in one.reason for one in compared.layouts)
