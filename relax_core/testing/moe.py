# SPDX-License-Identifier: Apache-2.0
"""Tiny mixture-of-experts models, and their routed experts in a plain forward without cache, padding or batching."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from relax_core.api.engine import Delta, Engine, GenerateRequest
from relax_core.api.family import Routing
from relax_core.engines.requests import RoutedExperts
from relax_core.testing.engine_fixture import CONTEXT, VOCABULARY

LAYERS, TOP_K, EXPERTS = 2, 2, 8
_SIZE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "num_experts_per_tok": TOP_K,
}  # fmt: skip
_MORE: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "qwen3_moe plain": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": EXPERTS, "sliding_window": None},
    "olmoe": {"num_experts": EXPERTS},
    "qwen3_5_moe_text": {
        "num_experts": EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}  # fmt: skip


def moe_config(kind: str = "qwen3_moe", **changes: Any) -> Any:
    """Make a transformers configuration of a tiny mixture-of-experts model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind.split()[0], **{**_SIZE, **_MORE[kind], **changes})


def tiny_moe(directory: str, seed: int, kind: str = "qwen3_moe", **changes: Any) -> str:
    """Save a mixture-of-experts model with random weights of this seed; return its folder."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(moe_config(kind, **changes), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):  # zero weights would give all tokens the same experts
                torch.nn.init.normal_(parameter, std=0.5)
        model.save_pretrained(directory)
    return directory


def plain_experts(directory: str, tokens: Sequence[int], layers: int = LAYERS) -> np.ndarray:
    """Return the sorted experts [tokens, layers, top_k] that a plain forward of one sequence visits."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    model.eval()
    seen: list[np.ndarray] = []
    keep: Callable[..., None] = lambda module, inputs, output: seen.append(output[2].sort(-1).values.numpy())  # noqa: E731
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(keep)
    with torch.no_grad():
        model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    assert len(seen) == layers
    return np.stack(seen, 1)


async def routed(
    engine: Engine, requests: Sequence[GenerateRequest], routing: Routing
) -> list[tuple[Delta, RoutedExperts]]:
    """Run requests to their end; return for each a delta with all its tokens, and its reported experts."""
    from dataclasses import replace

    recorded = {request.id: RoutedExperts(routing) for request in requests}
    parts: dict[str, list[Delta]] = {request.id: [] for request in requests}
    async for deltas in engine.generate(requests):
        for delta in deltas:
            parts[delta.id].append(delta)
            recorded[delta.id].add(delta.routed_from, delta.routed_experts)
    whole = [replace(own[-1], tokens=tuple(token for part in own for token in part.tokens)) for own in parts.values()]
    return list(zip(whole, recorded.values(), strict=True))
