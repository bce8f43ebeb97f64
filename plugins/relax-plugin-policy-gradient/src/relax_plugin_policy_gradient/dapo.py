# SPDX-License-Identifier: Apache-2.0
"""Decoupled Clip and Dynamic sAmpling Policy Optimization (Yu et al., DAPO, arXiv 2503.14476, section 3).

    J = E[ 1/(sum_i |o_i|) sum_i sum_t min(r_it A_i, clip(r_it, 1 - e_low, 1 + e_high) A_i) ]      (eq. 8)
    A_i = (R_i - mean(R)) / std(R),   R_i = reward + R_length(o_i)                                  (eq. 9 and 13)

The mean is over all tokens of the batch, as in the authors' code (eq. 12 is written for one prompt). This file does not
contain dynamic sampling, the constraint of eq. 11; for that, configure a filter of groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from relax_core import learn
from relax_core.api import Groups
from relax_core.learn.policy_gradient import ClippedOptions, ClippedPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class DAPOOptions(ClippedOptions):
    """Options of DAPO; defaults are the paper's (section 4.1), except `correction` and the overlong penalty's lengths."""

    clip_high: float = Field(0.28, gt=0.0)
    """Distance of the ratio's upper bound above 1; larger than clip_low, so that unlikely tokens can gain probability."""
    overlong_length: int = Field(0, ge=0)
    """Length of an answer in tokens at which the overlong penalty reaches -1 (16384 + 4096 in the paper); 0: none."""
    overlong_buffer: int = Field(0, ge=0)
    """Number of tokens before `overlong_length` over which the penalty falls from 0 to -1 (4096 in the paper)."""

    @model_validator(mode="after")
    def _buffer_belongs_to_length(self) -> Self:
        if not (self.overlong_length == self.overlong_buffer == 0 or 0 < self.overlong_buffer <= self.overlong_length):
            raise ValueError(
                f"overlong_buffer: got {self.overlong_buffer} with overlong_length = {self.overlong_length}; "
                "set it from 1 to overlong_length, or both to 0"
            )
        return self


class DAPO(ClippedPolicyGradient[DAPOOptions]):
    """GRPO with a larger upper bound of the ratio, a mean over tokens, and a soft overlong penalty."""

    paper = "arXiv 2503.14476"

    def credit(self, groups: Groups) -> Tensor:
        """Return A_i (eq. 9) of the rewards with the soft overlong penalty of eq. 13."""
        if self.options.overlong_length:
            penalty = learn.overlong_penalty(groups.lengths, self.options.overlong_length, self.options.overlong_buffer)
            groups = replace(groups, rewards=groups.rewards + penalty)
        return learn.group_mean_std(groups.rewards, groups.valid)
