# SPDX-License-Identifier: Apache-2.0
"""Media of rows as a Hugging Face model takes them, and that placeholders and features are equally many.

For engines and trainers alike: what one samples from, the other computes with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_core.api.media_store import tensors_of
from relax_core.api.modality import ProcessedMedia

KINDS = ("image", "video", "audio")
"""In the order of their numbers in `mm_token_type_ids`, from 1."""
INPUTS = (
    "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "input_features", "feature_attention_mask",
)  # fmt: skip
"""Tensors of processed media that models have inputs for; others are for those who render."""


def placeholder_ids(config: Any) -> dict[str, int]:
    """By kind, the token that a model's configuration names for it."""
    ids = {kind: getattr(config, f"{kind}_token_id", None) for kind in KINDS}
    return {kind: int(number) for kind, number in ids.items() if number is not None}


def media_inputs(ids: Tensor, media: Sequence[ProcessedMedia], holds: Mapping[str, int]) -> dict[str, Tensor]:
    """Inputs beside `input_ids` [rows, width]; `media` of all rows in order."""
    inputs = {
        name: torch.from_numpy(value).to(ids.device) for name, value in tensors_of(media).items() if name in INPUTS
    }
    types = torch.zeros_like(ids)
    for number, kind in enumerate(KINDS, 1):
        if kind in holds:
            types[ids == holds[kind]] = number
    return {**inputs, "mm_token_type_ids": types}


def conserved(tokens: Any, media: Sequence[ProcessedMedia], holds: Mapping[str, int]) -> str:
    """Why these tokens and media don't fit together; empty: there are as many placeholders as features."""
    ids = set(holds.values())
    places = sum(int(token) in ids for token in tokens)
    features = sum(one.num_placeholders for one in media)
    return "" if places == features else f"{places} placeholders for {features} features of {len(media)} media"
