# SPDX-License-Identifier: Apache-2.0
"""Options of distillation. Options that contradict or have no effect are refused before the run starts."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from relax_core.learn.policy_gradient import ClippedOptions

OF_SAMPLES = (
    "advantages", "clip_low", "clip_high", "dual_clip", "correction", "correction_level", "correction_cap", "correction_floor",
    "sequence_mask_delta", "reward_kl_coef",
)  # fmt: skip
"""Options of the policy gradient; they have an effect only if the loss depends on which token was sampled."""


class DistillationOptions(ClippedOptions):
    """Options of `distillation`. By default, a token's advantage is log(teacher's probability / policy's)."""

    mode: Literal["advantage", "loss"] = "advantage"
    """Use of the divergence between policy and teacher. `advantage`: the term of each sampled token is the token's
    advantage in a policy gradient; `loss`: the divergence is the loss, differentiated through the policy."""
    tokens: Literal["sampled", "student-top-k", "teacher-top-k"] = "sampled"
    """Tokens that policy and teacher are compared on, at each position. `sampled`: the sampled token; `student-top-k`:
    the policy's `k` likeliest tokens near the time of sampling; `teacher-top-k`: the teacher's `k` likeliest tokens.
    The last two need `mode = "loss"`."""
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    """Divergence to minimise. `reverse`: KL(policy || teacher), which seeks one mode of the teacher; `forward`:
    KL(teacher || policy), which covers all modes; `jsd`: the generalised Jensen-Shannon divergence."""
    beta: float = Field(0.5, gt=0.0, lt=1.0)
    """For `jsd`: weight of the teacher in the mixture; near 0 the divergence behaves like `forward`, near 1 like
    `reverse`."""
    k: int = Field(16, ge=1)
    """For `student-top-k` and `teacher-top-k`: number of tokens compared at each position."""
    rest: Literal["bucket", "renormalise"] = "bucket"
    """For `student-top-k` and `teacher-top-k`: treatment of all tokens beyond `k`. `bucket`: they count as one more
    token; `renormalise`: they are left out, and the `k` probabilities are scaled to sum to 1."""
    coef: float = Field(1.0, gt=0.0)
    """Weight of the teacher's term in the advantage or the loss."""
    reward_coef: float = Field(0.0, ge=0.0)
    """Weight of the rewards, which are added as an advantage like GRPO's. 0: rewards are not needed, and configured
    rewards are only logged."""
    correction: Literal["truncate", "mask", "reject", "behaviour", "none"] = "behaviour"
    """As in `grpo`. With `mode = "loss"` and `tokens = "sampled"`, the default is `truncate`, and `behaviour` is refused:
    that loss has no ratio."""
    discount: float = Field(0.0, ge=0.0, le=1.0)
    """For `mode = "advantage"`: discount factor per token for the teacher's terms of later tokens. 0: a token's
    advantage is its own term; 1: the sum of all terms from the token on."""

    @property
    def samples(self) -> bool:
        """True if the loss depends on which token was sampled."""
        return self.mode == "advantage" or self.tokens == "sampled" or self.reward_coef > 0

    @model_validator(mode="before")
    @classmethod
    def _losses_of_sampled_tokens_are_weighed(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("mode") == "loss" and given.get("tokens", "sampled") == "sampled":
            return {"correction": "truncate", **given}
        return given

    @model_validator(mode="after")
    def _nothing_contradicts(self) -> Self:
        if self.mode == "advantage" and self.tokens != "sampled":
            raise ValueError(
                f'tokens: got "{self.tokens}" with mode = "advantage"; a divergence over several tokens does not depend on '
                'the sampled token, so as an advantage it has no effect: set mode = "loss", or tokens = "sampled"'
            )
        if self.mode == "loss" and self.tokens == "sampled" and self.divergence == "jsd":
            raise ValueError(
                'divergence: got "jsd" with mode = "loss" and tokens = "sampled"; jsd has no estimate from one token:  '
                'set mode = "advantage", or tokens = "student-top-k"'
            )
        if self.discount and (self.mode, self.divergence) != ("advantage", "reverse"):
            raise ValueError(
                f'discount: got {self.discount}; set it to 0, or use mode = "advantage" and divergence = "reverse", whose '
                "log-ratios may be summed"
            )
        return self._every_one_acts()

    def _every_one_acts(self) -> Self:
        idle = {name: 'tokens = "sampled"' for name in ("k", "rest") if self.tokens == "sampled"}
        idle |= {"beta": f'divergence = "{self.divergence}"'} if self.divergence != "jsd" else {}
        idle |= dict.fromkeys(() if self.samples else OF_SAMPLES, f'mode = "loss" and tokens = "{self.tokens}"')
        idle |= {} if self.reward_coef else {"reward_kl_coef": "reward_coef = 0"}
        if self.mode == "loss" and self.tokens == "sampled":
            where = 'mode = "loss" and tokens = "sampled"'
            if self.correction == "behaviour":
                raise ValueError(f'correction: got "behaviour" with {where}, a loss without a ratio; use "truncate"')
            if not self.reward_coef:
                idle |= dict.fromkeys(("advantages", "clip_low", "clip_high", "dual_clip"), f"{where}, reward_coef = 0")
        for name, where in idle.items():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}: got {getattr(self, name)} with {where}; it has no effect there, leave it out"
                )
        return self
