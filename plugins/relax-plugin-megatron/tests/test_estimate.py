# SPDX-License-Identifier: Apache-2.0
"""Estimates of a rank add up to those of the whole model, and layouts are every grid of the ranks."""

import json
from itertools import product

import pytest
from relax_plugin_megatron.estimate import architecture, layouts
from relax_plugin_megatron.layout import Grid
from relax_plugin_megatron.trainer import MegatronTrainer

from relax_core.api import OptimizerSpec, TrainerSpec, Workload
from relax_core.testing.trainer import Reinforce
from tests.trainers import ALGORITHM

WORK = Workload(8, 2, 24, 1000)
DENSE = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 16, "intermediate_size": 256, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {
    **DENSE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
}  # fmt: skip


@pytest.fixture(scope="module", params=[DENSE, MIXTURE], ids=["dense", "mixture"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(request.param))
    (path / "model.safetensors").write_bytes(b"")
    return path


def spec(folder, ranks, rank=0, role="actor", **model):
    return TrainerSpec(
        {"path": str(folder), **model}, ALGORITHM, OptimizerSpec(1e-3), rank=rank, world_size=ranks, role=role
    )


def estimates(folder, ranks, role="actor", **options):
    trainer = MegatronTrainer(MegatronTrainer.options_model()(**options))
    trainer.build = lambda chosen: Reinforce()
    return [trainer.estimate(spec(folder, ranks, rank, role, dtype="bfloat16"), WORK) for rank in range(ranks)]


def grids(folder, ranks=4):
    mixture = architecture(spec(folder, ranks)).experts
    for pipeline, context, expert in product((1, 2, 4), (1, 2, 4), (1, 2, 4) if mixture else (1,)):
        if ranks % (pipeline * context) == 0 and ranks // pipeline % expert == 0:
            yield {"pipeline_parallel": pipeline, "context_parallel": context, "expert_parallel": expert}


def test_the_ranks_of_every_grid_hold_the_optimizers_state_once(folder):
    whole = estimates(folder, 1)[0].phases["train"]["optimizer"]
    for options in grids(folder):
        states = [one.phases["train"]["optimizer"] for one in estimates(folder, 4, **options)]
        assert sum(states) == pytest.approx(whole, abs=4), options


def test_the_ranks_of_every_grid_do_the_work_of_one_rank(folder):
    whole = estimates(folder, 1)[0].flops["train"]
    for options in grids(folder):
        assert sum(one.flops["train"] for one in estimates(folder, 4, **options)) == pytest.approx(whole), options


def test_each_token_is_multiplied_with_its_own_experts_only(folder):
    shape = architecture(spec(folder, 1))
    sizes = shape.sizes(Grid(1), 0)
    norms = 4 * (2 * 64 + 2 * 16) + 64
    unused = shape.experts and 3 * (8 - 2) * 3 * 64 * 32  # in three layers
    assert sizes.multiplied == sizes.all - 512 * 64 - norms - unused


def test_one_rank_sends_nothing_and_data_parallel_ranks_send_gradients_and_weights(folder):
    assert estimates(folder, 1)[0].sent == {"train": 0.0}
    parameters = estimates(folder, 1)[0].phases["train"]["parameters"] / 2
    for one in estimates(folder, 4):
        assert one.sent["train"] == pytest.approx(parameters * (4 + 2) * 3 / 4)
    assert estimates(folder, 4, role="reference")[0].sent == {"forward": 0.0}


def test_a_pipeline_sends_hidden_states_and_waits_for_its_stages(folder):
    first, *_, last = estimates(folder, 4, pipeline_parallel=4)
    assert first.sent["train"] == last.sent["train"] == 16 * 1024 * 64 * 2
    assert first.idle["train"] == pytest.approx(3 / (2 + 3))  # two micro-batches of 8192 tokens


def test_an_offloaded_state_takes_memory_during_updates_only(folder):
    plain, offloaded = (estimates(folder, 1, offload_optimizer=offload)[0].phases for offload in (False, True))
    assert offloaded["train"] == {**plain["train"], "optimizer": 0}
    assert offloaded["update"] == {name: plain["train"][name] for name in ("parameters", "gradients", "optimizer")}


def test_chunks_of_a_stage_shorten_its_wait_and_cost_messages_and_memory(folder):
    whole, chunked = (
        estimates(folder, 2, pipeline_parallel=2, virtual_pipeline=chunks) for chunks in (1, 2)
    )  # fmt: skip
    hidden = 16 * 1024 * 64 * 2
    for one, two in zip(whole, chunked, strict=True):
        assert (one.sent["train"], two.sent["train"]) == (hidden, 3 * hidden)
        assert (one.idle["train"], two.idle["train"]) == (pytest.approx(1 / 3), pytest.approx(1 / 5))
    kept = [[one.phases["train"]["activations"] for one in found] for found in (whole, chunked)]
    assert kept[1][1] == pytest.approx(1.5 * kept[0][1], rel=1e-6)  # three chunks of one layer for two layers
    assert Grid(2, pipeline=2, virtual=2).layers(1, 8) == [2, 3, 6, 7]


def test_layouts_are_every_grid_once_for_each_micro_batch_and_recomputation(folder):
    found = list(layouts(spec(folder, 4), WORK))
    assert len({(tuple(one.options.items()), one.tokens_per_micro_batch) for one in found}) == len(found)
    seen = {tuple(one.options[f"{name}_parallel"] for name in ("tensor", "pipeline", "context")) for one in found}
    assert seen == {grid for grid in product((1, 2, 4), repeat=3) if 4 % (grid[0] * grid[1] * grid[2]) == 0}
    for one in found:
        options = MegatronTrainer.options_model()(**one.options)
        assert one.data_parallel == options.grid(4).data
        assert one.options["sequence_parallel"] == (one.options["tensor_parallel"] > 1)
    plain = [one for one in found if options_of(one) == (1, 1, 1, 1, "none")]
    assert [one.tokens_per_micro_batch for one in plain] == [1024, 2048, 4096]  # up to a rank's four rows


def test_frozen_weights_have_neither_gradients_nor_moments_nor_work_for_them(folder):
    def of(**model):
        trainer = MegatronTrainer(MegatronTrainer.options_model()())
        trainer.build = lambda chosen: Reinforce()
        return trainer.estimate(spec(folder, 1, dtype="bfloat16", **model), WORK)

    part, whole = of(lora={"rank": 4, "alpha": 8.0}), of()
    adapters = part.phases["train"]["gradients"] // 4
    everything = whole.phases["train"]["parameters"] // 2
    assert any(f"trains {adapters:,} of {adapters + everything:,} parameters" in note for note in part.notes)
    assert part.phases["train"]["optimizer"] == 8 * adapters
    assert part.phases["train"]["parameters"] == 2 * everything + 4 * adapters
    multiplied = architecture(spec(folder, 1)).sizes(Grid(1), 0).multiplied
    assert part.flops["train"] == pytest.approx(
        (4 * multiplied + 6 * adapters) / (6 * multiplied) * whole.flops["train"]
    )


def options_of(layout):
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "recompute")
    return tuple(layout.options.get(name) for name in names)
