# SPDX-License-Identifier: Apache-2.0
"""Blocks that are computed again in the backward pass: the same bits. What that saves is counted in test_estimate_sizes."""

import pytest
import torch
from relax_plugin_torch.blocks import compile_blocks, recompute_blocks
from relax_plugin_torch.layout import by_row
from relax_plugin_torch.model import load_model
from relax_plugin_torch.policy import Policy
from relax_plugin_torch.setup import choose_attention
from transformers import GPT2Config, GPT2LMHeadModel

from relax_core.api import ConfigError, Version
from relax_core.learn import PackedBatch
from relax_core.learn.counts import count
from relax_core.testing.trainer import make_rows
from tests.trainers import TRANSPORT, accumulate, gradients, running, train

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.3}
CPU = torch.device("cpu")


@pytest.fixture
def start(divisible):
    """Start a trainer that computes blocks again or not."""
    return lambda again, *ranks, options=(), **how: running(
        divisible, *ranks, options={"activation_checkpointing": again, **dict(options)}, deterministic=True, **how
    )


@pytest.mark.parametrize(("role", "model"), [
    ("actor", {"dtype": "float16"}),
    ("actor", {"lora": LORA, "freeze": ["layers.0"]}),
    ("critic", {}),
])  # fmt: skip
def test_loss_and_gradients_are_those_without_it_bit_for_bit(start, role, model):
    """Adapters' dropout too: what was drawn is drawn again."""
    rows, slopes, results = make_rows(), [], []
    for again in (False, True):
        with start(again, role=role, model=model) as trainer:
            trainer.begin_step(Version("actor", 0, 0))
            accumulate(trainer, rows, cuts=[8], budget=40)
            slopes.append(gradients(trainer))
            results.append((trainer.finish_update(count(rows)), train(trainer, 1, budget=40)))
    assert results[0] == results[1]
    assert slopes[0].keys() == slopes[1].keys() and slopes[0]
    assert all(torch.equal(slope, slopes[1][name]) for name, slope in slopes[0].items())


@pytest.mark.parametrize(("options", "model"), [
    ({"sharding": "fsdp"}, {"lora": LORA, "dtype": "bfloat16"}),
    ({"tensor_parallel": 2}, {}),
])  # fmt: skip
def test_recomputation_changes_no_bit_on_two_ranks(start, options, model):
    told = []
    for again in (False, True):
        with start(again, 2, options=options, model=model) as trainer:
            results = [train(trainer, number, cuts=[8], budget=40) for number in range(2)]
            told.append((results, trainer.publish(Version("actor", 0, 2), TRANSPORT, "").fingerprint))
    assert told[0] == told[1]


@pytest.mark.faults  # test_attention.py compiles in the gate
def test_compiled_blocks_are_computed_again_alike(divisible):
    batch, scores = PackedBatch(make_rows()), []
    for again in (False, True):
        model = load_model(divisible, choose_attention("sdpa", CPU, torch.float32, False), CPU)
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


def test_a_model_without_declared_blocks_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    model._no_split_modules = None
    with pytest.raises(
        ConfigError, match=r"trainer\.activation_checkpointing: got true.*GPT2LMHeadModel.*leave it out"
    ):
        recompute_blocks(model)
