# SPDX-License-Identifier: Apache-2.0
"""Small random models of multimodal families, with a tokenizer of whole words and a chat template.

`build_model` takes a `model_type` of transformers. Each recipe supplies its vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_contrib.recipes import making

SPECIAL = (
    "<pad>", "<bos>", "<eos>", "<unk>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
    "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>",
)  # fmt: skip
PAD, BOS, EOS, UNK, VISION_START, VISION_END, IMAGE, VIDEO, AUDIO_START, AUDIO_END, AUDIO = range(len(SPECIAL))
NEVER = (IMAGE, VIDEO, AUDIO)
"""Tokens that must never be sampled."""
PATCH, MERGE, MEL_BANDS = 8, 2, 32
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %}<|vision_start|><|{{ part['type'] }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_thinker")
_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def save_tokenizer(words: Sequence[str], folder: Path, phrases: Sequence[str] = ()) -> Any:
    """Save and return a `tokenizers.Tokenizer` with one token per special token, word and phrase, in this order.

    A phrase may contain white space.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return making.save_tokenizer(tokenizer, SPECIAL, TEMPLATE, folder)


def build_model(model_type: str, seed: int, vocabulary: int, **text: Any) -> Any:
    """Return a random model; `text` overrides fields of the language model's configuration."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **_config(model_type, vocabulary, text))
    torch.manual_seed(seed)
    return transformers.AutoModelForMultimodalLM.from_config(config)


def _config(model_type: str, vocabulary: int, text: dict[str, Any]) -> dict[str, Any]:
    omni, sparse = "omni" in model_type, "moe" in model_type
    config: dict[str, Any] = {
        "text_config": {**_text(model_type, vocabulary), **(_EXPERTS if sparse else {}), **text},
        "vision_config": _vision(model_type), "image_token_id": IMAGE, "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END, "tie_word_embeddings": True,
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip
    if omni:
        config |= {
            "audio_config": _audio(), "audio_token_id": AUDIO, "audio_start_token_id": AUDIO_START,
            "audio_end_token_id": AUDIO_END, "position_id_per_seconds": 13,
        }  # fmt: skip
    return config


def _text(model_type: str, vocabulary: int) -> dict[str, Any]:
    linear = model_type.startswith("qwen3_5")
    sections = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25} if linear else {"mrope_section": [6, 5, 5]}
    own = dict(_LINEAR, shared_expert_intermediate_size=96) if linear else {}
    return {
        "vocab_size": vocabulary, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, **sections},
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "tie_word_embeddings": True, **own,
    }  # fmt: skip


def _vision(model_type: str) -> dict[str, Any]:
    deep = {} if model_type.startswith("qwen3_5") else {"deepstack_visual_indexes": [0, 1]}
    return {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": PATCH,
        "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": 128, "num_position_embeddings": 64,
        **deep,
    }  # fmt: skip


def _audio() -> dict[str, Any]:
    return {
        "num_mel_bins": MEL_BANDS, "encoder_layers": 2, "d_model": 64, "encoder_attention_heads": 4, "encoder_ffn_dim": 128,
        "n_window": 50, "n_window_infer": 400, "output_dim": 128, "downsample_hidden_size": 16,
    }  # fmt: skip
