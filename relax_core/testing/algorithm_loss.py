# SPDX-License-Identifier: Apache-2.0
"""Evaluation of an algorithm's loss on one chunk in float64: the loss, its gradients and metrics as plain numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from relax_core.api.algorithm import Loss
from relax_core.api.batch import RowBatch

NUDGE = 1e-6
"""Step of finite differences in float64; small enough that random values do not cross a clipping bound."""


class Learnt(NamedTuple):
    """The loss of rows, its gradient by output ([tokens, ...] each), and metrics as (sum, count)."""

    loss: float
    gradients: dict[str, np.ndarray]
    metrics: dict[str, tuple[float, float]]


def learn(algorithm: Any, rows: RowBatch, fit: str, counted: RowBatch | None = None, nudge: Any = None) -> Learnt:
    """Compute one chunk's share of the loss in float64. Denominators are counted over `counted` (default: `rows`)."""
    from relax_core import learn as parts

    batch, outputs = prepared(algorithm, rows, fit, nudge)
    loss = loss_of(algorithm, fit, batch, outputs)
    whole = counted or rows
    given = {**parts.count(whole), "pairs": float(len({row.group for row in whole.ids}))}
    total: Any = sum(parts.reduce(loss, batch, parts.Denominators(given)).values())
    leaves = {name: leaf for name, leaf in outputs.leaves.items() if leaf.requires_grad}
    if getattr(total, "requires_grad", False):
        total.backward()
    gradients = {n: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy() for n, leaf in leaves.items()}
    metrics = {name: (metric[0].item(), metric[1].item()) for name, metric in loss.metrics.items()}
    return Learnt(total.item() if hasattr(total, "item") else 0.0, gradients, metrics)


def loss_of(algorithm: Any, fit: str, batch: Any, outputs: Any) -> Loss:
    loss = algorithm.fit_loss(fit, batch, outputs) if fit else algorithm.loss(batch, outputs)
    assert isinstance(loss, Loss), f"the loss method returned {type(loss).__name__}; return Loss(terms={{...}})"
    return loss


def prepared(algorithm: Any, rows: RowBatch, fit: str, nudge: Any = None) -> tuple[Any, Any]:
    import torch

    from relax_core.learn import PackedBatch
    from relax_core.testing.algorithm_outputs import LeafOutputs

    batch = PackedBatch(rows, dtype=torch.float64)
    return batch, LeafOutputs.of(algorithm, batch, critic=bool(fit), nudge=nudge)


def measured(algorithm: Any, rows: RowBatch, fit: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Compute the gradient for one output by central differences, one number at a time."""
    gradient = np.zeros(shape)
    for place in np.ndindex(shape):
        up, down = (learn(algorithm, rows, fit, nudge=(name, place, step)).loss for step in (NUDGE, -NUDGE))
        gradient[place] = (up - down) / (2 * NUDGE)
    return gradient
