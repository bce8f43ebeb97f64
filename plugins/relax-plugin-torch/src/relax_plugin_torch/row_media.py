# SPDX-License-Identifier: Apache-2.0
"""The media that rows show: read from the run's store, in the form that the model takes, and checked before it does.

Rows carry keys. A row whose placeholders are not as many as its features, or are trained, is refused by name: the model
would fail somewhere inside, or go on with nonsense.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relax_core import learn
from relax_core.api import ConfigError, ProcessedMedia, RowBatch, TrainerSpec
from relax_core.learn.huggingface import MediaInputs, conserved
from relax_core.media.store import RESTORE_S, MediaStore, key_texts

COLUMN = "media"


class RowMedia:
    """The media of one model's rows."""

    def __init__(self, model: Any, location: str) -> None:
        self._inputs = MediaInputs(model)
        self._holds = self._inputs.holds
        self._store = MediaStore(location, restore_s=RESTORE_S) if location else None

    def of(self, rows: RowBatch) -> list[list[ProcessedMedia]]:
        """Return the media of each row. ValueError where rows show media and this run has no store of them."""
        if COLUMN not in rows.columns:
            return [[] for _ in rows.ids]
        keys = [key_texts(part) for part in rows.columns[COLUMN].rows()]
        if self._store is None:
            shows = any(keys)
            if shows:
                raise ValueError("rows with media, but the trainer was started without a media store")
            return [[] for _ in rows.ids]
        return [[self._store.get(key) for key in own] for own in keys]

    def check(self, rows: RowBatch) -> None:
        """Raise ValueError for a row that must not reach the model."""
        ids = np.array(sorted(self._holds.values()), np.int64)
        if not len(ids):
            return
        tokens, mask = rows.columns["tokens"], rows.columns["loss_mask"]
        places = np.isin(tokens.values, ids)
        if (places & mask.values.astype(bool)).any():
            at = int(np.argmax(places & mask.values.astype(bool)))
            row = int(np.searchsorted(tokens.offsets(), at, side="right")) - 1
            raise ValueError(
                f"row {tuple(rows.ids[row])}: trains token {int(tokens.values[at])}, which holds a medium's place"
            )
        if not places.any() and COLUMN not in rows.columns:
            return
        for row, own, media in zip(rows.ids, tokens.rows(), self.of(rows), strict=True):
            if fault := conserved(own, media, self._holds):
                raise ValueError(f"row {tuple(row)}: {fault}")
            if media and own[-1] in ids:
                raise ValueError(f"row {tuple(row)}: ends in the middle of a medium")

    def inputs(self, batch: learn.PackedBatch, ids: Tensor) -> dict[str, Tensor]:
        """Inputs of the model beside `ids`, a row a line without its last token; empty where no row shows anything."""
        shown = self.of(batch.rows)
        if not any(shown):
            return {}
        valid = torch.arange(ids.shape[1], device=ids.device) < batch.lengths[:, None] - 1
        return self._inputs.of(ids, valid, shown)[0]

    def shows(self, batch: learn.PackedBatch) -> bool:
        """Tell whether a row has media."""
        column = batch.rows.columns.get(COLUMN)
        return column is not None and len(column.values) > 0


def towers(model: Any) -> list[nn.Module]:
    """Return the parts of the model that see or hear. Where ranks share out weights, these stay whole on each: only
    some ranks may have something to show, and those would wait for the others."""
    base = model.base_model
    if not hasattr(base, "language_model"):
        return []
    return [module for name, module in base.named_children() if name != "language_model"]


def check_media(spec: TrainerSpec, group_size: int) -> None:
    """No plan of a model cuts its towers."""
    if spec.media and group_size > 1:
        raise ConfigError(
            "trainer.tensor_parallel", f"{group_size} with media", 'set it to 1; sharding = "fsdp" takes media'
        )


def check_text_only(spec: TrainerSpec) -> None:
    """A scalar head would value placeholders instead of what they stand for."""
    if spec.media:
        raise ConfigError("media", f"a run whose {spec.role} gives scalars", "such models see text only so far")
