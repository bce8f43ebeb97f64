# SPDX-License-Identifier: Apache-2.0
"""Images and videos for vLLM, as tensors from the run's media store instead of files.

The run's modality processor made these tensors, so trainer and engine compute with the same bits. vLLM's own processor
is replaced by a processor that only declares the maximum tokens of a medium. Supports the models of Qwen3-VL.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, ModelRegistry
from vllm.inputs.engine import mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from relax_core.api.errors import ConfigError
from relax_core.api.modality import ProcessedMedia
from relax_core.learn.huggingface import places_of
from relax_core.media.store import RESTORE_S, MediaStore
from relax_plugin_vllm.cpu_stand_ins import imported
from relax_plugin_vllm.environment_variables import on_gpu

FAMILIES: Mapping[str, str] = {
    "Qwen3VLForConditionalGeneration": "vllm.model_executor.models.qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "vllm.model_executor.models.qwen3_vl_moe",
}
"""vLLM's module for each supported architecture, by the architecture's name in `config.json`."""
_TENSORS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
"""Names of a medium's patches [patches, values] and of its grid [1, 3], by the kind of the medium."""
_PROCESSED: Mapping[str, Any] = {
    "skip_mm_profiling": True,
    "mm_processor_cache_gb": 0,
    "mm_device_do_normalize": False,  # pixels are normalised already
}


class PromptMedia:
    """Builds one engine's prompts with media. `directory`: the run's media store; empty if the run has no media."""

    def __init__(self, directory: str, config: Any) -> None:
        self._store = MediaStore(directory, restore_s=RESTORE_S) if directory else None
        ids = {kind: getattr(config, f"{kind}_token_id", None) for kind in _TENSORS}
        self._holds: dict[str, int] = {kind: number for kind, number in ids.items() if number is not None}
        """Placeholder token of each kind of medium that the model takes."""
        self.weights_epoch = 0
        """Number of weight changes; a part of each medium's cache key, so that features of old weights are not reused."""

    @property
    def takes_media(self) -> bool:
        return bool(self._holds)

    def prompt(self, tokens: Sequence[int], keys: Sequence[str]) -> Any:
        """Return a prompt in vLLM's format. Raises ValueError if placeholders and media do not match."""
        if not self._holds or (keys and self._store is None):
            if keys:
                raise ValueError("a request has media, but this engine has no media store or a model without vision")
            return written(tokens)
        shown = [self._store.get(key) for key in keys] if self._store is not None else []
        own = places_of(tokens, shown, self._holds)
        if not shown:
            return written(tokens)
        items, names, places = (defaultdict[str, list[Any]](list) for _ in range(3))
        for one, at in zip(shown, own, strict=True):
            kind = one.layout[0].kind
            items[kind].append(_item(one, kind))
            names[kind].append(f"{one.key}-{self.weights_epoch}")
            places[kind].append(_range(at, one, kind))
        return mm_input(list(tokens), MultiModalKwargsItems(items), names, places)


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


def _item(one: ProcessedMedia, kind: str) -> MultiModalKwargsItem:
    """Return a medium's patches and grid in vLLM's form."""
    patches, grid = _TENSORS[kind]
    tensors = {name: torch.from_numpy(one.tensors[name].copy()) for name in (patches, grid)}
    fields = {
        patches: MultiModalFieldConfig.flat_from_sizes(kind, tensors[grid].prod(-1)),
        grid: MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
    }
    (item,) = MultiModalKwargsItems.from_hf_inputs(tensors, fields)[kind]
    return item


def _range(places: np.ndarray, one: ProcessedMedia, kind: str) -> PlaceholderRange:
    """Return the range of a medium's placeholders. Raises ValueError for an image in several pieces.

    A video's range begins one token early, at the mark before its first frame, where vLLM starts to look for frames.
    """
    first, length = int(places[0]), int(places[-1] - places[0]) + 1
    if kind == "video":
        inside = torch.zeros(length + 1, dtype=torch.bool)
        inside[places - first + 1] = True
        return PlaceholderRange(offset=first - 1, length=length + 1, is_embed=inside)
    if length != len(places):
        raise ValueError(f"the placeholders of image {one.key} are not contiguous; place them one after another")
    return PlaceholderRange(offset=first, length=length)


class _Sizes(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return dict.fromkeys(_TENSORS)

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return dict.fromkeys(_TENSORS, seq_len)


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
