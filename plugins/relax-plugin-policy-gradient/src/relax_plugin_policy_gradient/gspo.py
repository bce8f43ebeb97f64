# SPDX-License-Identifier: Apache-2.0
"""Group Sequence Policy Optimization (Zheng et al., GSPO, arXiv 2507.18071, section 4).

    J = E[ 1/G sum_i min(s_i A_i, clip(s_i, 1 - e_low, 1 + e_high) A_i) ]                           (eq. 5)
    s_i = (p(y_i | x) / p_old(y_i | x))^(1/|y_i|) = exp(1/|y_i| sum_t log(p_t / p_old_t))           (eq. 7)
    A_i = (r_i - mean(r)) / std(r)                                                                  (eq. 6)

Rewards belong to whole sequences, so GSPO clips whole sequences. The correction's weight is also one per sequence.

The paper's bounds are for p_old of the trainer itself, so p_old is the policy that starts the step. An engine that
rounds differently moves s_i by more than the bounds. With `correction = "behaviour"` and independent tokens, a KL of
3e-5 to the engine (bf16) leaves about 40 % of sequences of 48 tokens without a gradient; a KL of 1e-3 leaves 86 % of
those of 4096 tokens with a negative advantage without one, and 2 % of those with a positive one.
`policy/sequences_clipped_positive` and `policy/sequences_clipped_negative` show these shares.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import ClippedOptions, ClippedPolicyGradient


class GSPOOptions(ClippedOptions):
    """Options of GSPO; the defaults are the paper's (section 5.1), with a correction for the engine's rounding."""

    clip_low: float = Field(3e-4, gt=0.0, lt=1.0)
    """Distance of the lower bound of a sequence's ratio below 1; hundreds of times smaller than for tokens' ratios."""
    clip_high: float = Field(4e-4, gt=0.0)
    """Distance of the upper bound of a sequence's ratio above 1."""
    aggregation: Aggregation = "trajectory"
    """Aggregation of the tokens' losses. `trajectory`: mean over the tokens of all rows of a sample, then over samples.
    `sequence`, `token`, `sum` and `fixed` mean the same as in `grpo`."""
    correction: Literal["truncate", "mask", "reject", "behaviour", "none"] = "truncate"
    """Policy in the ratio's denominator. `behaviour`: the policy that sampled, which needs bounds wider than the
    difference of engine and trainer. All remaining values: the policy at the step's start. `truncate`, `mask` and
    `reject` then also weigh sequences by this policy's ratio to the policy that sampled; `none` does not."""
    correction_level: Literal["token", "sequence", "geometric"] = "geometric"
    """Level of the correction's weight. `geometric`: the geometric mean over a sequence's tokens, as for the ratio;
    `token`: each token's own weight; `sequence`: the product over a sequence's tokens."""


class GSPO(ClippedPolicyGradient[GSPOOptions]):
    """GRPO with one ratio s_i for each sequence.

    Each token of a sequence has the sequence's term of eq. 5, so that the mean over the tokens equals the term.
    """

    paper = "arXiv 2507.18071"
    ratio_level = "geometric"
