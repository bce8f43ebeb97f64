# SPDX-License-Identifier: Apache-2.0
"""Build the quickstart for a mixture of experts: the same tokenizer and digits, and a warm-started Qwen3-MoE.

`python -m relax_contrib.recipes.experts.build FOLDER --seed 0`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from relax_contrib.recipes.making import made
from relax_contrib.recipes.quickstart import build as quickstart
from relax_contrib.recipes.quickstart.model import EOS, VOCABULARY

LAYERS, EXPERTS, TOP_K = 2, 8, 2
RATE = 3e-3


def build_model(seed: int) -> Any:
    """Return a random model; its gates are initialised like all weights, so experts differ from the first step."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=256, moe_intermediate_size=96, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        norm_topk_prob=True, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=1, eos_token_id=EOS,
        pad_token_id=0,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def build(folder: Path, seed: int) -> float:
    """Write all files that the recipe's TOML names; return the sampled pass rate of the warm start, or nan without it."""
    return quickstart.build(folder, seed, build_model(seed), RATE)


def main() -> None:
    reached = made(build, __doc__)
    if reached < quickstart.TARGET:
        sys.exit(f"experts: the warm start ended at {reached:.0%}, below {quickstart.TARGET:.0%}; try another --seed")


if __name__ == "__main__":
    main()
