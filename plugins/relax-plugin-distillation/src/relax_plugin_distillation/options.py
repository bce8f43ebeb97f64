# SPDX-License-Identifier: Apache-2.0
"""Options of distillation, and which of them contradict each other: refused with the reason, before anything starts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from relax_core.learn.policy_gradient import ClippedOptions

OF_SAMPLES = (
    "advantages", "clip_low", "clip_high", "dual_clip", "correction", "correction_level", "correction_cap", "correction_floor",
    "sequence_mask_delta", "reward_kl_coef",
)  # fmt: skip
"""Options of a policy gradient: they act where what is learnt depends on which token was sampled."""


class DistillationOptions(ClippedOptions):
    """As default the cheapest that works: the teacher's log-ratio of each sampled token is that token's advantage."""

    mode: Literal["advantage", "loss"] = "advantage"
    """`advantage`: what the teacher thinks of a sampled token is credit in a policy gradient, as a reward is; `loss`: the
    divergence itself is the loss, differentiated through the policy's distribution."""
    tokens: Literal["sampled", "student-top-k", "teacher-top-k"] = "sampled"
    """Where both distributions are looked at: the sampled token alone; the policy's `k` likeliest ones, about as they were
    when it sampled; or the teacher's. Those of several tokens need `mode = "loss"`."""
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    """`reverse`: KL from the policy to the teacher, which seeks a mode of the teacher; `forward`: from the teacher to the
    policy, which covers it; `jsd`: the generalised Jensen-Shannon divergence between them."""
    beta: float = Field(0.5, gt=0.0, lt=1.0)
    """jsd: weight of the teacher in the mixture; near 0 it goes as `forward`, near 1 as `reverse`."""
    k: int = Field(16, ge=1)
    """Tokens looked at in each position, with top-k."""
    rest: Literal["bucket", "renormalise"] = "bucket"
    """With top-k: all other tokens are one more outcome, or both distributions are those given the k tokens."""
    coef: float = Field(1.0, gt=0.0)
    """Weight of the teacher."""
    reward_coef: float = Field(0.0, ge=0.0)
    """Weight of the rewards beside it, as GRPO's advantage; 0 needs no rewards, and those there are only measured."""
    discount: float = Field(0.0, ge=0.0, le=1.0)
    """advantage: how much of what the teacher thinks of later tokens counts for a token: 0 each alone, 1 all that follow."""
    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    """Lower bound of the ratio is 1 - clip_low; with one update a step the ratio is 1."""
    clip_high: float = Field(0.2, gt=0.0)
    """Upper bound of the ratio is 1 + clip_high."""

    @property
    def samples(self) -> bool:
        """True where what is learnt depends on which token was sampled."""
        return self.mode == "advantage" or self.tokens == "sampled" or self.reward_coef > 0

    @model_validator(mode="after")
    def _nothing_contradicts(self) -> Self:
        if self.mode == "advantage" and self.tokens != "sampled":
            raise ValueError(
                f'tokens: got "{self.tokens}" with mode = "advantage"; a divergence over tokens is the same whichever was '
                'sampled, so as its advantage it teaches nothing: set mode = "loss", or tokens = "sampled"'
            )
        if self.mode == "loss" and self.tokens == "sampled" and self.divergence == "jsd":
            raise ValueError(
                'divergence: got "jsd" of sampled tokens as a loss; one token\'s probability has no such loss: set '
                'mode = "advantage", or tokens = "student-top-k"'
            )
        if self.discount and (self.mode, self.divergence) != ("advantage", "reverse"):
            raise ValueError(
                f'discount: got {self.discount}; only the log-ratios of mode = "advantage" with divergence = "reverse" add up'
            )
        if self.mode == "loss" and self.aggregation == "trajectory":
            raise ValueError('aggregation: got "trajectory" with mode = "loss"; only advantages have it')
        return self._every_one_acts()

    def _every_one_acts(self) -> Self:
        idle = {name: 'tokens = "sampled"' for name in ("k", "rest") if self.tokens == "sampled"}
        idle |= {"beta": f'divergence = "{self.divergence}"'} if self.divergence != "jsd" else {}
        idle |= dict.fromkeys(() if self.samples else OF_SAMPLES, f'mode = "loss" and tokens = "{self.tokens}"')
        idle |= {} if self.reward_coef else {"reward_kl_coef": "reward_coef = 0"}
        for name, where in idle.items():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}: got {getattr(self, name)} with {where}; it has no effect there, leave it out"
                )
        return self
