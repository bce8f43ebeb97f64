# SPDX-License-Identifier: Apache-2.0
"""Media of rows: read from the run's media store by the keys in the rows, checked, and turned into model inputs.

An error names the row whose placeholders do not match its media features, or that trains a placeholder. Without this
check the model would fail with an obscure error, or compute nonsense.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_core import learn
from relax_core.api import ConfigError, ProcessedMedia, RowBatch, TrainerSpec
from relax_core.learn.huggingface import MediaInputs, conserved
from relax_core.media.store import RESTORE_S, MediaStore, key_texts

COLUMN = "media"


class RowMedia:
    """Access to the media of rows, for one model."""

    def __init__(self, model: Any, location: str) -> None:
        self._inputs = MediaInputs(model)
        self._holds = self._inputs.holds
        self._store = MediaStore(location, restore_s=RESTORE_S) if location else None

    def of(self, rows: RowBatch) -> list[list[ProcessedMedia]]:
        """Return the media of each row. Raises ValueError if a row has media and the run has no media store."""
        if COLUMN not in rows.columns:
            return [[] for _ in rows.ids]
        keys = [key_texts(part) for part in rows.columns[COLUMN].rows()]
        if self._store is None:
            shows = any(keys)
            if shows:
                raise ValueError("rows have media, but the trainer was started without a media store")
            return [[] for _ in rows.ids]
        return [[self._store.get(key) for key in own] for own in keys]

    def check(self, rows: RowBatch) -> None:
        """Raise ValueError for a row whose media placeholders are trained, cut off, or do not match its media."""
        ids = np.array(sorted(self._holds.values()), np.int64)
        if not len(ids):
            return
        tokens, mask = rows.columns["tokens"], rows.columns["loss_mask"]
        places = np.isin(tokens.values, ids)
        if (places & mask.values.astype(bool)).any():
            at = int(np.argmax(places & mask.values.astype(bool)))
            trained = rows.ids[int(np.searchsorted(tokens.offsets(), at, side="right")) - 1]
            raise ValueError(f"row {tuple(trained)}: trains token {int(tokens.values[at])}, a placeholder of media")
        if not places.any() and COLUMN not in rows.columns:
            return
        for row, own, media in zip(rows.ids, tokens.rows(), self.of(rows), strict=True):
            if fault := conserved(own, media, self._holds):
                raise ValueError(f"row {tuple(row)}: {fault}")
            if media and own[-1] in ids:
                raise ValueError(f"row {tuple(row)}: ends in the middle of a medium")

    def inputs(self, batch: learn.PackedBatch, ids: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs for the rows' media; empty if no row has media.

        `ids` [rows, width]: token ids, one row per line without its last token.
        """
        shown = self.of(batch.rows)
        if not any(shown):
            return {}
        valid = torch.arange(ids.shape[1], device=ids.device) < batch.lengths[:, None] - 1
        return self._inputs.of(ids, valid, shown)[0]

    def shows(self, batch: learn.PackedBatch) -> bool:
        """Return True if any row has media."""
        column = batch.rows.columns.get(COLUMN)
        return column is not None and len(column.values) > 0


def check_text_only(spec: TrainerSpec) -> None:
    """Raise ConfigError for media with a scalar head, which would score placeholders instead of the media."""
    if spec.media:
        raise ConfigError("media", f"a run whose {spec.role} gives scalars", "a scalar head supports text only so far")
