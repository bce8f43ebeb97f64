# SPDX-License-Identifier: Apache-2.0
"""Leaf tensors in place of a model's outputs, so that tests can inspect the gradient of an algorithm's loss."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from relax_core.api.algorithm import Output
from relax_core.api.batch import STANDARD
from relax_core.learn import Outputs, PackedBatch

_CRITIC = frozenset({Output("values")})


class LeafOutputs(Outputs):
    """Random values for the outputs that an algorithm declares; a row has the same values in every chunk."""

    def __init__(self, leaves: dict[str, Tensor]) -> None:
        super().__init__(leaves)
        self.leaves = leaves

    @classmethod
    def of(cls, algorithm: Any, batch: PackedBatch, critic: bool, nudge: Any = None) -> Self:
        """Draw the outputs; `nudge` = (name, index, amount) adds an amount to one number of one output."""
        wanted = algorithm.outputs() | (_CRITIC if critic else frozenset())
        arrays: dict[str, np.ndarray] = {}
        for output in sorted(wanted, key=repr):
            arrays.update(_arrays(output, batch))
        if nudge is not None:
            name, place, by = nudge
            arrays[name][place] += by
        return cls({name: _leaf(array) for name, array in arrays.items()})


def _arrays(output: Output, batch: PackedBatch) -> dict[str, np.ndarray]:
    """Draw one output: [tokens, ...], or [rows] for rewards. Log-probs stay close to `old_log_probs`."""
    if output.name == "top_k":
        shape = (output.k,)
        return {
            "top_k_ids": _noise(batch, "top_k_ids", shape, ids=True),
            "top_k_log_probs": -np.abs(_noise(batch, "top_k", shape)) - 0.1,
        }
    if output.name == "log_probs_at":
        width = batch.column(output.ids).shape[1:]
        return {f"log_probs_at:{output.ids}": -np.abs(_noise(batch, output.ids, tuple(width))) - 0.1}
    if output.name == "log_probs":
        old = batch.rows.columns[STANDARD["old_log_probs"].name].values.astype(np.float64)
        return {"log_probs": old + 0.2 * _noise(batch, "log_probs", ())}
    if output.name == "rewards":
        firsts = (batch.lengths.cumsum(0) - batch.lengths).numpy()
        return {"rewards": _noise(batch, "rewards", ())[firsts]}
    return {output.name: np.abs(_noise(batch, output.name, ()))}


def _noise(batch: PackedBatch, name: str, shape: tuple[int, ...], ids: bool = False) -> np.ndarray:
    """Draw noise for each row from a seed made of its id, so that splitting and padding do not change it."""
    rows = []
    for row, length in zip(batch.rows.ids, batch.lengths.tolist(), strict=True):
        random = np.random.default_rng([*row, sum(name.encode())])
        rows.append(random.integers(0, 32, (length, *shape)) if ids else random.normal(size=(length, *shape)))
    return np.concatenate(rows)


def _leaf(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).requires_grad_(array.dtype == np.float64)
