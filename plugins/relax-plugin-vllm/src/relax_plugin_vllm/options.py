# SPDX-License-Identifier: Apache-2.0
"""Options of the vLLM engine. Sizes are set explicitly, not by free memory, because processes share a machine."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from relax_core.api.options import Options

OWN = {
    "model": "model.path", "dtype": "model.dtype", "seed": "seed", "tensor_parallel_size": "engine.tensor_parallel",
    "pipeline_parallel_size": "engine.pipeline_parallel", "data_parallel_size": "placement.rollout.engines",
    "enable_expert_parallel": "engine.expert_parallel", "kv_cache_memory_bytes": "engine.kv_cache_mb",
    "gpu_memory_utilization": "engine.gpu_memory", "max_num_seqs": "engine.max_batch_rows",
    "max_num_batched_tokens": "engine.max_batch_tokens", "enable_prefix_caching": "engine.prefix_cache",
    "enforce_eager": "engine.graphs", "max_model_len": "", "skip_tokenizer_init": "", "enable_sleep_mode": "",
    "logprobs_mode": "", "max_logprobs": "", "async_scheduling": "", "disable_log_stats": "",
    "speculative_config": "engine.draft_tokens",
}  # fmt: skip
"""vLLM arguments that this engine sets, and the configuration fields for them; empty: no other value would work."""
IGNORED = ("logits_processors",)
"""vLLM arguments for its own sampler, which this engine replaces."""


class VllmOptions(Options):
    tensor_parallel: PositiveInt = 1
    """Number of GPUs over which each layer is split (tensor parallelism); it must divide the number of heads."""
    pipeline_parallel: PositiveInt = 1
    """Number of GPUs over which the layers are distributed (pipeline parallelism)."""
    expert_parallel: bool = False
    """Distribute whole experts over the tensor-parallel GPUs instead of splitting each expert. For data parallelism
    (several copies of the model), start several engines (`placement.rollout.engines`)."""
    kv_cache_mb: PositiveInt | None = None
    """Size of the KV cache in MiB. Absent: on a CPU 256, or what one request of the whole context needs if that is more;
    on a GPU all of `gpu_memory` that weights do not take."""
    gpu_memory: float = Field(0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that the engine may take."""
    max_batch_rows: PositiveInt = 256
    """Maximum number of requests that decode together."""
    max_batch_tokens: PositiveInt | None = None
    """Maximum number of tokens in an iteration, prompts included; longer prompts are computed in chunks. Absent: vLLM's
    default."""
    prefix_cache: bool = True
    """Share the KV cache of common prompt prefixes between requests, until the next update of the weights."""
    keep_weights: bool = False
    """Keep a copy of the weights in host memory; `weights.payload = "delta"` needs this copy."""
    graphs: bool = True
    """Use CUDA graphs and compilation on a GPU; a CPU always runs eagerly."""
    draft_tokens: NonNegativeInt = 0
    """Tokens drafted ahead for each request and checked in one iteration (speculative decoding); 0: none. The draft copies
    the tokens after an earlier occurrence of the row's last two to four tokens. Samples and log-probs do not change.
    Metric: `engines/draft_acceptance`."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for vLLM's `EngineArgs`, under vLLM's names. Arguments that this engine sets are refused, and so is
    `logits_processors`, because vLLM's sampler is not used."""

    @model_validator(mode="after")
    def _parallel(self) -> VllmOptions:
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "expert_parallel distributes experts over the tensor_parallel GPUs; set tensor_parallel to 2 or more"
            )
        if self.max_batch_tokens is not None and self.max_batch_tokens < self.max_batch_rows:
            raise ValueError(
                f"max_batch_tokens: got {self.max_batch_tokens}, less than max_batch_rows = {self.max_batch_rows}, which take a"
                " token each; raise it, or lower max_batch_rows"
            )
        given = self.engine_args
        if own := [f"{name} ({f'set {OWN[name]}' if OWN[name] else 'remove it'})" for name in given if name in OWN]:
            raise ValueError(f"engine_args: got {', '.join(own)}, which this engine sets itself")
        if ignored := [name for name in given if name in IGNORED]:
            fix = "this engine samples without vLLM's sampler, so remove it"
            raise ValueError(f"engine_args: got {', '.join(ignored)}; {fix}")
        return self
