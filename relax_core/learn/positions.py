# SPDX-License-Identifier: Apache-2.0
"""Positions of tokens in rows with media, as a Hugging Face model itself computes them (`get_rope_index`).

Models differ in what they ask for and in what they stumble over; here all are asked in one way, and whatever a policy may
have written between media (a mark that opens none, say) is text. Engine and trainer both ask here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Positions:
    """Of one model."""

    def __init__(self, module: Any, holds: Mapping[str, int]) -> None:
        """`holds`: by kind of medium, the token that holds its place."""
        self._compute = getattr(module.base_model, "get_rope_index", None)
        self._asks = frozenset(inspect.signature(self._compute).parameters) if self._compute else frozenset()
        self._holds = torch.tensor(sorted(holds.values()))
        marks = [getattr(module.config, f"{mark}_start_token_id", None) for mark in ("vision", "audio")]
        self._vision, self._audio = (-1 if mark is None else int(mark) for mark in marks)
        special = {*holds.values(), self._vision, self._audio}
        self._text = next(number for number in range(len(special) + 1) if number not in special)
        """A token that means nothing here."""

    def of(self, ids: Tensor, valid: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor]:
        """[3, rows, width], None where the model counts tokens alone; and how far the token after each row is ahead of the
        row's length [rows].

        `ids`, `valid` [rows, width]: tokens, and which are no padding; `inputs`: as `media_inputs` makes them.
        """
        if self._compute is None:
            return None, torch.zeros(len(ids), dtype=torch.long, device=ids.device)
        rows, width = ids.shape
        end = width - valid.long().flip(1).argmax(1)
        end[~valid.any(1)] = 0
        at = torch.arange(rows, device=ids.device)
        # One more token of text behind each row: models count on one behind a medium, and its place is what is asked.
        longer, real = (torch.nn.functional.pad(part, (0, 1)) for part in (self._as_text(ids, valid), valid.bool()))
        longer[at, end], real[at, end] = self._text, True
        positions: Tensor = self._compute(longer, attention_mask=real.long(), **self._asked(longer, inputs))[0]
        return positions[:, :, :width], positions[0, at, end] - valid.sum(1)

    def _as_text(self, ids: Tensor, valid: Tensor) -> Tensor:
        """Marks that open no medium are text: a policy may sample them."""
        following = torch.nn.functional.pad(ids, (0, 1), value=self._text)[:, 1:]
        holds = torch.isin(following, self._holds.to(ids.device))
        audio = (ids == self._audio) & holds
        opens = (ids == self._vision) & (holds | torch.nn.functional.pad(audio, (0, 1))[:, 1:]) | audio
        stray = ((ids == self._vision) | (ids == self._audio)) & ~opens
        return ids.masked_fill(stray | ~valid.bool(), self._text)

    def _asked(self, ids: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        mask, types = inputs.get("feature_attention_mask"), inputs.get("mm_token_type_ids")
        known = {
            "image_grid_thw": inputs.get("image_grid_thw"), "video_grid_thw": inputs.get("video_grid_thw"),
            "second_per_grids": inputs.get("video_second_per_grid"),
            "audio_seqlens": None if mask is None else mask.sum(-1),
            "mm_token_type_ids": None if types is None else torch.nn.functional.pad(types, (0, 1)),
        }  # fmt: skip
        return {name: value for name, value in known.items() if name in self._asks}
