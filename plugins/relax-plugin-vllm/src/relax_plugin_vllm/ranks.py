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

SEED_MASK = (1 << 63) - 1
SEED, PROMPT = "relax_seed", "relax_prompt"
"""Keys of a request's `extra_args`: its seed, and the number of its prompt tokens."""


def place_seed(seed: int, place: int) -> int:
    """Return the seed of the token at `place`, by splitmix64's finaliser: seeds of neighbouring tokens are unrelated."""
    mixed = (seed * 0x9E3779B97F4A7C15 + place * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) & SEED_MASK


def seed_draws(worker: Any) -> None:
    """Seed each later draw by the request's seed and the token's position, so that continuations draw the same tokens."""
    runner = worker.model_runner
    execute = runner.execute_model

    def seeded(*args: Any, **kwargs: Any) -> Any:
        for state in runner.requests.values():  # without the new requests, whose generators have their first seed
            if state.generator is not None:
                own = state.sampling_params.extra_args
                state.generator.manual_seed(place_seed(own[SEED], own[PROMPT] + len(state.output_token_ids)))
        return execute(*args, **kwargs)

    runner.execute_model = seeded


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
        _pack_tied(runner.get_model())


def _pack_tied(model: torch.nn.Module) -> None:
    """Pack tied weights again after a reload on a CPU.

    On a CPU vLLM multiplies by packed copies, but packs only weights that arrive under their own name. So a head that
    is tied to the embedding would keep its old weights.
    """
    seen = set[int]()
    for module in model.modules():
        weight, method = module._parameters.get("weight"), getattr(module, "quant_method", None)
        if id(weight) in seen and method is not None:
            method.process_weights_after_loading(module)
        if weight is not None:
            seen.add(id(weight))
