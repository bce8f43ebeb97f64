# SPDX-License-Identifier: Apache-2.0
"""The `[guards]` table: metrics of a step that show that training diverges, and the run's reaction to each.

By default every guard is on and only warns. Each guard has its own class because its limits apply to its own metric.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.api.options import Options

GuardAction = Literal["off", "warn", "pause", "roll-back", "stop"]


class Guard(Options):
    """A metric of each step, and the bounds beyond which its value is evidence of divergence."""

    metric: ClassVar[str] = ""
    falls: ClassVar[bool] = False
    """True if small values are evidence, False if large values are."""

    action: GuardAction = "warn"
    """Reaction to evidence in `steps` steps in a row: `warn`; `pause` until a person runs `relax continue`; `roll-back`
    to the last checkpoint, which is older than the evidence; `stop` with exit code 5; `off`: do not check the
    metric."""
    limit: float | None = None
    """A value beyond this is evidence; absent: no absolute bound."""
    ratio: PositiveFloat | None = None
    """A value beyond this many times the median of the last `guards.window` steps is evidence; absent: no relative
    bound."""
    least: NonNegativeFloat = 0.0
    """Smallest distance from the median at which `ratio` applies."""
    steps: PositiveInt = 3
    """Steps in a row with evidence before the guard fires; it fires again only after a step without evidence."""


class GradNormGuard(Guard):
    """The gradient explodes: `train/grad_norm`, before clipping, is too large."""

    metric: ClassVar[str] = "train/grad_norm"
    ratio: PositiveFloat | None = 50.0
    """A norm above this many times the median of the last `guards.window` steps is evidence."""
    least: NonNegativeFloat = 1.0
    """Smallest distance from the median at which `ratio` applies."""


class ReferenceKlGuard(Guard):
    """The policy leaves its reference model: `policy/ref_kl` is too large, in algorithms that measure it."""

    metric: ClassVar[str] = "policy/ref_kl"
    limit: float | None = 10.0
    """A KL per token above this is evidence."""


class RolloutKlGuard(Guard):
    """The trained policy leaves the policy that sampled: `train/rollout_kl` is too large."""

    metric: ClassVar[str] = "train/rollout_kl"
    limit: float | None = 1.0
    """A KL per token above this is evidence."""


class EntropyGuard(Guard):
    """The policy always gives the same answer: `policy/entropy` is too small, in algorithms that measure it."""

    metric: ClassVar[str] = "policy/entropy"
    falls: ClassVar[bool] = True
    ratio: PositiveFloat | None = Field(0.1, le=1.0)
    """An entropy below this share of the median of the last `guards.window` steps is evidence."""
    least: NonNegativeFloat = 0.2
    """Smallest distance from the median at which `ratio` applies."""


class RewardGuard(Guard):
    """The policy unlearns its task: `reward/mean` is too small."""

    metric: ClassVar[str] = "reward/mean"
    falls: ClassVar[bool] = True
    ratio: PositiveFloat | None = Field(0.25, le=1.0)
    """A reward below this share of the median of the last `guards.window` steps is evidence. For a negative median the
    bound is just as far below: at (2 - ratio) times the median."""
    least: NonNegativeFloat = 0.2
    """Smallest distance from the median at which `ratio` applies."""
    steps: PositiveInt = 5
    """Steps in a row with evidence before the guard fires; it fires again only after a step without evidence."""


class MismatchGuard(Guard):
    """Engine and trainer disagree on the same tokens: `train/rollout_log_prob_diff_lag0` is too large."""

    metric: ClassVar[str] = "train/rollout_log_prob_diff_lag0"
    limit: float | None = 0.5
    """A mean difference of log-probs above this is evidence."""


class LengthGuard(Guard):
    """Answers keep growing: `length/mean` is too large."""

    metric: ClassVar[str] = "length/mean"
    ratio: PositiveFloat | None = 8.0
    """A mean length above this many times the median of the last `guards.window` steps is evidence."""
    least: NonNegativeFloat = 64.0
    """Smallest distance from the median at which `ratio` applies, in tokens."""


class NotFiniteGuard(Guard):
    """An update was NaN or infinite and was skipped: `train/skipped_updates` is above 0."""

    metric: ClassVar[str] = "train/skipped_updates"
    limit: float | None = 0.0
    """More skipped updates than this are evidence. `optimizer.not_finite` alone decides if an update is skipped."""
    steps: PositiveInt = 1
    """Steps in a row with evidence before the guard fires; it fires again only after a step without evidence."""


class GuardsTable(Options):
    """Guards against divergence; each checks a metric of every step before the step's weights reach any engine."""

    window: PositiveInt = Field(20, ge=4)
    """Steps of the running median, and of the metrics that a guard saves as evidence in `guards/` of the run. Only
    absolute bounds apply until half of these steps are over."""
    rollbacks: NonNegativeInt = 2
    """Rollbacks by guards before the next one stops the run instead. The count starts anew when the run is `window`
    steps beyond the step of the last rollback."""
    pause_timeout_s: PositiveFloat = 259200.0
    """Seconds that a guard pauses the run for a person before the run stops; the default is three days."""
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
    """Difference between engine and trainer."""
    length: LengthGuard = LengthGuard()
    """Length of answers."""
    not_finite: NotFiniteGuard = NotFiniteGuard()
    """Updates that are not finite."""

    def chosen(self) -> dict[str, Guard]:
        """Return the guards that are on, by name."""
        guards = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: guard for name, guard in guards.items() if isinstance(guard, Guard) and guard.action != "off"}
