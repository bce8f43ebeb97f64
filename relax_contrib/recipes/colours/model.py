# SPDX-License-Identifier: Apache-2.0
"""The model: a Qwen3-VL of two small layers over whole words, with a visual tower of two, built from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_contrib.recipes import making

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PAD, BOS, EOS, VISION_START, VISION_END, IMAGE, VIDEO = 0, 1, 2, 4, 5, 6, 7
WORDS = ("which", "colour", "?", "red", "green", "blue", "yellow")
VOCABULARY = 32
PATCH, MERGE = 8, 2
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


def save_tokenizer(folder: Path) -> Any:
    """One token a word; returns the `tokenizers.Tokenizer`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return making.save_tokenizer(tokenizer, SPECIAL, TEMPLATE, folder)


def save_processor(folder: Path, side: int) -> Any:
    """What turns pictures of `side` pixels into patches; returns transformers' image processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": side**2, "longest_edge": side**2},
    )  # fmt: skip
    processor.save_pretrained(folder)
    return processor


def build_model(seed: int) -> Any:
    """Random."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
        },
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": PATCH,
        "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": 128, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
            vision_start_token_id=VISION_START, vision_end_token_id=VISION_END, tie_word_embeddings=True,
            bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
        )
    )  # fmt: skip
