# SPDX-License-Identifier: Apache-2.0
"""What a rank is said to need is what it needs, counted in tensors as it trains; nothing of the model is loaded for it."""

import numpy as np
import pytest
from relax_plugin_torch.live_bytes import LiveBytes
from relax_plugin_torch.trainer import TorchTrainer
from transformers import Qwen3Config, Qwen3ForCausalLM

from relax_core.api import (
    Chosen,
    Chunk,
    ConfigError,
    OptimizerSpec,
    Ragged,
    RowBatch,
    RowId,
    TrainerSpec,
    Version,
    Workload,
)
from relax_core.api.algorithm import Output
from relax_core.learn.counts import count
from relax_core.testing.trainer import InMemory, Reinforce, tiny_model


class Judged(Reinforce):
    def outputs(self):
        return frozenset({Output("rewards")})


WORK = Workload(prompts=4, group_size=4, prompt_tokens=24, new_tokens=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Eight blocks: activations are what there is most of."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=16, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("deep")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def as_wide_as_its_vocabulary(tmp_path_factory):
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        intermediate_size=48, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("wide")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


def trainer_of(**options):
    trainer = TorchTrainer(TorchTrainer.options_model()(**options))
    trainer.build = lambda chosen: Reinforce(chosen.options) if chosen.kind == "algorithm" else InMemory()
    return trainer


def spec_of(folder, budget=512, **changes):
    return TrainerSpec({"path": folder}, Chosen("algorithm", "reinforce"), OptimizerSpec(1e-3), tokens_per_micro_batch=budget,
                       **changes)  # fmt: skip


def rows_of(step):
    made, length = np.random.default_rng(step), WORK.row_tokens
    prompts = made.integers(0, 64, (WORK.prompts, WORK.prompt_tokens))
    tokens = [np.r_[prompts[i // 4], made.integers(0, 64, WORK.new_tokens)].astype(np.int32) for i in range(WORK.rows)]
    mask = np.r_[np.zeros(WORK.prompt_tokens, np.uint8), np.ones(WORK.new_tokens, np.uint8)]
    columns = {
        "tokens": Ragged.of(tokens), "loss_mask": Ragged.of([mask] * WORK.rows),
        "advantages": Ragged.of([made.normal(size=length).astype(np.float32) for _ in tokens]),
        "rollout_log_probs": Ragged.of([np.full(length, -4, np.float32)] * WORK.rows),
        "weight_versions": Ragged.of([np.full(length, step, np.int32)] * WORK.rows),
    }  # fmt: skip
    return RowBatch(tuple(RowId(i // 4, i % 4, 0, 0) for i in range(WORK.rows)), columns)


def step(trainer, number, budget):
    rows = rows_of(number)
    trainer.begin_step(Version("actor", 0, number))
    trainer.begin_update(count(rows))
    trainer.accumulate(Chunk(rows, trainer.plan([WORK.row_tokens] * WORK.rows, 1, budget)), True)
    return trainer.finish_update(count(rows))


def counted(folder, budget, **options):
    """Bytes of tensors at the peak of a later step."""
    trainer = trainer_of(**options)
    trainer.start(spec_of(folder, budget))
    step(trainer, 0, budget)
    live, rank = LiveBytes(lambda tensor: "made"), trainer._rank
    moments = [value for state in rank._optimizer.state.values() for value in state.values()]
    live.belongs("held", [*rank._model.parameters(), *rank._model.buffers(), *moments])
    with live:
        step(trainer, 1, budget)
    trainer.stop()
    return sum(live.peak.values())


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("budget", [128, 512])
def test_the_estimate_is_within_a_tenth_of_what_training_holds(folder, budget, share):
    told = trainer_of(share_prefixes=share).estimate(spec_of(folder, budget), WORK)
    have = told.tensors("train")
    assert have == pytest.approx(counted(folder, budget, share_prefixes=share), rel=0.1)


def test_blocks_that_are_computed_again_leave_little_and_the_estimate_knows(deep):
    have = {}
    for again in (False, True):
        told = trainer_of(activation_checkpointing=again).estimate(spec_of(deep), WORK)
        have[again] = counted(deep, 512, activation_checkpointing=again)
        assert told.tensors("train") == pytest.approx(have[again], rel=0.1)
    state = sum(told.phases["train"][part] for part in ("parameters", "gradients", "optimizer"))
    assert have[True] - state < 0.2 * (have[False] - state)


def test_the_parts_of_state_are_exact(folder):
    told = trainer_of().estimate(spec_of(folder), WORK)
    trainer = trainer_of()
    parameters = trainer.start(spec_of(folder))["parameters"]
    trainer.stop()
    parts = told.phases["train"]
    assert parts["gradients"] == 4 * parameters
    assert parts["parameters"] == pytest.approx(4 * parameters, rel=0.01)  # and a few buffers
    assert parts["optimizer"] == pytest.approx(8 * parameters, rel=0.01)
    assert told.phases["checkpoint"]["snapshot"] == parts["parameters"] + parts["optimizer"]


def test_ranks_that_share_weights_hold_less_each(folder):
    alone = trainer_of().estimate(spec_of(folder), WORK)
    shared = trainer_of(sharding="fsdp").estimate(spec_of(folder, world_size=2, rank=1), WORK)
    assert shared.phases["train"]["optimizer"] == pytest.approx(alone.phases["train"]["optimizer"] / 2, rel=0.01)
    assert shared.flops["train"] < alone.flops["train"]
    assert "arithmetic" in shared.notes[0]


def test_ranks_that_the_group_size_does_not_divide_are_refused_by_the_plan(folder):
    with pytest.raises(ConfigError, match=r"trainer\.tensor_parallel: got 2 with 3 ranks; it must divide the ranks"):
        trainer_of(tensor_parallel=2).estimate(spec_of(folder, world_size=3), WORK)


def test_an_optimizer_that_lies_apart_is_there_for_its_step_alone(folder):
    trainers = [trainer_of(offload_optimizer=one, device="cuda") for one in (False, True)]
    whole, apart = (trainer.estimate(spec_of(folder), WORK).phases for trainer in trainers)
    assert whole["train"] == {**apart["train"], "optimizer": apart["update"]["optimizer"]}
    assert apart["update"].keys() == {"parameters", "gradients", "optimizer"}
    assert "optimizer" not in apart["publish"] and apart["checkpoint"] == whole["checkpoint"]


def test_a_plan_for_a_cpu_with_an_optimizer_apart_is_refused(folder):
    with pytest.raises(ConfigError, match=r"trainer\.offload_optimizer: got true on cpu.*leave it out"):
        trainer_of(offload_optimizer=True, device="cpu").estimate(spec_of(folder), WORK)


def test_a_model_that_learns_to_judge_has_no_logits_but_is_published(as_wide_as_its_vocabulary):
    folder, trainer = as_wide_as_its_vocabulary, trainer_of()
    trainer.build = lambda chosen: Judged()
    told = trainer.estimate(spec_of(folder), WORK)
    assert "logits" not in told.phases["train"] and "published" in told.phases["publish"]


def test_a_role_that_only_reads_has_no_gradients(folder):
    told = trainer_of().estimate(spec_of(folder, role="reference"), WORK)
    assert list(told.phases) == ["forward"]
    assert {"gradients", "optimizer"}.isdisjoint(told.phases["forward"])
