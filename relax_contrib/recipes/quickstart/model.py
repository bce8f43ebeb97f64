# SPDX-License-Identifier: Apache-2.0
"""The model: a random Qwen3 with three small layers and a vocabulary of characters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_contrib.recipes import making

CHARACTERS = "0123456789+-*=<>?.,:;!()[] abcdefghijklmnopqrstuvwxyz"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
EOS = 2
VOCABULARY = 64
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


def save_tokenizer(folder: Path, characters: str = CHARACTERS, phrases: Sequence[str] = ()) -> Any:
    """Save and return a `tokenizers.Tokenizer` with one token per character and one per phrase."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return making.save_tokenizer(tokenizer, SPECIAL, TEMPLATE, folder)


def build_model(seed: int, vocabulary: int = VOCABULARY) -> Any:
    """Return a random model, of 225,920 parameters with the default vocabulary.

    The head size of 32 is the smallest for which every engine has a kernel.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, intermediate_size=256, max_position_embeddings=1024, tie_word_embeddings=True,
            bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
        )
    )  # fmt: skip
