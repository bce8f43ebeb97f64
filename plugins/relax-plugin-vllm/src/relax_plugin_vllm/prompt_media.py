# SPDX-License-Identifier: Apache-2.0
"""Images for vLLM, as tensors from the run's media store instead of pictures.

The run's modality processor made these tensors, so trainer and engine compute with the same bits. vLLM's own processor
is replaced by a processor that only declares the maximum tokens of an image. Supports the models of Qwen3-VL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import EngineArgs, ModelRegistry
from vllm.inputs.engine import mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from relax_core.api.errors import ConfigError
from relax_core.api.modality import ProcessedMedia
from relax_core.learn.huggingface import conserved
from relax_core.media.store import RESTORE_S, MediaStore
from relax_plugin_vllm.cpu_stand_ins import imported
from relax_plugin_vllm.environment_variables import on_gpu

FAMILIES: Mapping[str, str] = {
    "Qwen3VLForConditionalGeneration": "vllm.model_executor.models.qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "vllm.model_executor.models.qwen3_vl_moe",
}
"""vLLM's module for each supported architecture, by the architecture's name in `config.json`."""
_PROCESSED: Mapping[str, Any] = {
    "skip_mm_profiling": True,
    "mm_processor_cache_gb": 0,
    "mm_device_do_normalize": False,  # pixels are normalised already
}


class PromptMedia:
    """Builds one engine's prompts with media. `directory`: the run's media store; empty if the run has no media."""

    def __init__(self, directory: str, config: Any) -> None:
        self._store = MediaStore(directory, restore_s=RESTORE_S) if directory else None
        self._image: int | None = getattr(config, "image_token_id", None)
        self.takes_images = self._image is not None
        self.weights_epoch = 0
        """Number of weight changes; a part of each image's cache key, so that features of old weights are not reused."""

    def prompt(self, tokens: Sequence[int], keys: Sequence[str]) -> Any:
        """Return a prompt in vLLM's format. Raises ValueError if placeholders and media do not match."""
        if self._image is None or (keys and self._store is None):
            if keys:
                raise ValueError("a request has media, but this engine has no media store or a model without vision")
            return written(tokens)
        shown = [self._store.get(key) for key in keys] if self._store is not None else []
        if fault := conserved(tokens, shown, {"image": self._image}):
            raise ValueError(f"a prompt of {len(tokens)} tokens: {fault}")
        if not shown:
            return written(tokens)
        return mm_input(
            list(tokens),
            MultiModalKwargsItems({"image": [_item(one) for one in shown]}),
            {"image": [f"{key}-{self.weights_epoch}" for key in keys]},
            {"image": list(_places(tokens, self._image, shown))},
        )


def written(tokens: Sequence[int]) -> Any:
    """Return a prompt of tokens only, in vLLM's format."""
    return {"prompt_token_ids": list(tokens)}


def arguments(architectures: Sequence[str], media: str) -> dict[str, Any]:
    """Return vLLM's arguments for a vision model, else {}. Raises ConfigError if a run with media has no such model."""
    known = [name for name in architectures if name in FAMILIES]
    if not known:
        if media:
            fix = f"vLLM gets media only for {' and '.join(FAMILIES)}: use the transformers engine, or leave media out"
            raise ConfigError("media", f"a model of {', '.join(architectures) or 'no architecture'}", fix)
        return {}
    _register(known[0])
    fields = EngineArgs.__dataclass_fields__
    return {name: value for name, value in _PROCESSED.items() if name in fields}


def architectures_of(folder: str) -> list[str]:
    """Return the architectures that the folder's `config.json` names; empty without the file."""
    import json

    path = Path(folder) / "config.json"
    return list(json.loads(path.read_text()).get("architectures") or ()) if path.is_file() else []


def _register(architecture: str) -> None:
    """Register the model class itself; by name, vLLM would import and inspect it in a separate process."""
    made = getattr(imported(FAMILIES[architecture], on_gpu()), architecture)
    if made._processor_factory.processor is not _Nothing:
        del made._processor_factory
        MULTIMODAL_REGISTRY.register_processor(_Nothing, info=_Sizes, dummy_inputs=_NoDummies)(made)
        ModelRegistry.register_model(architecture, made)


def _item(one: ProcessedMedia) -> MultiModalKwargsItem:
    """Return an image's inputs: `pixel_values` [patches, values] and `image_grid_thw` [1, 3]."""
    tensors = {name: torch.from_numpy(one.tensors[name].copy()) for name in ("pixel_values", "image_grid_thw")}
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", tensors["image_grid_thw"].prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    (item,) = MultiModalKwargsItems.from_hf_inputs(tensors, fields)["image"]
    return item


def _places(tokens: Sequence[int], placeholder: int, shown: Sequence[ProcessedMedia]) -> list[PlaceholderRange]:
    """Return the range of each image's placeholders in the prompt. Raises ValueError if they are not contiguous."""
    places: list[PlaceholderRange] = []
    at = 0
    for one in shown:
        at = list(tokens).index(placeholder, at)
        if any(token != placeholder for token in tokens[at : at + one.num_placeholders]):
            raise ValueError(f"the placeholders of image {one.key} are not contiguous; place them one after another")
        places.append(PlaceholderRange(offset=at, length=one.num_placeholders))
        at += one.num_placeholders
    return places


class _Sizes(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": seq_len}


class _Nothing(BaseMultiModalProcessor[_Sizes]):
    """A processor that vLLM never calls, since media are processed before they reach the engine."""

    requires_tokenizer = False

    def _get_mm_fields_config(self, *_: Any) -> Any:
        raise NotImplementedError("media are processed before they reach vLLM")

    def _get_prompt_updates(self, *_: Any) -> Any:
        raise NotImplementedError("media are processed before they reach vLLM")


class _NoDummies(BaseDummyInputsBuilder[_Sizes]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        raise NotImplementedError("vLLM does not profile media (skip_mm_profiling)")

    def get_dummy_mm_data(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("vLLM does not profile media (skip_mm_profiling)")
