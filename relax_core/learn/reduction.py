# SPDX-License-Identifier: Apache-2.0
"""From a loss's named terms to one number, with global counts: `sum(value * weight over trained positions) / denominator`.

A denominator may be late: chunks are then divided by a nominal count and the whole gradient is rescaled once, at the
end. One buffer can be rescaled once, so every term must then share that factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_core.api.algorithm import Loss, LossBatch, Term


class Denominators:
    """The counts of one update: given at its start, true at its end; remembers which ones terms really used."""

    def __init__(self, given: Mapping[str, float]) -> None:
        self._given = dict(given)
        self._own: dict[str, float] = {}
        self._used: set[str] = set()

    def nominal(self, name: str) -> float:
        """What a term is divided by now; a denominator of the algorithm's own is divided at the end."""
        self._used.add(name)
        if name not in self._given and name not in self._own:
            raise ValueError(
                f"denominator {name!r}: neither given ({', '.join(self._given)}) nor counted in Loss.counts"
            )
        return self._given.get(name, 1.0) or 1.0

    def add(self, counts: Mapping[str, Tensor]) -> None:
        """A chunk's share of the algorithm's own denominators."""
        for name, share in counts.items():
            self._own[name] = self._own.get(name, 0.0) + float(share)

    def share(self) -> dict[str, Any]:
        """What this rank knows, as plain data for `join`."""
        return {"own": self._own, "used": sorted(self._used)}

    def join(self, shares: Sequence[Mapping[str, Any]]) -> None:
        """The shares of all ranks, this one's too, take the place of its own."""
        self._used = {name for share in shares for name in share["used"]}
        names = sorted({name for share in shares for name in share["own"]})
        self._own = {name: sum(share["own"].get(name, 0.0) for share in shares) for name in names}

    def rescale(self, true: Mapping[str, float]) -> float:
        """The one factor from nominal to true counts. Raises ValueError where terms would need different ones."""
        counts = {**self._given, **self._own, **true}
        factors = {name: self.nominal(name) / (counts[name] or 1.0) for name in sorted(self._used)}
        values = list(factors.values())
        if values and not all(math.isclose(value, values[0], rel_tol=1e-12) for value in values):
            raise ValueError(f"late denominators {factors}: got different factors; one gradient can be rescaled once")
        return values[0] if values else 1.0


def reduce(loss: Loss, batch: LossBatch, denominators: Denominators) -> dict[str, Tensor]:
    """Each term of this chunk as a scalar; their sum is what backward starts from."""
    denominators.add(loss.counts)
    return {name: _sum(term, batch) / denominators.nominal(term.denominator) for name, term in loss.terms.items()}


def _sum(term: Term, batch: LossBatch) -> Tensor:
    trained = _trained(term, batch)
    if trained is None:
        return (term.value * term.weight).sum()
    weight = term.weight
    if isinstance(weight, Tensor) and weight.dim():
        weight = torch.where(trained, weight, 0.0)
    return torch.where(trained, term.value * weight, 0.0).sum()


def _trained(term: Term, batch: LossBatch) -> Tensor | None:
    """Which positions count: trained tokens, rows that have one, every pair."""
    if term.per == "token":
        return batch.loss_mask
    if term.per == "row":
        return batch.sequence_sum(batch.loss_mask.to(term.value.dtype)) > 0
    return None
