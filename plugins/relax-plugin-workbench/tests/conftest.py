# SPDX-License-Identifier: Apache-2.0
"""The run that the tests of views read, too, and a tiny mixture of experts."""

import json

import pytest

from relax_contrib.recipes.families import save_tokenizer
from tests.unit.control.conftest import catalogue
from tests.unit.views.conftest import clock, write_run

__all__ = ["catalogue", "clock", "write_run"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with a mixture of experts and prompts."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    home, words = tmp_path_factory.mktemp("bench"), [f"w{number}" for number in range(40)]
    tokenizer = save_tokenizer(words, home / "model")
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True, initializer_range=0.3, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(home / "model")
    lines = [json.dumps({"prompt": " ".join(words[at : at + 4]), "answer": words[at]}) for at in range(8)]
    (home / "train.jsonl").write_text("\n".join(lines) + "\n")
    return home
