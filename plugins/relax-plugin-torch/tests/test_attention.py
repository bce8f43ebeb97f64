# SPDX-License-Identifier: Apache-2.0
"""Which attention is chosen where, rows in one line against rows in a rectangle, and compiled blocks against plain ones."""

import pytest
import torch
from relax_plugin_torch import setup
from relax_plugin_torch.blocks import compile_blocks
from relax_plugin_torch.layout import by_row, one_line
from relax_plugin_torch.model import load_model
from relax_plugin_torch.policy import Policy
from relax_plugin_torch.setup import FLASH, choose_attention
from transformers import AutoModelForCausalLM, OPTConfig

from relax_core.api import ConfigError
from relax_core.learn import PackedBatch
from relax_core.testing.trainer import make_rows

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LOW = torch.bfloat16


def policy_of(folder):
    model = load_model(folder, "sdpa", CPU)
    return Policy(model, temperature=1.0, autocast=None, max_logits=2**20, share_prefixes=False)


@pytest.mark.parametrize(("device", "dtype", "deterministic", "installed", "chosen"), [
    (GPU, torch.bfloat16, False, True, FLASH),
    (GPU, torch.float16, False, True, FLASH),
    (GPU, torch.bfloat16, False, False, "sdpa"),
    (GPU, torch.bfloat16, True, True, "sdpa"),
    (GPU, torch.float32, False, True, "sdpa"),
    (CPU, torch.bfloat16, False, True, "sdpa"),
])  # fmt: skip
def test_flash_attention_is_taken_where_everything_allows_it(
    monkeypatch, device, dtype, deterministic, installed, chosen
):
    monkeypatch.setattr(setup, "_installed", lambda: installed)
    assert choose_attention("auto", device, dtype, deterministic) == chosen


@pytest.mark.parametrize(("device", "dtype", "installed", "reason"), [
    (CPU, LOW, True, "it needs a GPU"), (GPU, torch.float32, True, r"model\.dtype"), (GPU, LOW, False, "package flash-attn"),
])  # fmt: skip
def test_flash_attention_where_it_does_not_run_is_refused(monkeypatch, device, dtype, installed, reason):
    monkeypatch.setattr(setup, "_installed", lambda: installed)
    with pytest.raises(ConfigError, match=rf"trainer\.attention: got 'flash_attention_2'.*{reason}"):
        choose_attention(FLASH, device, dtype, False)


def test_the_configured_attention_is_used():
    assert [choose_attention(name, GPU, LOW, False) for name in ("sdpa", "eager")] == ["sdpa", "eager"]


def scores(policy, batch, layout):
    policy.model.zero_grad()
    log_probs = policy._score(batch, layout, ())["log_probs"]
    log_probs.square().sum().backward()
    return log_probs.detach(), {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def assert_same(wanted, got):
    torch.testing.assert_close(got[0], wanted[0], atol=1e-12, rtol=1e-12)
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(got[1][name], gradient, atol=1e-10, rtol=1e-10)


def test_rows_in_one_line_score_as_rows_in_a_rectangle(folder):
    policy, batch = policy_of(folder), PackedBatch(make_rows())
    policy.model.double()
    line = one_line(batch)
    assert line.lines == 1
    assert line.width == int((batch.lengths - 1).sum())
    assert_same(*(scores(policy, batch, layout) for layout in (by_row(batch), line)))


def test_a_policy_with_flash_attention_lines_its_rows_up(folder):
    policy, batch = policy_of(folder), PackedBatch(make_rows())
    assert policy._layout(batch).lines == len(batch.rows)
    policy.model.config._attn_implementation = FLASH
    again = Policy.__new__(Policy)
    again._lines_up, again._row_media = policy.model.config._attn_implementation == FLASH, policy._row_media
    assert again._layout(batch).lines == 1


def test_rows_are_lined_up_only_if_no_token_sees_the_row_before(folder, tmp_path):
    assert policy_of(folder)._keeps_lines_apart()
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=64, init_std=0.5,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = policy_of(tmp_path)
    assert not policy._keeps_lines_apart()
    mixed = policy_of(folder)
    mixed.model.config.layer_types = ["conv", "full_attention"]
    assert not mixed._keeps_lines_apart()


def test_compiled_blocks_score_the_same(folder):
    plain, compiled, batch = policy_of(folder), policy_of(folder), PackedBatch(make_rows())
    compile_blocks(compiled.model, compiled.attend, backend="eager")
    assert all(parameter.grad is None for parameter in compiled.model.parameters())
    assert_same(*(scores(policy, batch, by_row(batch)) for policy in (plain, compiled)))


def test_a_compiler_that_fails_is_reported_at_start(folder):
    def broken(graph, inputs):
        raise RuntimeError("no g++ here")

    policy = policy_of(folder)
    with pytest.raises(ConfigError, match=r"trainer\.compile: got true.*torch\.compile fails here.*leave it out"):
        compile_blocks(policy.model, policy.attend, backend=broken)
