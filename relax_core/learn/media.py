# SPDX-License-Identifier: Apache-2.0
"""Media of rows as a Hugging Face model takes them, and that placeholders and features fit together.

For engines and trainers alike: what one samples from, the other computes with.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_core.api.media_store import tensors_of
from relax_core.api.modality import ProcessedMedia
from relax_core.learn.positions import Positions

KINDS = ("image", "video", "audio")
"""In the order of their numbers in `mm_token_type_ids`, from 1."""
INPUTS = (
    "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "video_second_per_grid", "input_features",
    "feature_attention_mask",
)  # fmt: skip
"""Tensors of processed media that models have inputs for; others are for those who render."""


def placeholder_ids(config: Any) -> dict[str, int]:
    """By kind, the token that a model's configuration names for it."""
    ids = {kind: getattr(config, f"{kind}_token_id", None) for kind in KINDS}
    return {kind: int(number) for kind, number in ids.items() if number is not None}


class MediaInputs:
    """What one model wants beside tokens."""

    def __init__(self, module: Any) -> None:
        self.holds = placeholder_ids(module.config)
        self._takes = frozenset(inspect.signature(module.forward).parameters)
        self._positions = Positions(module, self.holds, KINDS)

    def of(
        self, ids: Tensor, valid: Tensor, shown: Sequence[Sequence[ProcessedMedia]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs beside `input_ids` [rows, width], positions among them; and how far the token after each row is ahead of
        its length [rows]. `valid` [rows, width]: what is no padding; `shown`: media of each row."""
        media = [one for row in shown for one in row]
        inputs = {
            name: torch.from_numpy(value).to(ids.device) for name, value in tensors_of(media).items() if name in INPUTS
        }
        types = torch.zeros_like(ids)
        for number, kind in enumerate(KINDS, 1):
            if kind in self.holds:
                types[ids == self.holds[kind]] = number
        inputs["mm_token_type_ids"] = types
        positions, ahead = self._positions.of(ids, valid, shown)
        taken = {name: value for name, value in inputs.items() if name in self._takes}
        return taken if positions is None else {**taken, "position_ids": positions}, ahead


def conserved(tokens: Any, media: Sequence[ProcessedMedia], holds: Mapping[str, int]) -> str:
    """Why these tokens and media don't fit together; empty: each kind has as many placeholders as features, and they stand
    in the pieces that the media are laid out in, or with those of one medium joined, as their model's family does."""
    found, laid = _runs(np.asarray(tokens), holds), [_spans(one) for one in media]
    if _fit(found, laid):
        return ""
    told = [span for spans in laid for span in spans]
    for kind in KINDS:
        places, features = (sum(count for own, count in pieces if own == kind) for pieces in (found, told))
        if places != features:
            return f"{places} {kind} placeholders for {features} features of {len(media)} media"
    return f"placeholders in pieces of {_listed(found)} for media in pieces of {_listed(told)}"


def _spans(media: ProcessedMedia) -> list[tuple[str, int]]:
    """ValueError where nobody laid it out."""
    if not media.layout:
        raise ValueError(f"medium {media.key} has no layout: store it as `laid_out` makes it")
    return [(span.kind, span.size) for span in media.layout]


def _fit(found: Sequence[tuple[str, int]], laid: Sequence[list[tuple[str, int]]]) -> bool:
    left = list(found)
    for spans in laid:
        joined = [(kind, sum(count for _, count in same)) for kind, same in groupby(spans, key=lambda span: span[0])]
        own = next((own for own in (spans, joined) if left[: len(own)] == own), None)
        if own is None:
            return False
        del left[: len(own)]
    return not left


def _runs(tokens: np.ndarray, holds: Mapping[str, int]) -> list[tuple[str, int]]:
    """Placeholders that follow one another, by kind."""
    kind_of = {number: kind for kind, number in holds.items()}
    at = np.flatnonzero(np.isin(tokens, list(kind_of)))
    if not len(at):
        return []
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(tokens[at]) != 0)) + 1
    return [(kind_of[int(tokens[run[0]])], len(run)) for run in np.split(at, breaks)]


def _listed(pieces: Sequence[tuple[str, int]]) -> str:
    shown = ", ".join(f"{count} {kind}" for kind, count in pieces[:6])
    return shown if len(pieces) <= 6 else f"{shown}, ... ({len(pieces)} in all)"
