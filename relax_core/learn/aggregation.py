# SPDX-License-Identifier: Apache-2.0
"""From a loss value for every token to one number: terms, the global counts they are divided by, and their sum.

`aggregate` says which tokens weigh how much and divides nothing; `reduce` divides by counts of the whole update. A count
may be known late: chunks are then divided by a nominal one, and the whole gradient is rescaled once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from relax_core.api.algorithm import Groups, Loss, LossBatch, Term

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token", "sequence", "sum", "fixed", "trajectory"]
DENOMINATOR: dict[Aggregation, str] = {
    "token": "tokens", "sequence": "rows", "sum": "rows", "fixed": "rows", "trajectory": "samples",
}  # fmt: skip
"""The global count that each way divides by; one alone, so that a step may be trained while it is generated."""


def aggregate(batch: LossBatch, values: Tensor, how: Aggregation, weight: float = 1.0, fixed_length: int = 1) -> Term:
    """Make a term of `values` [tokens], by `how`. `token`: mean over all tokens (DAPO). `sequence`: over each row's tokens,
    then over rows (GRPO). `sum`: the sum over each row's tokens, mean over rows (REINFORCE). `fixed`: that, by
    `fixed_length` tokens (Dr.GRPO's constant). `trajectory`: mean over samples of what `per_trajectory` has divided by
    their tokens."""
    if how == "sequence":
        return Term(batch.sequence_mean(values), weight, DENOMINATOR[how], per="row")
    return Term(values, weight / fixed_length if how == "fixed" else weight, DENOMINATOR[how])


def per_trajectory(advantages: Tensor, groups: Groups) -> Tensor:
    """Divide advantages, [groups, samples] or [tokens], by the trained tokens of their whole sample, so that one with several
    rows (branches, compacted contexts) weighs as much as one with a single row. Every surrogate here is linear in a positive
    factor of them."""
    lengths = groups.lengths.clamp(min=1)
    if advantages.shape == groups.rewards.shape:
        return advantages / lengths
    if groups.row_sample is None or groups.row_lengths is None:
        raise ValueError("per_trajectory: advantages of tokens need row_sample and row_lengths of the groups")
    return advantages / lengths.reshape(-1)[groups.row_sample].repeat_interleave(groups.row_lengths)


class Denominators:
    """The counts of one update: nominal at its start, true at its end.

    Invariants:
    - a term is divided by the nominal count; a denominator that only the algorithm counts is 1 until the end;
    - one gradient buffer can be rescaled once, so all denominators that terms used must share one factor.
    """

    def __init__(self, given: Mapping[str, float]) -> None:
        self._given = dict(given)
        self._own: dict[str, float] = {}
        self._used: set[str] = set()

    def nominal(self, name: str) -> float:
        """The count that a term is divided by now."""
        self._used.add(name)
        if name not in self._given and name not in self._own:
            raise ValueError(
                f"denominator {name!r}: neither given ({', '.join(self._given)}) nor counted in Loss.counts"
            )
        return self._given.get(name, 1.0) or 1.0

    def add(self, counts: Mapping[str, Tensor]) -> None:
        """Add a chunk's share of the algorithm's own denominators."""
        for name, share in counts.items():
            self._own[name] = self._own.get(name, 0.0) + float(share)

    def share(self) -> dict[str, Any]:
        """This rank's counts as plain data for `join`."""
        return {"own": self._own, "used": sorted(self._used)}

    def join(self, shares: Sequence[Mapping[str, Any]]) -> None:
        """Replace this rank's counts by the sums over all ranks, this one included."""
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
    """Each term of this chunk as a scalar, `sum(value * weight over trained positions) / denominator`; backward starts from
    their sum."""
    denominators.add(loss.counts)
    return {name: _sum(term, batch) / denominators.nominal(term.denominator) for name, term in loss.terms.items()}


def _sum(term: Term, batch: LossBatch) -> Tensor:
    import torch  # here, since whoever only plans an update imports this module without torch

    if term.per == "token":
        trained = batch.loss_mask
    elif term.per == "row":
        trained = batch.sequence_sum(batch.loss_mask.to(term.value.dtype)) > 0
    else:  # every pair counts
        return (term.value * term.weight).sum()
    weight = term.weight
    if isinstance(weight, torch.Tensor) and weight.dim():
        weight = torch.where(trained, weight, 0.0)
    return torch.where(trained, term.value * weight, 0.0).sum()
