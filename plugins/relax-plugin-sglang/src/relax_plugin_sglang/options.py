# SPDX-License-Identifier: Apache-2.0
"""Options of the SGLang engine. Sizes are set explicitly, not by free memory, because processes share a machine."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt, field_validator

from relax_core.api.options import Options

PARALLEL = frozenset({"tp_size", "pp_size", "dp_size", "ep_size", "nnodes"})
"""SGLang arguments that must be 1, since SGLang's scheduler runs in the engine's process as the only rank."""
OWN = {
    "model_path": "model.path", "dtype": "model.dtype", "enable_fp32_lm_head": "model.head_dtype", "random_seed": "seed",
    "max_total_tokens": "engine.kv_cache_tokens", "mem_fraction_static": "engine.gpu_memory",
    "max_running_requests": "engine.max_batch_rows", "chunked_prefill_size": "engine.max_prefill_tokens",
    "disable_radix_cache": "engine.prefix_cache", "attention_backend": "engine.attention",
    "disable_cuda_graph": "engine.graphs", "enable_return_routed_experts": "model.routing_replay",
    "context_length": "", "skip_tokenizer_init": "", "disable_overlap_schedule": "", "device": "",
}  # fmt: skip
"""SGLang arguments that this engine sets, and the configuration fields for them; empty: no other value would work."""


class SglangOptions(Options):
    kv_cache_tokens: PositiveInt | None = None
    """Size of the KV cache in tokens. Absent: 32768 on a CPU; on a GPU, all of `gpu_memory` that weights do not take."""
    gpu_memory: float = Field(0.85, gt=0.0, le=1.0)
    """Share of a GPU's memory for weights and KV cache in total."""
    max_batch_rows: PositiveInt = 256
    """Maximum number of requests that decode together."""
    max_prefill_tokens: PositiveInt | None = None
    """Maximum number of prompt tokens in an iteration; longer prompts are split into chunks. Absent: SGLang's default."""
    prefix_cache: bool = True
    """Share the KV cache of common prompt prefixes between requests, until the next update of the weights."""
    keep_weights: bool = False
    """Keep a copy of the weights in host memory; `weights.payload = "delta"` needs this copy."""
    attention: str | None = None
    """Attention backend, by its name in SGLang. Absent: `torch_native` on a CPU, SGLang's default on a GPU."""
    graphs: bool = True
    """Use CUDA graphs on a GPU; a CPU always runs eagerly."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for SGLang's `ServerArgs`, under SGLang's names; those that this engine sets are refused."""

    @field_validator("server_args")
    @classmethod
    def _further(cls, given: dict[str, Any]) -> dict[str, Any]:
        if several := sorted(name for name in PARALLEL & given.keys() if given[name] != 1):
            fix = "this engine works on one GPU; start more engines (placement.rollout.engines), or use vllm"
            raise ValueError(f"{', '.join(several)}: {fix}")
        if own := [f"{name} ({f'set {OWN[name]}' if OWN[name] else 'remove it'})" for name in given if name in OWN]:
            raise ValueError(f"got {', '.join(own)}, which this engine sets itself")
        return given
