# SPDX-License-Identifier: Apache-2.0
"""Images and videos for SGLang, as tensors from the run's media store instead of files.

The run's modality processor made these tensors, so trainer and engine compute with the same bits. Supports the models
of Qwen3-VL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from sglang.srt.managers.mm_schedule import init_mm_embedding_cache
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

from relax_core.api.errors import ConfigError
from relax_core.api.modality import ProcessedMedia
from relax_core.learn.huggingface import places_of
from relax_core.media.store import RESTORE_S, MediaStore

ARCHITECTURES = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
"""Supported architectures, as `config.json` names them."""
_TENSORS = {
    "image": (Modality.IMAGE, "pixel_values", "image_grid_thw"),
    "video": (Modality.VIDEO, "pixel_values_videos", "video_grid_thw"),
}
"""Kind of medium -> SGLang's name, and the names of its patches [patches, values] and its grid [1, 3]."""


class PromptMedia:
    """Builds one engine's prompts with media."""

    def __init__(self, directory: str, config: Any) -> None:
        """`directory`: the run's media store. Raises ConfigError for a model that SGLang gets no media for."""
        architectures = list(config.architectures or ())
        if not any(name in ARCHITECTURES for name in architectures):
            fix = f"SGLang gets media only for {' and '.join(ARCHITECTURES)}: use the transformers engine, or leave media out"
            raise ConfigError("media", f"a model of {', '.join(architectures) or 'no architecture'}", fix)
        self._store = MediaStore(directory, restore_s=RESTORE_S)
        self._config = config
        self._holds: dict[str, int] = {kind: getattr(config, f"{kind}_token_id") for kind in _TENSORS}

    def of(self, tokens: Sequence[int], keys: Sequence[str]) -> MultimodalProcessorOutput | None:
        """Return a prompt's media in SGLang's form; None without media. Raises ValueError if tokens do not match."""
        shown = [self._store.get(key) for key in keys]
        places = places_of(tokens, shown, self._holds)
        if not shown:
            return None
        positions, ahead = self._positions(tokens, shown)
        return MultimodalProcessorOutput(
            mm_items=[_item(one, own) for one, own in zip(shown, places, strict=True)], im_token_id=self._holds["image"],
            video_token_id=self._holds["video"], mrope_positions=positions, mrope_position_delta=ahead,
        )  # fmt: skip

    def _positions(self, tokens: Sequence[int], shown: Sequence[ProcessedMedia]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens' positions [3, tokens], and the next token's position less the number of tokens [1, 1]."""
        grids = {
            name: torch.cat(own)
            for kind, (_, _, name) in _TENSORS.items()
            if (own := [torch.from_numpy(one.tensors[name]) for one in shown if one.layout[0].kind == kind])
        }
        # A text token is appended: SGLang looks at the token after each mark, and a policy may have sampled one last.
        marks = {*self._holds.values(), self._config.vision_start_token_id}
        text = next(token for token in range(len(_TENSORS) + 2) if token not in marks)
        positions, _ = MRotaryEmbedding.get_rope_index(
            spatial_merge_size=self._config.vision_config.spatial_merge_size, image_token_id=self._holds["image"],
            video_token_id=self._holds["video"], vision_start_token_id=self._config.vision_start_token_id,
            model_type=self._config.model_type, input_ids=torch.tensor([[*tokens, text]]), **grids,
        )  # fmt: skip
        return positions[:, 0, :-1], positions[0, :, -1:] - len(tokens)


def forget_features() -> None:
    """Drop the features that SGLang keeps of media, after the weights that computed them have changed."""
    init_mm_embedding_cache(envs.SGLANG_VLM_CACHE_SIZE_MB.get() << 20)


def _item(one: ProcessedMedia, places: np.ndarray) -> MultimodalDataItem:
    modality, patches, grid = _TENSORS[one.layout[0].kind]
    item = MultimodalDataItem(
        modality=modality, offsets=list(_runs(places)), feature=torch.from_numpy(one.tensors[patches].copy()),
        model_specific_data={grid: torch.from_numpy(one.tensors[grid].copy())},
    )  # fmt: skip
    item.set_hash(int.from_bytes(blake2b(one.key.encode(), digest_size=8).digest()))
    return item


def _runs(places: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the first and last place of each run of consecutive places: one of an image, one per frame of a video."""
    starts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
    for start, end in pairwise(starts):
        yield int(places[start]), int(places[end - 1])
