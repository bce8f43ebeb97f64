# SPDX-License-Identifier: Apache-2.0
"""A stepper around SGLang: takes requests, returns new tokens after each step, and replaces weights between steps.

All of this code runs on one thread. SGLang's scheduler and model run in this process, so no token is sampled while
weights change.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from sglang.srt.managers.io_struct import (
    AbortReq,
    CheckWeightsReqInput,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

from relax_core.api.engine import EngineSpec, FinishReason, GenerateRequest
from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.family import Routing, routed_layers
from relax_core.engine_kit.model_weights import tensor_buckets
from relax_core.engine_kit.stepped_engine import StepOutput
from relax_plugin_sglang.launch import launch, replays
from relax_plugin_sglang.options import SglangOptions
from relax_plugin_sglang.prompt_media import PromptMedia, forget_features
from relax_plugin_sglang.sampler import Row

SHARED_TOKENS = 64
"""Minimum prompt length in tokens at which equal prompts wait until the first request has filled the cache."""
Prompt: TypeAlias = tuple[tuple[int, ...], tuple[str, ...]]
"""Tokens of a prompt, and keys of its media."""
Media: TypeAlias = MultimodalProcessorOutput | None
ALL_SPARSE = ("qwen2_moe", "qwen3_moe")
_FINISHES: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}


class Sglang:
    """A stepper with one SGLang model in this process."""

    def __init__(self, spec: EngineSpec, options: SglangOptions) -> None:
        _check_layers(spec)
        self._scheduler = launch(spec, options)
        self._inside: dict[str, str] = {}
        """SGLang's name of each request, by id. Names have equal length, since SGLang aborts all names with a prefix."""
        self._scores: dict[str, tuple[tuple[int, ...], float]] = {}
        self._numbers = itertools.count()
        self._shares = options.prefix_cache and not spec.kv_across_versions
        self._waiting: dict[Prompt, list[tuple[GenerateRequest, Media]]] = {}
        """Waiting requests by prompt, while one request computes the prompt's cache for all."""
        self._prompts: dict[str, Prompt] = {}
        """Prompts whose cache is being computed, by the id of the computing request."""
        config = self._scheduler.model_config
        self.max_context: int = min(spec.max_context, self._scheduler.max_req_len - 1)
        self.vocab_size: int = config.vocab_size
        self.kv_tokens: int = self._scheduler.max_total_num_tokens
        self.dtype = str(config.dtype).removeprefix("torch.")
        self.model_type: str = config.hf_config.model_type
        self._routed_layers = _RoutedLayers.of(config.hf_config.to_dict()) if replays(spec) else None
        self._prompt_media = PromptMedia(spec.media, config.hf_config) if spec.media else None

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        if request.routed_experts and self._routed_layers is None:
            raise ValueError('routed_experts: this engine does not record them; set model.routing_replay = "rollout"')
        if request.media and self._prompt_media is None:
            raise ValueError("a request has media, but this engine has no media store")
        media = self._prompt_media.of(request.tokens, request.media) if self._prompt_media else None
        prompt = request.tokens, request.media
        if self._shares and len(request.tokens) >= SHARED_TOKENS:
            if prompt in self._waiting:  # SGLang would compute equal prompts of one iteration separately
                self._waiting[prompt].append((request, media))
                return
            self._waiting[prompt], self._prompts[request.id] = [], prompt
        self._queue(request, media)

    def _queue(self, request: GenerateRequest, media: Media) -> None:
        params = SamplingParams(max_new_tokens=request.max_new_tokens, stop_token_ids=set(request.stop_tokens))
        experts = request.routed_experts
        self._take(request.tokens, params, Row(request.id, request), return_routed_experts=experts, mm_inputs=media)

    def add_score(self, name: str, tokens: tuple[int, ...], temperature: float) -> None:
        self._scores[name] = (tokens, temperature)
        whole = self.vocab_size if temperature != 1.0 else 0
        self._take(
            tokens, SamplingParams(max_new_tokens=0), Row(name, None), logprob_start_len=0, top_logprobs_num=whole
        )

    def _take(self, tokens: tuple[int, ...], params: SamplingParams, row: Row, **fields: Any) -> None:
        """Queue a request under a new SGLang name; for a sequence to score, also request the prompt's log-probs."""
        inside = self._inside[row.name] = f"{next(self._numbers):016}"
        params.normalize(None)
        request: dict[str, Any] = {
            "rid": inside, "input_text": None, "input_ids": array("q", tokens), "input_embeds": None, "mm_inputs": None,
            "token_type_ids": None, "sampling_params": params, "return_logprob": row.request is None, "logprob_start_len": -1,
            "top_logprobs_num": 0, "token_ids_logprob": None, "stream": True, **fields,
        }  # fmt: skip
        with torch.inference_mode():
            self._scheduler.take(TokenizedGenerateReqInput(**request), row)

    def abort(self, names: Sequence[str]) -> None:
        """Abort requests. SGLang steps a running request once more; the tokens of this step are dropped."""
        gone = frozenset(names)
        for name in names:
            self._prompts.pop(name, None)
            if inside := self._inside.pop(name, ""):
                self._scheduler.abort_request(AbortReq(rid=inside))
        for prompt, waiting in list(self._waiting.items()):
            self._waiting[prompt] = [one for one in waiting if one[0].id not in gone]
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Queue waiting requests whose prompt is now cached, or whose prompt's computing request has ended."""
        computing = set(self._prompts.values())
        for prompt in [prompt for prompt in self._waiting if prompt not in computing]:
            for request, media in self._waiting.pop(prompt):
                self._queue(request, media)

    def step(self) -> dict[str, StepOutput]:
        self._scheduler.updated.clear()
        with torch.inference_mode():
            self._scheduler.step()
        news: dict[str, StepOutput] = {}
        for req in self._scheduler.updated:
            if self._inside.get(req.row.name) == req.rid:
                news[req.row.name] = self._new(req)
                self._prompts.pop(req.row.name, None)
                if req.finished():
                    del self._inside[req.row.name]
        self._begin_waiting()
        return news

    def _new(self, req: Any) -> StepOutput:
        row: Row = req.row
        tokens = tuple(req.output_ids_through_stop[row.sent :])
        row.sent += len(tokens)
        finish, error = _finish(req)
        if finish != "error" and row.name in self._scores:
            return StepOutput((), (), finish, scores=_scored(req, *self._scores.pop(row.name)))
        if len(tokens) > 1:
            raise InfrastructureError(
                f"SGLang returned {len(tokens)} tokens in one step; turn off speculative decoding"
            )
        complete = bool(finish) and self._routed_layers is not None and req.routed_experts is not None
        experts = self._routed_layers.bytes_of(req.routed_experts) if complete and self._routed_layers else b""
        return StepOutput(
            tokens, (row.log_prob,) * len(tokens), finish, error, (row.top,) * len(tokens), routed_experts=experts,
            cached_tokens=req.cached_tokens,
        )  # fmt: skip

    def started(self) -> list[str]:
        reqs = {*self._scheduler.collect_inflight_reqs(), self._scheduler.chunked_req} - {None}
        return [req.row.name for req in reqs if self._inside.get(req.row.name) == req.rid]

    def routed_experts(self, name: str) -> bytes:
        """Return a running request's experts at all positions but the last; SGLang keeps experts with its KV cache."""
        running = (req for req in self._scheduler.collect_inflight_reqs() if req.row.name == name)
        req = next((req for req in running if req.output_ids and not req.finished()), None)
        if req is None or self._routed_layers is None:
            return b""
        found = get_global_experts_capturer().get_topk(
            req_pool_idx=req.kv.req_pool_idx, seqlen=len(req.origin_input_ids) + len(req.output_ids),
            req_to_token_pool=self._scheduler.req_to_token_pool,
        )  # fmt: skip
        return self._routed_layers.bytes_of(found)

    # -- weights --------------------------------------------------------------------------------------------------

    def load(self, arrays: Iterable[tuple[str, np.ndarray, str]]) -> None:
        updater = self._scheduler.tp_worker.model_runner.weight_updater
        with torch.inference_mode():
            updater.begin_weight_update()
            for bucket in tensor_buckets(arrays):
                done, message = updater.update_weights_from_tensor(named_tensors=bucket)
                if not done:
                    raise InfrastructureError(f"SGLang could not load weights: {message}")
            updater.end_weight_update(run_post_load=False)

    def checksums(self) -> dict[str, str]:
        """Return checksums of the weights in memory, in SGLang's own layout."""
        found = self._scheduler.weight_updater.check_weights(CheckWeightsReqInput(action="checksum"))
        if not found.success or not found.payload:
            raise InfrastructureError(f"SGLang could not read its weights: {found.message}")
        return {
            f"{rank} {name}": print_
            for rank, info in enumerate(found.payload)
            for name, print_ in info.checksums.items()
        }

    def forget_caches(self, running: bool) -> None:
        if self._prompt_media is not None:
            forget_features()
        if not running:  # running requests keep their caches; prefixes are not shared then
            return
        with torch.inference_mode():
            # Move running requests back to the queue with their tokens, and empty every cache.
            scheduler = self._scheduler
            scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
            wanted = set(self._inside.values())
            for req in [req for req in scheduler.waiting_queue if req.rid not in wanted]:
                scheduler.abort_request(AbortReq(rid=req.rid))
            if not scheduler.flush_cache():
                raise InfrastructureError("SGLang could not empty its caches before an update; restart the engine")
            self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    # -- memory ---------------------------------------------------------------------------------------------------

    def offload(self, parts: frozenset[str]) -> int:
        raise NotImplementedError("SGLang frees memory only in a process started with its memory saver")

    def onload(self, parts: frozenset[str]) -> None:
        raise NotImplementedError("SGLang was not offloaded, since this engine does not support it")

    def stop(self) -> None:
        """Do nothing: SGLang started no processes, and the end of this process frees its objects."""


