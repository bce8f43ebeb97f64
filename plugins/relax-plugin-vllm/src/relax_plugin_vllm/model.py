# SPDX-License-Identifier: Apache-2.0
"""A stepper around vLLM: takes requests, returns new tokens after each step, and replaces weights between two steps.

All of this code runs on one thread. vLLM's scheduler and workers are unchanged. vLLM's core runs in this process, so no
token is sampled while weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, log
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine.llm_engine import LLMEngine

from relax_core.api.engine import EngineSpec, FinishReason, GenerateRequest
from relax_core.api.errors import ConfigError
from relax_core.engine_kit.model_weights import tensor_buckets
from relax_core.engine_kit.stepped_engine import StepOutput
from relax_plugin_vllm import ranks
from relax_plugin_vllm.environment_variables import on_gpu
from relax_plugin_vllm.options import VllmOptions
from relax_plugin_vllm.prompt_media import PromptMedia, architectures_of, arguments as media_arguments, written
from relax_plugin_vllm.sampler import RULES, rules_of

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists

CPU_KV_BYTES = 256 << 20
"""Least size of the KV cache on a CPU, unless the configuration sets the size."""
CPU_BLOCK_TOKENS = 32
"""Tokens in a cache block on a CPU. Prompts share only whole blocks, so vLLM's default of 128 would share little."""
_TAGS = {"weights": "weights", "kv": "kv_cache"}
FINISHES: dict[str | None, FinishReason] = {None: "", "stop": "stop", "length": "length", "abort": "abort"}
"""Reasons of vLLM for the end of a request; any other reason is an error."""


