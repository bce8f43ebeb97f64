# SPDX-License-Identifier: Apache-2.0
"""Media of rows as a Hugging Face model takes them, and that placeholders and features fit together.

For engines and trainers alike: what one samples from, the other computes with.

Positions of tokens in rows with media, as a Hugging Face model itself computes them (`get_rope_index`).

Models differ in what they ask for and in what they stumble over. Here each is asked about one medium at a time, with the
text before it; whatever a policy may have written (a mark that opens nothing, say) is text. Engine and trainer both ask here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_core.api.modality import ProcessedMedia
from relax_core.media.store import tensors_of

_ASKED = {
    "image_grid_thw": "image_grid_thw", "video_grid_thw": "video_grid_thw", "second_per_grids": "video_second_per_grid",
}  # fmt: skip
"""What models call tensors of processed media here."""


class Positions:
    """Of one model."""

    def __init__(self, module: Any, holds: Mapping[str, int], kinds: Sequence[str]) -> None:
        """`holds`: by kind of medium, the token that holds its place; `kinds`: in the order of their numbers, from 1."""
        self._compute = getattr(module.base_model, "get_rope_index", None)
        self._takes = frozenset(inspect.signature(self._compute).parameters) if self._compute else frozenset()
        self._holds = torch.tensor(sorted(holds.values()), dtype=torch.long)
        self._numbers = {holds[kind]: number for number, kind in enumerate(kinds, 1) if kind in holds}
        marks = [getattr(module.config, f"{mark}_start_token_id", None) for mark in ("vision", "audio")]
        self._vision, self._audio = (-1 if mark is None else int(mark) for mark in marks)
        special = {*holds.values(), self._vision, self._audio}
        self._text = next(number for number in range(len(special) + 1) if number not in special)
        """A token that means nothing here."""

    def of(self, ids: Tensor, valid: Tensor, shown: Sequence[Sequence[ProcessedMedia]]) -> tuple[Tensor | None, Tensor]:
        """[3, rows, width], None where the model counts tokens alone; and how far the token after each row is ahead of the
        row's length [rows]. `ids`, `valid` [rows, width]: tokens, and which are no padding; `shown`: media of each row."""
        ahead = torch.zeros(len(ids), dtype=torch.float64)
        if self._compute is None:
            return None, ahead
        tokens, real = ids.cpu(), valid.bool().cpu()
        rows = [self._row(row[own], media) for row, own, media in zip(tokens, real, shown, strict=True)]
        positions = torch.zeros(3, *ids.shape, dtype=torch.float64)
        for number, row in enumerate(rows):
            positions[:, number, real[number]] = row[:, :-1]
            ahead[number] = row[0, -1] - (row.shape[1] - 1)
        whole = bool((positions == positions.round()).all())  # of some models, videos have fractions
        return (positions.long() if whole else positions.float()).to(ids.device), ahead.to(ids.device)

    def _row(self, tokens: Tensor, media: Sequence[ProcessedMedia]) -> Tensor:
        """[3, tokens + 1]: the last is of the token to come."""
        places = torch.isin(tokens, self._holds).nonzero().squeeze(1)
        ends = np.cumsum([one.num_placeholders for one in media], dtype=np.int64)
        if len(ends) and ends[-1] > len(places):
            raise ValueError(f"{len(places)} placeholders for {ends[-1]} features")
        parts: list[Tensor] = []
        at, following = 0, torch.zeros((), dtype=torch.float64)
        for one, end in zip(media, ends, strict=True):
            behind = int(places[end - 1]) + 1
            part = self._piece(tokens[at:behind], one) + following
            parts.append(part[:, :-1])
            at, following = behind, part[0, -1]
        rest = torch.arange(len(tokens) - at + 1) + following
        return torch.cat([*parts, rest.expand(3, -1)], dim=1)

    def _piece(self, tokens: Tensor, media: ProcessedMedia) -> Tensor:
        """[3, tokens + 1]: of a text that ends with a medium, and of the token behind it."""
        # Two tokens of text behind it: models count on one mark there, or two.
        ids = torch.cat([self._as_text(tokens), torch.full((2,), self._text)])[None]
        asked: dict[str, Any] = {
            name: torch.from_numpy(np.array(media.tensors[own])) for name, own in _ASKED.items() if own in media.tensors
        }
        if "feature_attention_mask" in media.tensors:
            asked["audio_seqlens"] = torch.from_numpy(media.tensors["feature_attention_mask"].sum(-1))
        asked["use_audio_in_video"] = {span.kind for span in media.layout} == {"video", "audio"}
        asked["mm_token_type_ids"] = sum((ids == token) * number for token, number in self._numbers.items())
        taken = {name: value for name, value in asked.items() if name in self._takes}
        positions: Tensor = self._compute(ids, attention_mask=torch.ones_like(ids), **taken)[0]  # type: ignore[misc]
        return positions[:, 0, :-1].double()

    def _as_text(self, ids: Tensor) -> Tensor:
        """Marks that open no medium are text: a policy may sample them."""
        following = torch.cat([ids[1:], torch.tensor([self._text])])
        holds = torch.isin(following, self._holds)
        audio = (ids == self._audio) & holds
        opens = audio | (ids == self._vision) & (holds | torch.cat([audio[1:], torch.tensor([False])]))
        return ids.masked_fill(((ids == self._vision) | (ids == self._audio)) & ~opens, self._text)


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
