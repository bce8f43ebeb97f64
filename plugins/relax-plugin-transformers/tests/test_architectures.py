# SPDX-License-Identifier: Apache-2.0
"""Other architectures than the default: sliding windows, learned positions, untied heads, bf16."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from relax_core.testing.engine_fixture import CONTEXT, PROMPTS, VOCABULARY, EngineFixture, agrees

SIZE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": CONTEXT, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZE),
    "mistral with a window": lambda: transformers.MistralConfig(**SIZE, sliding_window=8, head_dim=8),
    "qwen2 tied": lambda: transformers.Qwen2Config(**SIZE, tie_word_embeddings=True),
    "gemma 3, every second layer with a window": lambda: transformers.Gemma3TextConfig(
        **SIZE, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt-2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.2,
        bos_token_id=None, eos_token_id=1,
    ),
}  # fmt: skip


def saved(config: transformers.PretrainedConfig, directory: Path, seed: int, dtype: torch.dtype = torch.float32) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    return str(directory)


StartLab = Callable[..., EngineFixture]


@pytest.fixture(params=[*((model, "sdpa") for model in MODELS), ("mistral with a window", "eager")], ids=" ".join)
def lab(request: pytest.FixtureRequest, start_lab: StartLab, tmp_path: Path) -> EngineFixture:
    model, attention = request.param
    folders = [saved(MODELS[model](), tmp_path / str(seed), seed) for seed in (1, 2)]
    return start_lab(*folders, options={"attention": attention})


def test_every_architecture_agrees_with_its_plain_forward_and_is_updated(lab: EngineFixture) -> None:
    for folder in (lab.model, lab.other):
        requests = [lab.request(prompt, 30, seed=i) for i, prompt in enumerate(PROMPTS)]
        for request, got in zip(requests, lab.generate(*requests), strict=True):
            agrees(folder, request.tokens, got)
        if folder == lab.model:
            manifest = lab.publish()
            assert lab.update(manifest).fingerprint == manifest.fingerprint


def test_bf16_is_published_bit_for_bit(start_lab: StartLab, tmp_path: Path) -> None:
    config = MODELS["qwen2 tied"]()
    folders = [saved(config, tmp_path / str(seed), seed, torch.bfloat16) for seed in (1, 2)]
    lab = start_lab(*folders, dtype="auto")
    assert lab.facts["dtype"] == "bfloat16"
    manifest = lab.publish()
    assert {info.dtype for info in manifest.tensors} == {"BF16"}
    assert lab.update(manifest).fingerprint == manifest.fingerprint
    (got,) = lab.generate(lab.request(PROMPTS[0], 8, seed=1))
    (scored,) = lab.run(lab.engine.score([(*PROMPTS[0], *got.tokens)]))
    np.testing.assert_allclose(got.log_probs, scored[len(PROMPTS[0]) :], atol=0.1)


def test_fingerprint_of_a_started_engine_is_that_of_its_folder(lab: EngineFixture) -> None:
    assert lab.facts["fingerprint"] == lab.publish(source=lab.model).fingerprint
