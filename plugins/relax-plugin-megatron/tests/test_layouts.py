# SPDX-License-Identifier: Apache-2.0
"""In every layout the Megatron trainer computes what the torch trainer computes: scores, steps, and checkpoints."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from relax_plugin_megatron.trainer import MegatronTrainer

from relax_core.api import ConfigError, Ragged, TrainerSpec, Version, Workload
from relax_core.testing.moe import EXPERTS, LAYERS, TOP_K, tiny_moe
from relax_core.testing.trainer import Reinforce, forward, make_rows, started, tiny_model
from relax_core.testing.trainer_ranks import groups_of
from tests.megatron_on_cpu.layouts import (
    CP2,
    DP2,
    EP2,
    OFFLOADED,
    ONE,
    OPTIMIZER,
    PP2,
    PP2_VP2,
    SAVED,
    SELECTIVE,
    STEPS,
    TP2,
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


@pytest.fixture(scope="session")
def expected(dense, tmp_path_factory):
    with running(dense, optimizer=OPTIMIZER) as trainer:
        return curve(trainer, tmp_path_factory.mktemp("torch"))


@pytest.fixture(scope="session")
def expected_of_mixture(mixture, tmp_path_factory):
    with running(mixture, optimizer=OPTIMIZER) as trainer:
        return curve(trainer, tmp_path_factory.mktemp("torch"))


def assert_estimated(trainer, path, layout):
    """Require that a plan counts the parameters that each started rank holds."""
    plain = MegatronTrainer(MegatronTrainer.options_model()(**layout.options))
    plain.build = lambda chosen: Reinforce()
    specs = [
        TrainerSpec({"path": path}, ALGORITHM, OPTIMIZER, rank=rank, world_size=layout.ranks)
        for rank in range(layout.ranks)
    ]
    estimated = [plain.estimate(spec, Workload(2, 2, 8, 8)).phases["train"]["parameters"] for spec in specs]
    assert estimated == [4 * facts["parameters_of_rank"] for facts in trainer.facts_of_ranks]


@pytest.mark.parametrize(
    "layout", [SELECTIVE, DP2, TP2, TP2_SP, PP2, CP2], ids=["1 selective", "DP2", "TP2", "TP2 SP", "PP2", "CP2"]
)
def test_a_dense_model_scores_and_learns_as_with_torch(dense, expected, layout, tmp_path):
    """Each layout also reads and writes the checkpoints of the torch trainer, and so those of every other layout."""
    with megatron(dense, layout) as trainer:
        made = curve(trainer, tmp_path)
        assert_near(made, expected)
        assert_estimated(trainer, dense, layout)
        trainer.load(expected.checkpoint)
        assert np.allclose(steps(trainer, SAVED, STEPS), expected.late, rtol=2e-4, atol=1e-6)
    with running(dense, optimizer=OPTIMIZER) as trainer:
        trainer.load(made.checkpoint)
        assert np.allclose(steps(trainer, SAVED, STEPS), made.late, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("layout", [EP2, PP2, TP2_SP], ids=["EP2", "PP2", "TP2 SP"])
def test_a_mixture_of_experts_scores_and_learns_as_with_torch(mixture, expected_of_mixture, layout, tmp_path):
    with megatron(mixture, layout) as trainer:
        assert_near(curve(trainer, tmp_path), expected_of_mixture)
        assert_estimated(trainer, mixture, layout)


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("deep"), key_value_heads=2, layers=4)


@pytest.fixture(scope="session")
def expected_of_deep(deep, tmp_path_factory):
    with running(deep, optimizer=OPTIMIZER) as trainer:
        return curve(trainer, tmp_path_factory.mktemp("torch"))


def test_interleaved_stages_score_and_learn_as_with_torch(deep, expected_of_deep, tmp_path):
    """The micro-batches have rows of different number and length, and their number fills no round of the stages."""
    with megatron(deep, PP2_VP2) as trainer:
        assert_near(curve(trainer, tmp_path, budget=32), expected_of_deep)


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [2, 4], ids=["PP2", "PP4"])
def test_chunks_of_interleaved_stages_are_saved_published_and_exported_under_their_names(ranks, tmp_path):
    path = tiny_model(tmp_path / "model", key_value_heads=2, layers=2 * ranks)
    layout = Layout({"pipeline_parallel": ranks, "virtual_pipeline": 2}, ranks)
    with running(path, optimizer=OPTIMIZER) as trainer:
        expected = curve(trainer, tmp_path / "torch")
        first = trainer.facts["fingerprint"]
    with megatron(path, layout) as trainer:
        assert trainer.facts["fingerprint"] == first
        found = curve(trainer, tmp_path / "megatron", budget=32)
        assert_near(found, expected)
        scores = forward(trainer, make_rows(9), STEPS).values
        trainer.export(str(tmp_path / "export"))
        trainer.load(expected.checkpoint)
        assert np.allclose(steps(trainer, SAVED, STEPS, budget=32), expected.late, rtol=2e-4, atol=1e-6)
    with running(path, optimizer=OPTIMIZER) as trainer:
        trainer.load(found.checkpoint)
        assert np.allclose(steps(trainer, SAVED, STEPS), found.late, rtol=2e-4, atol=1e-6)
    with running(tmp_path / "export", role="reference") as reference:
        assert np.allclose(forward(reference, make_rows(9), 0).values, scores, rtol=0, atol=1e-5)


@pytest.mark.faults
def test_interleaved_stages_go_with_tensor_parallel_recomputation_and_critics(deep, expected_of_deep, tmp_path):
    options = {**TP2_SP.options, **PP2_VP2.options, "recompute": "full"}
    with megatron(deep, Layout(options, 4)) as trainer:
        assert_near(curve(trainer, tmp_path, budget=32), expected_of_deep)
    with running(deep, role="critic", optimizer=OPTIMIZER) as trainer:
        expected = critic_steps(trainer)
    with megatron(deep, PP2_VP2, role="critic") as trainer:
        assert np.allclose(critic_steps(trainer), expected, rtol=2e-4)


@pytest.mark.faults
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_interleaved_stages_replay_the_experts_of_their_layers(recompute, tmp_path):
    path, replay = tiny_moe(str(tmp_path), 0, pad_token_id=None, num_hidden_layers=4), {"routing_replay": "rollout"}
    with running(path, optimizer=OPTIMIZER, model=replay) as trainer:
        expected = replayed(trainer, 4)
    with megatron(path, Layout({**PP2_VP2.options, "recompute": recompute}, 2), model=replay) as trainer:
        assert_replayed_alike(replayed(trainer, 4), expected)


@pytest.mark.faults
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_state_of_the_optimizer_changes_no_bit(dense, dtype, tmp_path):
    with megatron(dense, DP2, {"dtype": dtype}) as trainer:
        expected = curve(trainer, tmp_path / "plain")
    with megatron(dense, OFFLOADED, {"dtype": dtype}) as trainer:
        found = curve(trainer, tmp_path / "offloaded")
        assert (found.early, found.late) == (expected.early, expected.late)
        trainer.load(expected.checkpoint)
        assert steps(trainer, SAVED, STEPS) == expected.late


@pytest.mark.faults
def test_an_offloaded_state_needs_a_gpu(dense):
    trainer = MegatronTrainer(MegatronTrainer.options_model()(offload_optimizer=True))
    trainer.build = lambda chosen: Reinforce()
    with pytest.raises(ConfigError, match=r"trainer.offload_optimizer: got true on cpu; .* leave it out"):
        started(trainer, TrainerSpec({"path": dense}, ALGORITHM, OPTIMIZER))


@pytest.mark.faults
@pytest.mark.parametrize("layout", [TP2_SP, PP2, EP2], ids=["TP2 SP", "PP2", "EP2"])
def test_restarts_in_the_same_processes_leave_no_threads(dense, mixture, layout):
    left = []
    for _ in range(4):
        with megatron(mixture if layout is EP2 else dense, layout) as trainer:
            train(trainer, 0)
        left.append(max(trainer.threads()))
    assert left[-1] - left[0] < 3  # gloo has 3 threads for each of Megatron's groups


@pytest.mark.faults
@pytest.mark.parametrize(
    "family",
    [
        "llama", "qwen2", "mixtral", "qwen3_moe plain", "4 ranks", "4 ranks with context", "2 pipelines",
        "2 pipelines with experts", "experts split twice",
    ],
)  # fmt: skip
def test_further_families_and_layouts_learn_as_with_torch(family, dense, mixture, tmp_path):
    layout = PP2
    if family == "4 ranks":
        path, layout = dense, Layout({"tensor_parallel": 2, "pipeline_parallel": 2, "recompute": "full"}, 4)
    elif family == "4 ranks with context":
        path, layout = dense, Layout({**TP2_SP.options, "context_parallel": 2}, 4)
    elif family == "2 pipelines":
        path, layout = dense, Layout(PP2.options, 4)
    elif family == "2 pipelines with experts":
        path, layout = mixture, Layout({**PP2.options, **EP2.options}, 4)
    elif family == "experts split twice":
        path, layout = mixture, Layout({**TP2_SP.options, "expert_parallel": 1, "expert_tensor_parallel": 2}, 2)
    elif family in ("mixtral", "qwen3_moe plain"):
        path, layout = tiny_moe(str(tmp_path / "model"), 0, family, pad_token_id=None), EP2
    else:
        path = of_family(family, tmp_path / "model")
    with running(path, optimizer=OPTIMIZER) as trainer:
        expected = curve(trainer, tmp_path / "torch")
    with megatron(path, layout) as trainer:
        assert_near(curve(trainer, tmp_path / "megatron"), expected)


@pytest.mark.faults
@pytest.mark.parametrize("layout", [ONE, TP2], ids=["1", "TP2"])
def test_biases_in_bfloat16_have_their_own_float32_weights_beside_norms_in_float32(layout, tmp_path):
    path, half = of_family("qwen2", tmp_path / "model", 2), {"dtype": "bfloat16"}
    with running(path, optimizer=OPTIMIZER, model=half) as trainer:
        first, expected = trainer.facts["fingerprint"], steps(trainer, 0, 5)
    with megatron(path, layout, half) as trainer:
        assert trainer.facts["fingerprint"] == first
        assert np.allclose(steps(trainer, 0, 5), expected, rtol=0.1, atol=0.1)


def test_losses_of_float16_are_scaled_as_configured_and_gradients_are_not(dense):
    with running(dense, optimizer=OPTIMIZER) as trainer:
        expected = steps(trainer, 0, 2)
    scaled = Layout({"loss_scale": 8.0, "loss_scale_window": 1})
    with megatron(dense, scaled, model={"dtype": "float16"}) as trainer:
        results = [train(trainer, step) for step in range(2)]
    assert [result.metrics["train/loss_scale"][0] for result in results] == [8.0, 16.0]
    assert np.allclose([(r.metrics["train/loss"][0], r.grad_norm) for r in results], expected, rtol=0.05, atol=0.05)


@pytest.fixture(scope="session")
def even(tmp_path_factory):
    """A model whose last hidden states are 1 and -1, in float32 as in bfloat16, so that only logits are rounded."""
    import torch
    from transformers import AutoModelForCausalLM

    path = of_family("llama", tmp_path_factory.mktemp("even") / "model", 2)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.model.embed_tokens.weight.sign_()
        model.lm_head.weight.mul_(8.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(path)
    return path


def test_a_float32_head_gives_the_logits_of_the_torch_trainer(even):
    rows, precise = make_rows(9), {"dtype": "bfloat16", "head_dtype": "float32"}
    with running(even, optimizer=OPTIMIZER, model=precise) as trainer:
        expected, norm = forward(trainer, rows, 0).values, train(trainer).grad_norm
    with megatron(even, TP2, model=precise) as trainer:
        assert np.allclose(forward(trainer, rows, 0).values, expected, rtol=0, atol=1e-4)
        assert train(trainer).grad_norm == pytest.approx(norm, rel=0.02)
    with megatron(even, ONE, model={"dtype": "bfloat16"}) as trainer:
        assert np.abs(forward(trainer, rows, 0).values - expected).max() > 0.01


def routed_rows(seed, layers=LAYERS):
    """Make rows whose tokens visit random experts; those of a few tokens are not known."""
    rows, random = make_rows(seed, version=seed), np.random.default_rng(seed)
    lengths = rows.columns["tokens"].lengths
    experts = np.array([random.permutation(EXPERTS)[:TOP_K] for _ in range(int(lengths.sum()) * layers)], np.uint8)
    known = (random.random(int(lengths.sum())) < 0.9).astype(np.uint8)
    return rows.with_columns({
        "routed_experts": Ragged(experts.reshape(-1, layers, TOP_K), lengths), "routed_valid": Ragged(known, lengths),
    })  # fmt: skip


def replayed(trainer, layers=LAYERS):
    """Train with given experts; return figures of each step, and the experts that the model would choose.

    A step has several micro-batches, of which the stages of a pipeline hold two at once.
    """
    results = [train(trainer, step, routed_rows(step, layers), budget=96) for step in range(4)]
    names = ("routing/replayed", "routing/differs")
    figures = [
        (r.grad_norm, r.metrics["train/loss"][0], *(n for name in names for n in r.metrics[name])) for r in results
    ]
    own = forward(trainer, make_rows(9), 0, ("routed_experts",)).values
    given = forward(trainer, routed_rows(9, layers), 0).values
    return figures, np.sort(own, -1), given


def assert_replayed_alike(found, expected):
    assert np.allclose(found[0], expected[0], rtol=2e-4)
    assert np.array_equal(found[1], expected[1])
    assert np.allclose(found[2], expected[2], rtol=0, atol=1e-5)


@pytest.fixture(scope="session")
def expected_replay(mixture):
    with running(mixture, optimizer=OPTIMIZER, model={"routing_replay": "rollout"}) as trainer:
        return replayed(trainer)


@pytest.mark.parametrize(
    "layout",
    [EP2, Layout({"pipeline_parallel": 2, "recompute": "full"}, 2), TP2_SP],
    ids=["EP2", "PP2 recomputed", "TP2 SP"],
)
def test_replayed_experts_give_what_they_give_with_torch(mixture, expected_replay, layout):
    with megatron(mixture, layout, model={"routing_replay": "rollout"}) as trainer:
        assert_replayed_alike(replayed(trainer), expected_replay)


def critic_steps(trainer):
    return [train(trainer, step).grad_norm for step in range(3)]


def test_a_critic_learns_and_is_exported_as_with_torch(dense, tmp_path):
    with running(dense, role="critic", optimizer=OPTIMIZER) as trainer:
        expected = critic_steps(trainer)
        values = forward(trainer, make_rows(9), 0, ("values",)).values
    for layout in (TP2_SP, PP2, CP2):
        with megatron(dense, layout, role="critic") as trainer:
            assert np.allclose(critic_steps(trainer), expected, rtol=2e-4)
            assert np.allclose(forward(trainer, make_rows(9), 0, ("values",)).values, values, rtol=0, atol=1e-5)
            trainer.export(str(tmp_path / str(layout.options)))
        with running(tmp_path / str(layout.options), role="critic") as trainer:
            assert np.allclose(forward(trainer, make_rows(9), 0, ("values",)).values, values, rtol=0, atol=1e-5)


def test_a_forward_role_loads_versions_and_deltas_that_another_layout_published(dense, tmp_path):
    rows, folder = make_rows(9), str(tmp_path)
    with megatron(dense, DP2) as actor:
        whole = actor.publish(Version("actor", 0, 0), DISK, folder)
        train(actor, 0)
        delta = actor.publish(Version("actor", 0, 1), DISK, folder, "delta", "actor@0.0")
        expected = forward(actor, rows, 0).values
        for layout in (TP2_SP, PP2):
            with megatron(dense, layout, role="actor_fwd") as follower:
                follower.load_published(whole, DISK)
                follower.load_published(delta, DISK)
                again = follower.publish(Version("actor", 0, 0), DISK, str(tmp_path / str(layout.options)))
                assert again.fingerprint == delta.fingerprint
                assert np.allclose(forward(follower, rows, 0).values, expected, rtol=0, atol=1e-5)
                with pytest.raises(ValueError, match=r"on top of actor@0\.0; this trainer has actor@0\.1"):
                    follower.load_published(delta, DISK)


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        (DP2.options, [0, 1, 2, 3]), (TP2.options, [0, 0, 1, 1]), (CP2.options, [0, 0, 1, 1]), (PP2.options, [0, 1, 0, 1]),
        ({**TP2.options, **PP2.options}, [0, 0, 0, 0]), ({**PP2.options, **EP2.options}, [0, 1, 0, 1]),
    ],
    ids=["DP4", "TP2", "CP2", "PP2", "TP2 PP2", "PP2 EP2"],
)  # fmt: skip
def test_the_plan_gives_four_ranks_the_rows_that_they_compute_together(options, groups):
    trainer = MegatronTrainer(MegatronTrainer.options_model()(**options))
    assert groups_of(trainer, 4) == groups


@pytest.mark.parametrize(
    ("options", "ranks", "model", "said"),
    [
        ({"tensor_parallel": 2}, 3, {}, r"trainer.tensor_parallel: got tensor_parallel 2 .* on 3 ranks"),
        ({"tensor_parallel": 4}, 4, {}, r"trainer.tensor_parallel: got 4; it must divide the 2 attention heads"),
        ({"pipeline_parallel": 4}, 4, {}, r"trainer.pipeline_parallel: got 4; it must divide the 2 layers"),
        ({"virtual_pipeline": 2}, 1, {}, r"trainer.virtual_pipeline: got 2; .* set trainer.pipeline_parallel to 2"),
        (
            {**PP2.options, "virtual_pipeline": 2},
            2,
            {},
            r"trainer.virtual_pipeline: got 2; .* the 1 layers of each stage",
        ),
        ({"expert_parallel": 2}, 2, {}, r"trainer.expert_parallel: got 2; it must divide the 0 experts"),
        ({"sequence_parallel": True}, 1, {}, r"trainer.sequence_parallel: got True; .* set trainer.tensor_parallel"),
        ({}, 1, {"lora": {"rank": 4, "alpha": 8.0, "dora": True}}, r"model.lora.dora: .* use trainer = torch"),
        ({}, 1, {"freeze": ["q_proj"]}, r"model.freeze: .* use trainer = torch"),
        ({}, 1, {"path": "gemma"}, r"model.path: got .*gemma of the family gemma3_text; megatron trains llama"),
        ({}, 1, {"path": "yarn"}, r"model.path: got .*yarn with positions of the type yarn"),
        ({}, 1, {"path": "window"}, r"model.path: got .*window with use_sliding_window"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(dense, tmp_path, options, ranks, model, said):
    config = json.loads((Path(dense) / "config.json").read_text())
    folder = tmp_path / model.get("path", "model")
    shutil.copytree(dense, folder)
    changed = {
        "gemma": {"model_type": "gemma3_text"}, "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "window": {"use_sliding_window": True},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **changed.get(folder.name, {})}))
    trainer = MegatronTrainer(MegatronTrainer.options_model()(**options))
    trainer.build = lambda chosen: Reinforce()
    spec = TrainerSpec({**model, "path": str(folder)}, ALGORITHM, OPTIMIZER, world_size=ranks)
    with pytest.raises(ConfigError, match=said):
        trainer.estimate(spec, Workload(2, 2, 8, 8))


def test_a_mixture_split_over_tensor_parallel_ranks_needs_sequence_parallel(mixture):
    trainer = MegatronTrainer(MegatronTrainer.options_model()(tensor_parallel=2))
    trainer.build = lambda chosen: Reinforce()
    with pytest.raises(
        ConfigError, match=r"trainer.sequence_parallel: got False; .* set trainer.sequence_parallel = true"
    ):
        trainer.estimate(TrainerSpec({"path": mixture}, ALGORITHM, OPTIMIZER, world_size=2), Workload(2, 2, 8, 8))
