# SPDX-License-Identifier: Apache-2.0
"""From a value for every token to a term of the loss: which tokens weigh how much. It divides nothing: the trainer does.

The ways have the field's names in their documentation; an algorithm's paper says which one it means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_core.api.algorithm import Groups, LossBatch, Term

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token", "sequence", "sum", "fixed", "trajectory"]
DENOMINATOR: dict[Aggregation, str] = {
    "token": "tokens",
    "sequence": "rows",
    "sum": "rows",
    "fixed": "rows",
    "trajectory": "samples",
}
"""The global count that each way divides by; one alone, so that a step may be trained while it is generated."""


def aggregate(batch: LossBatch, values: Tensor, how: Aggregation, weight: float = 1.0, fixed_length: int = 1) -> Term:
    """`token`: mean over all tokens (DAPO). `sequence`: over each row's tokens, then over rows (GRPO). `sum`: the sum over
    each row's tokens, mean over rows (REINFORCE). `fixed`: that, by `fixed_length` tokens (Dr.GRPO's constant).
    `trajectory`: mean over samples of what `per_trajectory` has divided by their tokens."""
    if how == "sequence":
        return Term(batch.sequence_mean(values), weight, DENOMINATOR[how], per="row")
    return Term(values, weight / fixed_length if how == "fixed" else weight, DENOMINATOR[how])


def per_trajectory(advantages: Tensor, groups: Groups) -> Tensor:
    """Advantages divided by the trained tokens of their whole sample, so that one with several rows (branches, compacted
    contexts) weighs as much as one with a single row. Every surrogate here is linear in a positive factor of them."""
    lengths = groups.lengths.clamp(min=1)
    if advantages.shape == groups.rewards.shape:
        return advantages / lengths
    if groups.row_sample is None or groups.row_lengths is None:
        raise ValueError("per_trajectory: advantages of tokens need row_sample and row_lengths of the groups")
    return advantages / lengths.reshape(-1)[groups.row_sample].repeat_interleave(groups.row_lengths)
