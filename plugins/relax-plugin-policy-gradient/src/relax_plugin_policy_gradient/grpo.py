# SPDX-License-Identifier: Apache-2.0
"""Group Relative Policy Optimization (Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1).

    J = E[ 1/G sum_i 1/|o_i| sum_t min(r_it A_i, clip(r_it, 1 - e, 1 + e) A_i) - beta D_KL ]        (eq. 3)
    A_i = (R_i - mean(R)) / std(R)                                                        (section 4.1.2)

D_KL is estimated by k3 (eq. 4), beta is `kl_coef`, and r is the ratio of the policy to the policy that `correction` names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from relax_core import learn
from relax_core.api import CONTEXTS, STEP_REWARDS, TURNS, Column, Groups
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import ClippedOptions, ClippedPolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class GRPOOptions(ClippedOptions):
    """Options of GRPO; the defaults are the paper's, except `correction` and `kl_coef` (0.04 in the paper)."""

    normalise: Literal["std", "none"] = "std"
    """Normalisation of a group's rewards. `std`: subtract the mean, divide by the standard deviation; `none`: only
    subtract the mean."""
    credit_by: Literal["sample", "context"] = "sample"
    """Rewards to compare. `sample`: those of whole samples. `context`: those of a named context (one of several agents,
    a sub-agent) with those of the same context in the group's remaining samples. A reward for the whole sample, such as
    those of `[[rewards]]`, is compared with those of the group's remaining samples, and its difference from their mean is
    added to the credit of each context."""
    aggregation: Aggregation = "trajectory"
    """Aggregation of the tokens' losses. `trajectory` (the paper): mean over the tokens of all rows of a sample, then
    over samples; `sequence`: mean over each sequence (row), then over sequences, which is the same if every sample has
    one row; `token`: mean over all tokens; `sum`: sum over each sequence, then mean over sequences; `fixed`: as `sum`,
    divided by `fixed_length`."""

    @model_validator(mode="after")
    def _divergence_has_a_place(self) -> Self:
        if self.credit_by == "context" and self.reward_kl_coef:
            got = f'reward_kl_coef: got {self.reward_kl_coef} with credit_by = "context"'
            raise ValueError(f"{got}; it changes the rewards of whole samples only, so use kl_coef")
        return self


class GRPO(ClippedPolicyGradient[GRPOOptions]):
    """A policy gradient without a critic: the advantage compares a sample's reward with the rewards of its group."""

    paper = "arXiv 2402.03300"

    def advantage_columns(self) -> frozenset[Column]:
        of_contexts = {TURNS, CONTEXTS, STEP_REWARDS} if self.options.credit_by == "context" else set()
        return super().advantage_columns() | of_contexts

    def credit(self, groups: Groups) -> Tensor:
        """Return one advantage for all tokens of a sample, or of a context (outcome supervision)."""
        if self.options.credit_by == "context":
            std = self.options.normalise == "std"
            credit = learn.context_credit(
                groups.step_rewards, groups.contexts, groups.valid, std, sample_rewards=groups.sample_rewards
            )
            return learn.of_turns(credit, groups)
        normalised = learn.group_mean_std if self.options.normalise == "std" else learn.group_mean
        return normalised(groups.rewards, groups.valid)
