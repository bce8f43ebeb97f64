# SPDX-License-Identifier: Apache-2.0
"""The quickstart with a larger model of the same kind, warmed up on the same tasks in the same way: for timing at size."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from relax_contrib.recipes.quickstart import build, model

RATE = 5e-4
"""Of the warm start: larger models fall apart at the small one's."""


def shaped(shape: tuple[int, ...], seed: int) -> Any:
    """hidden, layers, heads, key-value heads, head size, width of the MLP."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, heads, key_value, head_dim, width = shape
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=model.VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=key_value, head_dim=head_dim, intermediate_size=width, max_position_embeddings=1024,
            tie_word_embeddings=True, bos_token_id=1, eos_token_id=model.EOS, pad_token_id=0,
        )
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", required=True)
    options = parser.parse_args()
    shape = tuple(int(number) for number in options.shape.split(","))
    build.build(options.folder, options.seed, shaped(shape, options.seed), RATE)
    shutil.copyfile(Path(build.__file__).parent / "recipe.toml", options.folder / "recipe.toml")


if __name__ == "__main__":
    main()