class Vllm:
    """A stepper with one model in this process, or in several processes for more than one GPU."""

    def __init__(self, spec: EngineSpec, options: VllmOptions) -> None:
        self._llm = _started(spec, options)
        self._inside: dict[str, str] = {}
        """vLLM's name of each request, by id."""
        core = self._llm.engine_core
        self._core_output, core.get_output = core.get_output, self._without_log_probs
        self._log_probs: dict[str, LogprobsLists] = {}
        """Log-probs of the newest step, by vLLM's name of the request."""
        self._drafts: dict[str, tuple[int, int]] = {}
        """Numbers of drafted tokens that were kept, and of all, by vLLM's name of the request."""
        if options.draft_tokens:
            core.engine_core.scheduler.make_spec_decoding_stats = self._count_drafts
        self._scores: dict[str, tuple[tuple[int, ...], float]] = {}
        """Tokens and temperature of each sequence to score, by the sequence's name."""
        self._offloaded = False
        self._alone = options.tensor_parallel == options.pipeline_parallel == 1
        self._on_ranks(ranks.install_sampler)
        config = self._llm.vllm_config.model_config
        if not on_gpu():
            # Without this check, vLLM would fail only at the first token.
            size, sizes = config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
            if size not in sizes:
                fix = f"on a CPU vLLM has sizes {', '.join(map(str, sizes))}; use another engine"
                raise ConfigError("model.path", f"heads of size {size}", fix)
        if spec.model.get("head_dtype") == "float32" and config.head_dtype != torch.float32:
            fix = f"this vLLM computes the head in {config.head_dtype}: install a newer vLLM, or leave this key out"
            raise ConfigError("model.head_dtype", "float32", fix)
        self.max_context: int = min(spec.max_context, config.max_model_len)
        self.vocab_size: int = config.get_vocab_size()
        cache = self._llm.vllm_config.cache_config
        reported = getattr(cache, "kv_cache_size_tokens", None)  # the oldest supported versions lack this attribute
        self.kv_tokens: int = reported or (cache.num_gpu_blocks or 0) * cache.block_size
        self.dtype = str(config.dtype).removeprefix("torch.")
        self.model_type: str = config.hf_config.model_type
        self._prompt_media = PromptMedia(spec.media, config.hf_config)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request."""
        params = SamplingParams(
            max_tokens=request.max_new_tokens, extra_args={RULES: rules_of(request)}, logprobs=request.num_top,
            stop_token_ids=list(request.stop_tokens), ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        prompt = self._prompt_media.prompt(request.tokens, request.media)
        self._inside[request.id] = str(self._llm.add_request(request.id, prompt, params))

    def add_score(self, name: str, tokens: tuple[int, ...], temperature: float) -> None:
        """Queue a sequence for scoring, as a prompt whose log-probs vLLM returns.

        At temperature 1 the log-probs of its tokens suffice. Any other temperature needs those of the whole vocabulary.
        """
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0 if temperature == 1.0 else -1, detokenize=False,
            ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        self._llm.add_request(name, written(tokens), params)
        self._scores[name] = (tokens, temperature)

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._drafts.pop(self._inside.pop(name, ""), None)
        self._llm.abort_request(list(names))

    def step(self) -> dict[str, StepOutput]:
        """Run one iteration; return its outputs by request id."""
        self._log_probs.clear()
        found = {output.request_id: self._new(output) for output in self._llm.step()}
        for name, new in found.items():
            if new.finish:
                new.drafts = self._drafts.pop(self._inside.pop(name, ""), None)
        return found

    def _without_log_probs(self) -> EngineCoreOutputs:
        """Take the log-probs out of an output of vLLM's core; vLLM would make a dictionary of objects for each token."""
        outputs = self._core_output()
        for output in outputs.outputs:
            if output.new_logprobs is not None:
                self._log_probs[output.request_id] = output.new_logprobs
                output.new_logprobs = None
        return outputs

    def _count_drafts(
        self, _: Any, *, num_draft_tokens: int, num_accepted_tokens: int, request_id: str, **__: Any
    ) -> None:
        """Stand for the function of vLLM's scheduler that makes statistics of drafts."""
        kept, drafted = self._drafts.get(request_id, (0, 0))
        self._drafts[request_id] = kept + num_accepted_tokens, drafted + num_draft_tokens

    def _new(self, output: RequestOutput) -> StepOutput:
        name = output.request_id
        (one,) = output.outputs
        finish = FINISHES.get(one.finish_reason, "error")
        new = StepOutput(tuple(one.token_ids), (), finish, cached_tokens=output.num_cached_tokens or 0)
        if name in self._scores:
            tokens, temperature = self._scores.pop(name)
            new.scores = tuple(map(_tempered(temperature), filter(None, output.prompt_logprobs or ()), tokens[1:]))
        elif (lists := self._log_probs.get(self._inside[name])) is not None:
            values = lists.logprobs.tolist()
            new.log_probs = tuple(row[0] for row in values)  # of the drawn tokens; the most likely tokens follow
            if lists.logprobs.shape[1] > 1:
                new.top = tuple(
                    tuple(zip(ids[1:], row[1:], strict=True))
                    for ids, row in zip(lists.logprob_token_ids.tolist(), values, strict=True)
                )
        return new

    def started(self) -> list[str]:
        states = self._llm.engine_core.engine_core.scheduler.requests
        return [name for name, inside in self._inside.items() if states[inside].num_computed_tokens]

    def _on_ranks(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function of `ranks` in all workers of vLLM."""
        self._llm.engine_core.engine_core.model_executor.collective_rpc(function, args=args)

    def routed_experts(self, name: str) -> bytes:
        raise NotImplementedError("vLLM's CPU runner does not record experts, so this engine has no routed_experts")

    # -- weights --------------------------------------------------------------------------------------------------

    def load(self, arrays: Iterable[tuple[str, np.ndarray, str]]) -> None:
        """Replace the weights by (Hugging Face name, array, dtype). After an error the model mixes two versions."""
        self._prompt_media.weights_epoch += 1
        self._on_ranks(ranks.begin_load)
        for bucket in tensor_buckets(arrays):
            self._on_ranks(ranks.load, bucket)
        self._on_ranks(ranks.end_load)

    def checksums(self) -> dict[str, str]:
        """Return checksums of the weights in memory, in vLLM's own layout; empty on a CPU, where vLLM packs weights."""
        if not on_gpu():
            return {}
        found: list[dict[str, str]] = self._llm.engine_core.engine_core.compute_weight_checksums()
        return {name: digest for worker in found for name, digest in worker.items()}

    def forget_caches(self, running: bool) -> None:
        """Drop the prefix cache, so that later requests recompute it. `running`: running requests start anew too."""
        self._llm.reset_prefix_cache(reset_running_requests=running)
        if running and self._prompt_media.takes_media:  # all requests start anew and encode their media again
            self._llm.reset_encoder_cache()

    # -- memory ---------------------------------------------------------------------------------------------------

    def offload(self, parts: frozenset[str]) -> int:
        """Free parts; return the bytes freed. vLLM can free only both parts, so a part not in `parts` is loaded again."""
        if self._offloaded:
            return 0
        free = torch.cuda.mem_get_info()[0]
        self.forget_caches(running=True)
        self._llm.sleep(level=1)
        self._offloaded = True
        if missing := _TAGS.keys() - parts:
            self._llm.wake_up([_TAGS[part] for part in missing])
        return max(0, torch.cuda.mem_get_info()[0] - free)

    def onload(self, parts: frozenset[str]) -> None:
        self._llm.wake_up([_TAGS[part] for part in sorted(parts)])
        self._offloaded = bool(self._llm.is_sleeping())

    def stop(self) -> None:
        """End the processes that vLLM started. The end of this process frees vLLM's objects in it."""
        if not self._alone:
            self._llm.engine_core.shutdown()


def _started(spec: EngineSpec, options: VllmOptions) -> LLMEngine:
    """Start vLLM. Raises ConfigError if its KV cache has no room for one request of the whole context."""
    config = EngineArgs(**arguments_of(spec, options)).create_engine_config()
    cache = config.cache_config
    if cache.kv_cache_memory_bytes is None and not on_gpu():
        cache.kv_cache_memory_bytes = max(CPU_KV_BYTES, _context_bytes(config))
    try:
        return LLMEngine.from_vllm_config(config, disable_log_stats=True)
    except ValueError as error:
        if "KV cache" not in str(error):
            raise
        said = str(error).partition(" Based on")[0]
        if cache.kv_cache_memory_bytes is None:
            raise ConfigError("engine.gpu_memory", options.gpu_memory, f"raise it, or use more GPUs; {said}") from error
        have = cache.kv_cache_memory_bytes >> 20
        raise ConfigError("engine.kv_cache_mb", options.kv_cache_mb or have, f"raise it; {said}") from error


def _context_bytes(config: VllmConfig) -> int:
    """Return the bytes that one request of the whole context needs in a rank's KV cache, with a block to spare."""
    model, parallel = config.model_config, config.parallel_config
    numbers = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    return numbers * model.dtype.itemsize * (model.max_model_len + CPU_BLOCK_TOKENS)


def arguments_of(spec: EngineSpec, options: VllmOptions) -> dict[str, Any]:
    gpu = on_gpu()
    arguments: dict[str, Any] = {
        "model": spec.model["path"], "skip_tokenizer_init": True, "dtype": spec.model.get("dtype") or "auto",
        "seed": spec.seed & 0x7FFFFFFF, "max_model_len": spec.max_context if spec.max_context < 1 << 24 else None,
        "tensor_parallel_size": options.tensor_parallel, "pipeline_parallel_size": options.pipeline_parallel,
        "enable_expert_parallel": options.expert_parallel, "enforce_eager": not (gpu and options.graphs),
        "max_num_seqs": spec.max_concurrency or options.max_batch_rows, "max_num_batched_tokens": options.max_batch_tokens,
        "gpu_memory_utilization": options.gpu_memory, "enable_sleep_mode": gpu,
        # If kv_across_versions is set, a shared cache could outlive the weights that computed it.
        "enable_prefix_caching": options.prefix_cache and not spec.kv_across_versions,
        "logprobs_mode": "processed_logprobs", "max_logprobs": -1, "async_scheduling": False, "disable_log_stats": True,
    }  # fmt: skip
    if options.draft_tokens:
        arguments["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": options.draft_tokens, "prompt_lookup_min": 2, "prompt_lookup_max": 4,
        }  # fmt: skip
    if not gpu:
        arguments["block_size"] = CPU_BLOCK_TOKENS
    if options.kv_cache_mb is not None:
        arguments["kv_cache_memory_bytes"] = options.kv_cache_mb << 20
    given = dict(options.engine_args)
    if spec.model.get("head_dtype") == "float32":
        given["hf_overrides"] = {**given.get("hf_overrides", {}), "head_dtype": "float32"}
    return {**arguments, **media_arguments(architectures_of(spec.model["path"]), spec.media), **given}


def _tempered(temperature: float) -> Callable[[Mapping[int, Any], int], float]:
    """Return a function that computes a token's log-prob at `temperature` from log-probs at temperature 1.

    Log-probs at temperature 1 are logits plus a constant, so they can stand for logits.
    """
    if temperature == 1.0:
        return lambda row, token: float(row[token].logprob)

    def tempered(row: Mapping[int, Any], token: int) -> float:
        highest = max(found.logprob for found in row.values())
        total = sum(exp((found.logprob - highest) / temperature) for found in row.values())
        return float((row[token].logprob - highest) / temperature - log(total))

    return tempered
