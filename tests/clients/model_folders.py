# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose chat templates have tools, of three kinds.

One shows every turn as it was, one leaves earlier thoughts out, and one names roles in headers and gives results of tools a
role of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CALLS = (
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
)
TOOLS = (
    "{% if tools %}\n\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call one as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.{% endif %}'
)
SYSTEM = "{% set has_system = messages[0].role == 'system' %}{{ messages[0].content if has_system else 'Be brief.' }}"
REST = "{% for message in (messages[1:] if has_system else messages) %}"
SPOKEN = "{{ message.content }}"
THOUGHTLESS = (
    "{% if loop.last %}{{ message.content }}{% else %}{{ message.content.split('</think>')[-1].lstrip() }}{% endif %}"
)


def chatml(spoken: str) -> str:
    return (
        "<|im_start|>system\n" + SYSTEM + TOOLS + "<|im_end|>\n" + REST + "{% if message.role == 'tool' %}"
        "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
        "{% else %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}" + spoken + CALLS
        + "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # fmt: skip


HEADERS = (
    "<|begin|>{% macro head(role) %}<|header|>{{ role }}<|end_header|>\n\n{% endmacro %}{{ head('system') }}" + SYSTEM + TOOLS
    + "<|eot|>" + REST + "{{ head('ipython' if message.role == 'tool' else message.role) }}{{ message.content | trim }}"
    "{% if message.role == 'assistant' %}" + CALLS + "{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
)  # fmt: skip
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
KINDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "plain": (chatml(SPOKEN), CHATML_TOKENS, "<|im_end|>"),
    "thoughts left out": (chatml(THOUGHTLESS), CHATML_TOKENS, "<|im_end|>"),
    "headers": (HEADERS, ("<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>"), "<|eot|>"),
}
"""By kind: template, special tokens and the one that ends a turn."""
VOCABULARY = 1500


def write_model(folder: Path, kind: str, texts: Iterable[str]) -> Path:
    """Write a model of random weights; its tokens are made of `texts`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    template, special, end = KINDS[kind]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": special[0],
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, intermediate_size=64, max_position_embeddings=16384,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.token_to_id(end),
            pad_token_id=tokenizer.token_to_id(special[0]),
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder
