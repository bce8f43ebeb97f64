# SPDX-License-Identifier: Apache-2.0
"""Options of the vLLM engine. Sizes are set explicitly, not by free memory, because processes share a machine."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt, model_validator

from relax_core.api.options import Options

OWN = frozenset({"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"})


class VllmOptions(Options):
    tensor_parallel: PositiveInt = 1
    """Number of GPUs over which each layer is split (tensor parallelism); it must divide the number of heads."""
    pipeline_parallel: PositiveInt = 1
    """Number of GPUs over which the layers are distributed (pipeline parallelism)."""
    expert_parallel: bool = False
    """Distribute whole experts over the tensor-parallel GPUs instead of splitting each expert. For data parallelism
    (several copies of the model), start several engines (`placement.rollout.engines`)."""
    kv_cache_mb: PositiveInt | None = None
    """Size of the KV cache in MiB. Absent: 256 on a CPU; on a GPU, all of `gpu_memory` that weights do not take."""
    gpu_memory: float = Field(0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that the engine may take."""
    max_batch_rows: PositiveInt = 256
    """Maximum number of requests that decode together."""
    max_batch_tokens: PositiveInt | None = None
    """Maximum number of tokens in an iteration, prompts included; on a CPU, at least the context. Absent: vLLM's
    default."""
    prefix_cache: bool = True
    """Share the KV cache of common prompt prefixes between requests, until the next update of the weights."""
    keep_weights: bool = False
    """Keep a copy of the weights in host memory; `weights.payload = "delta"` needs this copy."""
    graphs: bool = True
    """Use CUDA graphs and compilation on a GPU; a CPU always runs eagerly."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for vLLM's `EngineArgs`, under vLLM's names."""

    @model_validator(mode="after")
    def _parallel(self) -> VllmOptions:
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "expert_parallel distributes experts over the tensor_parallel GPUs; set tensor_parallel to 2 or more"
            )
        if given := sorted(OWN & self.engine_args.keys()):
            raise ValueError(
                f"engine_args: got {', '.join(given)}; use this engine's own options, or placement.rollout.engines"
            )
        return self
