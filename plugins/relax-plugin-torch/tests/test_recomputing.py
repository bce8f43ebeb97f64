# SPDX-License-Identifier: Apache-2.0
"""Blocks that are computed again in the backward pass: the same bits. What that saves is counted in test_estimate."""

from contextlib import contextmanager

import pytest
import torch
from relax_plugin_torch.blocks import compile_blocks, recompute_blocks
from relax_plugin_torch.layout import by_row
from relax_plugin_torch.model import load_model
from relax_plugin_torch.policy import Policy
from relax_plugin_torch.setup import choose_attention
from relax_plugin_torch.trainer import TorchTrainer
from transformers import GPT2Config, GPT2LMHeadModel

from relax_core.api import Chosen, ConfigError, OptimizerSpec, TrainerSpec, Version
from relax_core.learn import PackedBatch
from relax_core.learn.counts import count
from relax_core.testing.trainer import InMemory, Reinforce, chunk, make_rows, tiny_model
from relax_core.testing.trainer_ranks import RankedTrainer

ALGORITHM, TRANSPORT = Chosen("algorithm", "reinforce"), Chosen("weight-transport", "in-memory")
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.3}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), key_value_heads=2)


@contextmanager
def started(path, again, ranks=1, role="actor", options=(), **model):
    options = {"activation_checkpointing": again, **dict(options)}
    if ranks == 1:
        trainer, held = TorchTrainer(TorchTrainer.options_model()(**options)), InMemory()
        trainer.build = lambda chosen: Reinforce(chosen.options) if chosen.kind == "algorithm" else held
    else:
        trainer = RankedTrainer(TorchTrainer, options, ranks, options.get("tensor_parallel", 1))
    trainer.start(TrainerSpec({"path": path, **model}, ALGORITHM, OptimizerSpec(1e-2), role=role, deterministic=True))
    try:
        yield trainer
    finally:
        trainer.stop()


def accumulate(trainer, number=0):
    rows = make_rows(number, version=number)
    trainer.begin_step(Version("actor", 0, number))
    trainer.begin_update(count(rows))
    for part in (range(8), range(8, len(rows))):
        trainer.accumulate(chunk(trainer, rows.take(list(part)), 40), part.stop == len(rows))
    return rows


def step(trainer, number=0):
    return trainer.finish_update(count(accumulate(trainer, number)))


@pytest.mark.parametrize(("role", "model"), [
    ("actor", {}),
    ("actor", {"dtype": "bfloat16"}),
    ("actor", {"dtype": "float16"}),
    ("actor", {"lora": LORA}),
    ("actor", {"freeze": ["embed_tokens", "layers.0"]}),
    ("critic", {}),
])  # fmt: skip
def test_loss_and_gradients_are_those_without_it_bit_for_bit(folder, role, model):
    """Adapters' dropout too: what was drawn is drawn again."""
    gradients, results = [], []
    for again in (False, True):
        with started(folder, again, role=role, **model) as trainer:
            rows = accumulate(trainer)
            own = trainer._rank._model.named_parameters()
            gradients.append({name: p.grad.clone() for name, p in own if p.grad is not None})
            results.append((trainer.finish_update(count(rows)), step(trainer, 1)))
    assert results[0] == results[1]
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


@pytest.mark.parametrize(("options", "model"), [
    ({"sharding": "fsdp"}, {}),
    ({"sharding": "fsdp"}, {"lora": LORA, "dtype": "bfloat16"}),
    ({"tensor_parallel": 2}, {}),
])  # fmt: skip
def test_it_changes_no_bit_on_two_ranks(folder, options, model):
    told = []
    for again in (False, True):
        with started(folder, again, 2, options=options, **model) as trainer:
            results = [step(trainer, number) for number in range(2)]
            told.append((results, trainer.publish(Version("actor", 0, 2), TRANSPORT, "").fingerprint))
    assert told[0] == told[1]


@pytest.mark.faults  # test_attention.py compiles in the gate
def test_compiled_blocks_are_computed_again_alike(folder):
    batch, scores = PackedBatch(make_rows()), []
    for again in (False, True):
        model = load_model(folder, choose_attention("sdpa", CPU, torch.float32, False), CPU)
        if again:
            recompute_blocks(model)
        policy = Policy(model, temperature=1.0, autocast=None, max_logits=2**20, share_prefixes=False)
        compile_blocks(model, policy.attend, backend="aot_eager")
        log_probs = policy._score(batch, by_row(batch), ())["log_probs"]
        log_probs.square().sum().backward()
        scores.append((log_probs.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(scores[1][0], scores[0][0], atol=1e-5, rtol=1e-5)
    for name, gradient in scores[0][1].items():
        torch.testing.assert_close(scores[1][1][name], gradient, atol=1e-4, rtol=1e-4)


def test_a_model_that_does_not_say_what_its_blocks_are_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    model._no_split_modules = None
    with pytest.raises(
        ConfigError, match=r"trainer\.activation_checkpointing: got true.*GPT2LMHeadModel.*leave it out"
    ):
        recompute_blocks(model)
