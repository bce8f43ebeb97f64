# SPDX-License-Identifier: Apache-2.0
"""Group Relative Policy Optimization (Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1).

    J = E[ 1/G sum_i 1/|o_i| sum_t min(r_it A_i, clip(r_it, 1 - e, 1 + e) A_i) - beta D_KL ]        (eq. 3)
    A_i = (R_i - mean(R)) / std(R)                                                        (section 4.1.2)

D_KL is estimated by k3 (eq. 4), beta is `kl_coef`, and r is the policy over the one that starts the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from relax_core import learn
from relax_core.api import CONTEXTS, STEP_REWARDS, TURNS, Column, Groups, LossBatch, PolicyOutputs
from relax_core.learn.counts import Aggregation
from relax_core.learn.policy_gradient import ClippedOptions, PolicyGradient, Surrogate, clipped_ratio

if TYPE_CHECKING:
    from torch import Tensor


class GRPOOptions(ClippedOptions):
    """The paper's setting, apart from `kl_coef` (0.04 there, with a reference model in memory) and the correction."""

    normalise: Literal["std", "none"] = "std"
    """Divide the advantage by the standard deviation of the group's rewards, or only take off their mean."""
    credit_by: Literal["sample", "context"] = "sample"
    """Compare the rewards of whole samples; or what each named context of a sample earned (an agent of several, a sub-agent)
    with what contexts of that name earned in the group's other samples. A reward that was given for no context is that of the
    last turn's."""
    aggregation: Aggregation = "sequence"
    """Mean over each sequence, then over sequences (`sequence`, the paper); over all tokens (`token`); the sum over each
    sequence, mean over sequences (`sum`), or that by `fixed_length` tokens (`fixed`); over the tokens of a sample's rows
    together (`trajectory`)."""

    @model_validator(mode="after")
    def _divergence_has_a_place(self) -> Self:
        if self.credit_by == "context" and self.reward_kl_coef:
            got = f'reward_kl_coef: got {self.reward_kl_coef} with credit_by = "context"'
            raise ValueError(f"{got}; it is taken off whole samples' rewards, so use kl_coef")
        return self


class GRPO(PolicyGradient[GRPOOptions]):
    """No critic: a sample's advantage is how its reward compares with those of the same prompt."""

    paper = "arXiv 2402.03300"
    min_group_size = 2

    def advantage_columns(self) -> frozenset[Column]:
        of_contexts = {TURNS, CONTEXTS, STEP_REWARDS} if self.options.credit_by == "context" else set()
        return super().advantage_columns() | of_contexts

    def credit(self, groups: Groups) -> Tensor:
        """Outcome supervision: one advantage for every token of the sample, or of its context."""
        if self.options.credit_by == "context":
            std = self.options.normalise == "std"
            return learn.of_turns(learn.context_credit(groups.step_rewards, groups.contexts, groups.valid, std), groups)
        normalised = learn.group_mean_std if self.options.normalise == "std" else learn.group_mean
        return normalised(groups.rewards, groups.valid)

    def surrogate(self, batch: LossBatch, policy: PolicyOutputs, anchor: Tensor) -> Surrogate:
        """Eq. 3: the clipped surrogate of each token; the divergence of eq. 4 is the option's k3."""
        ratio = learn.log_ratio(batch, policy.log_probs, anchor).exp()
        return clipped_ratio(self.options, ratio, batch.advantages)
