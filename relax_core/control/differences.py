# SPDX-License-Identifier: Apache-2.0
"""Differences of log-probs over all tokens of a sample at once, exactly: what a run's meter adds up in parts. No IO."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from relax_core.api.batch import Ragged, RowBatch

FIRST = 16
"""Sampled tokens in the first part of a sample; each later part ends at four times as many."""
MOST = 20.0
"""Of a log ratio, before its exponential."""


@dataclass(frozen=True, slots=True)
class Differences:
    """Of trainer - engine; sizes are absolute."""

    tokens: int
    mean: float
    p99: float
    """99 % of tokens are at most this far apart."""
    max: float
    k3_kl: float
    """KL of engine to trainer a token: the mean of exp(d) - 1 - d."""
    ratio_min: float
    ratio_max: float
    positions: tuple[tuple[int, float], ...] = ()
    """(end, mean) of tokens before that place of their sample, counted in sampled tokens, from the end before."""

    @classmethod
    def of(cls, rows: RowBatch, log_probs: Ragged) -> Self:
        """`log_probs` [tokens] of the same rows in the same order."""
        lengths, mask = rows.columns["tokens"].lengths, rows.columns["loss_mask"].values.astype(bool)
        apart = log_probs.values[mask].astype(np.float64) - rows.columns["rollout_log_probs"].values[mask]
        return cls.between(apart, _places(mask, lengths)[mask])

    @classmethod
    def between(cls, apart: np.ndarray, places: np.ndarray) -> Self:
        """Both [tokens]; at least one."""
        size, log = np.abs(apart), apart.clip(-MOST, MOST)
        ranked = np.sort(size)
        return cls(
            len(size), float(size.mean()), float(ranked[len(size) - 1 - int(len(size) * 0.01)]), float(size.max()),
            float((np.expm1(log) - log).mean()), float(np.exp(log.min())), float(np.exp(log.max())),
            tuple(_by_position(size, places)),
        )  # fmt: skip

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        positions = [{"before": end, "mean": mean} for end, mean in self.positions]
        return {**asdict(self), "positions": positions}


def _places(mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sampled tokens before each token of its row."""
    before = np.cumsum(mask) - mask
    starts = np.cumsum(lengths) - lengths
    return np.asarray(before - np.repeat(before[np.minimum(starts, len(before) - 1)], lengths))


def _by_position(size: np.ndarray, places: np.ndarray) -> list[tuple[int, float]]:
    found, start, end = [], 0, FIRST
    while start <= int(places.max()):
        part = size[(places >= start) & (places < end)]
        if len(part):
            found.append((end, float(part.mean())))
        start, end = end, end * 4
    return found
