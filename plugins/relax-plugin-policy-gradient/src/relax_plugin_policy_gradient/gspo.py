# SPDX-License-Identifier: Apache-2.0
"""Group Sequence Policy Optimization (Zheng et al., GSPO, arXiv 2507.18071, section 4).

    J = E[ 1/G sum_i min(s_i A_i, clip(s_i, 1 - e_low, 1 + e_high) A_i) ]                           (eq. 5)
    s_i = (p(y_i | x) / p_old(y_i | x))^(1/|y_i|) = exp(1/|y_i| sum_t log(p_t / p_old_t))           (eq. 7)
    A_i = (r_i - mean(r)) / std(r)                                                                  (eq. 6)

Rewards belong to whole sequences, so GSPO clips whole sequences. The correction's weight is also one per sequence.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import ClippedOptions, ClippedPolicyGradient


class GSPOOptions(ClippedOptions):
    """Options of GSPO; the defaults are the paper's (section 5.1), except `correction`."""

    clip_low: float = Field(3e-4, gt=0.0, lt=1.0)
    """Distance of the lower bound of a sequence's ratio below 1; hundreds of times smaller than for tokens' ratios."""
    clip_high: float = Field(4e-4, gt=0.0)
    """Distance of the upper bound of a sequence's ratio above 1."""
    aggregation: Aggregation = "sequence"
    """Aggregation of the tokens' losses. `sequence`: mean over each sequence, then over sequences. `token`, `sum`,
    `fixed` and `trajectory` mean the same as in `grpo`."""
    correction_level: Literal["token", "sequence", "geometric"] = "geometric"
    """Level of the correction's weight. `geometric`: the geometric mean over a sequence's tokens, as for the ratio;
    `token`: each token's own weight; `sequence`: the product over a sequence's tokens."""


class GSPO(ClippedPolicyGradient[GSPOOptions]):
    """GRPO with one ratio s_i for each sequence.

    Each token of a sequence has the sequence's term of eq. 5, so that the mean over the tokens equals the term.
    """

    paper = "arXiv 2507.18071"
    ratio_level = "geometric"
