# SPDX-License-Identifier: Apache-2.0
"""Functions that vLLM calls in each of its workers, with the worker as first argument.

With one GPU the only worker lives in the engine's process; with more, each GPU's worker is a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from relax_plugin_vllm.environment_variables import on_gpu
from relax_plugin_vllm.sampler import DraftSampler, DrawingSampler


def install_sampler(worker: Any) -> None:
    """Draw each later token by the request's seed and the token's position, so that continuations draw the same tokens."""
    runner = worker.model_runner
    runner.sampler = DrawingSampler(runner)
    if runner.speculative_config is not None:
        runner.rejection_sampler = DraftSampler(runner.sampler)


def begin_load(worker: Any) -> None:
    initialize_layerwise_reload(worker.model_runner.get_model())


def load(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load weights by Hugging Face name; each worker keeps its part of them."""
    worker.model_runner.get_model().load_weights(weights)


def end_load(worker: Any) -> None:
    runner = worker.model_runner
    finalize_layerwise_reload(runner.get_model(), runner.model_config)
    runner.reset_lora_state()
    runner.reset_encoder_cache()
    runner.reset_mm_cache()
    if not on_gpu():
        # On a CPU vLLM multiplies by packed copies, but packs only weights that arrive under their own name. Without the
        # next lines, a head that is tied to the embedding would keep its old weights.
        seen = set[int]()
        for module in runner.get_model().modules():
            weight, method = module._parameters.get("weight"), getattr(module, "quant_method", None)
            if id(weight) in seen and method is not None:
                method.process_weights_after_loading(module)
            if weight is not None:
                seen.add(id(weight))