def _check_layers(spec: EngineSpec) -> None:
    """Raise ConfigError for dense layers in a model of `ALL_SPARSE`, which SGLang would run with random experts."""
    path = Path(spec.model["path"]) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    routing = Routing.of(config)
    if routing and config.get("model_type") in ALL_SPARSE and routing.layers < config["num_hidden_layers"]:
        got = f"a {config['model_type']} with dense layers"
        raise ConfigError("model.path", got, "SGLang would load these as expert layers; use another engine")


class _RoutedLayers(NamedTuple):
    """The indices of the layers with a router, and the dtype of their experts."""

    layers: list[int]
    dtype: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _RoutedLayers | None:
        routing = Routing.of(config)
        return cls(routed_layers(config), routing.dtype) if routing else None

    def bytes_of(self, choices: torch.Tensor) -> bytes:
        """Return the experts of `layers` as bytes, from `choices` [positions, all layers, top_k]."""
        return bytes(choices[:, self.layers].numpy().astype(np.dtype(self.dtype).newbyteorder("<")).tobytes())


def _finish(req: Any) -> tuple[FinishReason, str]:
    if not req.finished():
        return "", ""
    reason = req.finished_reason.to_json()
    finish = _FINISHES.get(reason["type"], "error")
    return finish, str(reason.get("message", reason)) if finish == "error" else ""


def _scored(req: Any, tokens: tuple[int, ...], temperature: float) -> tuple[float, ...]:
    """Return the log-probs of all tokens but the first; a temperature other than 1 needs the whole vocabulary's."""
    if temperature == 1.0:
        return tuple(map(float, req.logprob.input_token_logprobs_val[1:]))
    scores = []
    places = zip(
        tokens[1:], req.logprob.input_top_logprobs_val[1:], req.logprob.input_top_logprobs_idx[1:], strict=True
    )
    for token, values, ids in places:
        logits = np.asarray(values, np.float64) / temperature
        of_all = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        scores.append(float(logits[list(ids).index(token)] - of_all))
    return tuple(scores)
