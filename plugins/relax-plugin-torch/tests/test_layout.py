# SPDX-License-Identifier: Apache-2.0
"""Two layouts of the same rows give the same scores and gradients, and prompts in common are computed once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from relax_plugin_torch.layout import PrefixTree, by_row
from relax_plugin_torch.model import load_model
from relax_plugin_torch.policy import Policy

from relax_core.api import Ragged, RowBatch, RowId
from relax_core.learn import PackedBatch
from relax_core.testing.trainer import make_rows, tiny_model

VOCAB = 3
"""So few that rows of a group often begin alike, are prefixes of each other or are equal."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)
    model = load_model(folder, "sdpa", torch.device("cpu")).double()
    return Policy(model, temperature=1.0, autocast=None, max_logits=2**20, share_prefixes=True)


ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)), min_size=1, max_size=9
)


def batch_of(rows):
    tokens = Ragged.of([np.array(row, np.int32) for _, row in rows])
    masks = Ragged.of([np.array([0] + [1] * (len(row) - 1), np.uint8) for _, row in rows])
    ids = tuple(RowId(group, index, 0, 0) for index, (group, _) in enumerate(rows))
    return PackedBatch(RowBatch(ids, {"tokens": tokens, "loss_mask": masks}))


def score(policy, batch, layout):
    policy.model.zero_grad(set_to_none=True)
    log_probs = policy._probe(batch, layout)
    (log_probs * torch.arange(len(log_probs))).sum().backward()
    gradients = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in policy.model.parameters()]
    return log_probs.detach(), gradients


@settings(max_examples=30)
@given(rows=ROWS)
def test_both_layouts_give_the_same_scores_and_gradients(policy, rows):
    batch = batch_of(rows)
    plain, plain_gradients = score(policy, batch, by_row(batch))
    shared, shared_gradients = score(policy, batch, PrefixTree(batch).layout())
    assert torch.allclose(plain, shared, rtol=0, atol=1e-6)
    for one, other in zip(plain_gradients, shared_gradients, strict=True):
        # norms of this model compute in float32 whatever its weights are
        assert torch.allclose(one, other, rtol=0, atol=1e-5 * max(1.0, float(one.abs().max())))


@given(rows=ROWS)
def test_a_shared_prefix_is_in_the_line_of_its_group_once(rows):
    layout = PrefixTree(batch_of(rows)).layout()
    for line, group in enumerate(sorted({group for group, _ in rows})):
        prefixes = {tuple(row[: end + 1]) for g, row in rows if g == group for end in range(len(row) - 1)}
        assert int((layout.mask[line, 0].sum(1) > 1).sum()) == len([p for p in prefixes if len(p) > 1])
        assert len(prefixes) <= layout.width


def test_prompts_in_common_are_shared_where_that_is_cheaper(policy):
    rows = make_rows(groups=8, size=8, vocab_size=VOCAB)
    assert policy._layout(PackedBatch(rows)).mask is not None
    alone = rows.take(range(0, 64, 8))
    assert policy._layout(PackedBatch(alone)).mask is None


def test_a_model_with_a_sliding_window_keeps_rows_apart(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, max_position_embeddings=64, sliding_window=8,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "sdpa", torch.device("cpu"))
    policy = Policy(model, temperature=1.0, autocast=None, max_logits=2**20, share_prefixes=True)
    assert policy._layout(PackedBatch(make_rows(vocab_size=VOCAB))).mask is None
