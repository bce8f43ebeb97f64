# SPDX-License-Identifier: Apache-2.0
"""The `[guards]` table: the numbers of a step that show that training diverges, and what the run does about each.

Every guard is on from the start and only warns. Each has a class of its own, as its limits are of its own number.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.api.options import Options

GuardAction = Literal["off", "warn", "pause", "roll-back", "stop"]


class Guard(Options):
    """One number of each step, and the bounds outside of which it is evidence of divergence."""

    metric: ClassVar[str] = ""
    falls: ClassVar[bool] = False
    """The evidence is a number that is too small, and otherwise one that is too large."""

    action: GuardAction = "warn"
    """Once there is evidence in `steps` steps in a row: `warn`; `pause` until a person goes on (`relax continue`);
    `roll-back` to the last checkpoint, which is from before the evidence; `stop` with exit code 5; `off` looks at nothing."""
    limit: float | None = None
    """Evidence is a value beyond this; absent: no absolute bound."""
    ratio: PositiveFloat | None = None
    """Evidence is a value beyond so many times the median of the last `guards.window` steps; absent: no relative bound."""
    least: NonNegativeFloat = 0.0
    """Smallest distance from the median that counts for `ratio`."""
    steps: PositiveInt = 3
    """Steps in a row with evidence before the guard fires; it fires again only after a step without."""


class GradNormGuard(Guard):
    """The gradient explodes: `train/grad_norm`, before clipping, is too large."""

    metric: ClassVar[str] = "train/grad_norm"
    ratio: PositiveFloat | None = 50.0
    """Evidence is a norm of more than so many times the median of the last `guards.window` steps."""
    least: NonNegativeFloat = 1.0
    """Smallest distance from the median that counts for `ratio`."""


class ReferenceKlGuard(Guard):
    """The policy leaves its reference: `policy/ref_kl`, of algorithms that measure it, is too large."""

    metric: ClassVar[str] = "policy/ref_kl"
    limit: float | None = 10.0
    """Evidence is a KL a token above this."""


class RolloutKlGuard(Guard):
    """The policy leaves the one that sampled: `train/rollout_kl` is too large."""

    metric: ClassVar[str] = "train/rollout_kl"
    limit: float | None = 1.0
    """Evidence is a KL a token above this."""


class EntropyGuard(Guard):
    """The policy gives the same answer always: `policy/entropy`, of algorithms that measure it, is too small."""

    metric: ClassVar[str] = "policy/entropy"
    falls: ClassVar[bool] = True
    ratio: PositiveFloat | None = Field(0.1, le=1.0)
    """Evidence is an entropy below this share of the median of the last `guards.window` steps."""
    least: NonNegativeFloat = 0.2
    """Smallest distance from the median that counts for `ratio`."""


class RewardGuard(Guard):
    """The policy unlearns its task: `reward/mean` is too small."""

    metric: ClassVar[str] = "reward/mean"
    falls: ClassVar[bool] = True
    ratio: PositiveFloat | None = Field(0.25, le=1.0)
    """Evidence is a reward below this share of the median of the last `guards.window` steps; where the median is negative,
    one that is lower than it by as much."""
    least: NonNegativeFloat = 0.2
    """Smallest distance from the median that counts for `ratio`."""
    steps: PositiveInt = 5
    """Steps in a row with evidence before the guard fires; it fires again only after a step without."""


class MismatchGuard(Guard):
    """Engine and trainer disagree on the same tokens: `train/rollout_log_prob_diff_lag0` is too large."""

    metric: ClassVar[str] = "train/rollout_log_prob_diff_lag0"
    limit: float | None = 0.5
    """Evidence is a mean difference of log-probs above this."""


class LengthGuard(Guard):
    """Answers grow without end: `length/mean` is too large."""

    metric: ClassVar[str] = "length/mean"
    ratio: PositiveFloat | None = 8.0
    """Evidence is a mean of more than so many times the median of the last `guards.window` steps."""
    least: NonNegativeFloat = 64.0
    """Smallest distance from the median that counts for `ratio`, in tokens."""


class NotFiniteGuard(Guard):
    """An update was NaN or infinite and was skipped: `train/skipped_updates` is above 0. What becomes of the update itself is
    decided by `optimizer.not_finite`, whatever stands here."""

    metric: ClassVar[str] = "train/skipped_updates"
    limit: float | None = 0.0
    """Evidence is a number of skipped updates above this."""
    steps: PositiveInt = 1
    """Steps in a row with evidence before the guard fires; it fires again only after a step without."""


class GuardsTable(Options):
    """Guards against divergence: each looks at a number of every step before its weights reach any engine. The evidence is
    saved in `guards/` of the run."""

    window: PositiveInt = Field(20, ge=4)
    """Steps of the running median, and of the metrics that are saved as evidence. Until half of them are over, only absolute
    bounds count."""
    rollbacks: NonNegativeInt = 2
    """Times that guards roll the run back before they stop it. The run has all of them again once it got `window` steps
    beyond the step that it was last rolled back from."""
    pause_timeout_s: PositiveFloat = 259200.0
    """Longest time that a guard holds the run for a person; then it stops it. Default: three days."""
    grad_norm: GradNormGuard = GradNormGuard()
    """Gradient norm."""
    ref_kl: ReferenceKlGuard = ReferenceKlGuard()
    """KL to the reference."""
    rollout_kl: RolloutKlGuard = RolloutKlGuard()
    """KL to the policy that sampled."""
    entropy: EntropyGuard = EntropyGuard()
    """Entropy."""
    reward: RewardGuard = RewardGuard()
    """Reward."""
    mismatch: MismatchGuard = MismatchGuard()
    """Difference of engine and trainer."""
    length: LengthGuard = LengthGuard()
    """Length of answers."""
    not_finite: NotFiniteGuard = NotFiniteGuard()
    """Updates that are not finite."""

    def chosen(self) -> dict[str, Guard]:
        """The guards that are on, by name."""
        guards = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: guard for name, guard in guards.items() if isinstance(guard, Guard) and guard.action != "off"}
