# SPDX-License-Identifier: Apache-2.0
"""Requests of outputs to the head at the trained positions of a batch; ids that the model does not have are refused by
name."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from relax_core import learn
from relax_core.api import Output


def wanted(outputs: Collection[Output], batch: learn.PackedBatch, trained: Tensor, vocab_size: int) -> learn.Wanted:
    """Return what the outputs want of the batch's trained positions. Raises ValueError for a k or an id beyond the
    vocabulary."""
    top = max((output.k for output in outputs if output.name == "top_k"), default=0)
    if top > vocab_size:
        raise ValueError(f"top_k:{top}: got more than the {vocab_size} tokens of the model; ask for fewer")
    columns = sorted(output.ids for output in outputs if output.name == "log_probs_at")
    at = {name: _ids(name, batch, trained, vocab_size) for name in columns}
    return learn.Wanted(any(output.name == "entropy" for output in outputs), top, at)


def _ids(name: str, batch: learn.PackedBatch, trained: Tensor, vocab_size: int) -> Tensor:
    """[trained, k]"""
    ids = batch.column(name)[trained].long()
    if ids.dim() != 2:
        raise ValueError(f"log_probs_at:{name}: got ids of shape {list(ids.shape)}; the column must be [tokens, k]")
    if ids.numel() and not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise ValueError(
            f"log_probs_at:{name}: got ids from {int(ids.min())} to {int(ids.max())}; the model has 0 to {vocab_size - 1}"
        )
    return ids
