# SPDX-License-Identifier: Apache-2.0
"""The `[guards]` table: metrics of a step that show that training diverges, and the run's reaction to each metric.

By default every guard is on and only warns. Each guard has its own class, with default bounds for its metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.api.options import Options

GuardAction = Literal["off", "warn", "pause", "roll-back", "stop"]


class Guard(Options):
    """A metric of each step, and the bounds beyond which its value is evidence of divergence."""

    metric: ClassVar[str] = ""
    falls: ClassVar[bool] = False
    """True: small values are evidence of divergence. False: large values are."""

    action: GuardAction = "warn"
    """Reaction to evidence in `steps` steps in a row: `warn`; `pause` until a person runs `relax continue`; `roll-back`
    to the last checkpoint, which is older than the evidence; `stop` with exit code 5; `off`: do not check the
    metric."""
    limit: float | None = None
    """Absolute bound; a value of the metric beyond this bound is evidence. Absent: no absolute bound."""
    ratio: PositiveFloat | None = None
    """Relative bound; a value beyond this many times the metric's median over the last `guards.window` steps is
    evidence. Absent: no relative bound."""
    least: NonNegativeFloat = 0.0
    """Smallest difference from the median that counts as evidence under `ratio`."""
    steps: PositiveInt = 3
    """Steps in a row with evidence before the guard fires; it fires again only after a step without evidence."""

    def read(self, metrics: Mapping[str, float]) -> tuple[str, float | None]:
        """Return the name of the metric to judge in a step, and its value; None if the step did not measure it."""
        return self.metric, metrics.get(self.metric)


class GradNormGuard(Guard):
    """The gradient explodes: `train/grad_norm`, before clipping, is too large."""

    metric: ClassVar[str] = "train/grad_norm"
    ratio: PositiveFloat | None = 50.0
    """A norm above this many times the median of the last `guards.window` steps is evidence of divergence."""
    least: NonNegativeFloat = 1.0
    """Smallest difference from the median that counts as evidence under `ratio`."""


class ReferenceKlGuard(Guard):
    """The policy leaves its reference model: `policy/ref_kl` is too large, in algorithms that measure it."""

    metric: ClassVar[str] = "policy/ref_kl"
    limit: float | None = 10.0
    """A KL per token above this bound is evidence of divergence."""


class RolloutKlGuard(Guard):
    """The trained policy leaves the policy that sampled: `train/rollout_kl` is too large."""

    metric: ClassVar[str] = "train/rollout_kl"
    limit: float | None = 1.0
    """A KL per token above this bound is evidence of divergence."""


class EntropyGuard(Guard):
    """The policy repeats one answer: `policy/entropy` falls below its limit. Inactive if the trainer reports no entropy."""

    metric: ClassVar[str] = "policy/entropy"
    falls: ClassVar[bool] = True
    ratio: PositiveFloat | None = Field(0.1, le=1.0)
    """An entropy below this share of the median of the last `guards.window` steps is evidence of divergence."""
    least: NonNegativeFloat = 0.2
    """Smallest difference from the median that counts as evidence under `ratio`."""


class RewardGuard(Guard):
    """The policy unlearns its task: `reward/mean` is too small."""

    metric: ClassVar[str] = "reward/mean"
    falls: ClassVar[bool] = True
    ratio: PositiveFloat | None = Field(0.25, le=1.0)
    """A reward below this share of the median of the last `guards.window` steps is evidence. For a negative median, the
    bound is (2 - ratio) times the median, equally far below it."""
    least: NonNegativeFloat = 0.2
    """Smallest difference from the median that counts as evidence under `ratio`."""
    steps: PositiveInt = 5
    """Steps in a row with evidence before the guard fires; it fires again only after a step without evidence."""


class MismatchGuard(Guard):
    """Engine and trainer disagree on the same tokens: `train/rollout_log_prob_diff_lag0` is too large.

    In a step whose tokens all have lag, `train/rollout_log_prob_diff` is judged, which includes what the policy learnt
    meanwhile.
    """

    metric: ClassVar[str] = "train/rollout_log_prob_diff_lag0"
    with_lag: ClassVar[str] = "train/rollout_log_prob_diff"
    """Metric for a step without tokens of lag 0."""
    limit: float | None = 0.5
    """A mean difference of log-probs above this bound is evidence of divergence."""

    def read(self, metrics: Mapping[str, float]) -> tuple[str, float | None]:
        name = self.metric if self.metric in metrics else self.with_lag
        return name, metrics.get(name)


class LengthGuard(Guard):
    """Answers keep growing: `length/mean` is too large."""

    metric: ClassVar[str] = "length/mean"
    ratio: PositiveFloat | None = 8.0
    """A mean length above this many times the median of the last `guards.window` steps is evidence."""
    least: NonNegativeFloat = 64.0
    """Smallest difference from the median that counts as evidence under `ratio`, in tokens."""


class NotFiniteGuard(Guard):
    """An update was NaN or infinite and was skipped: `train/skipped_updates` is above 0."""

    metric: ClassVar[str] = "train/skipped_updates"
    limit: float | None = 0.0
    """More skipped updates than this are evidence; `optimizer.not_finite` alone decides whether to skip an update."""
    steps: PositiveInt = 1
    """Steps in a row with evidence before the guard fires; it fires again only after a step without evidence."""


class GuardsTable(Options):
    """Guards against divergence; each checks a metric of every step before the step's weights reach any engine."""

    first_step: Literal["off", "warn", "stop"] = "warn"
    """Reaction to a failed check of step 1: `warn`; `stop` with exit code 5; `off`: do not check."""
    window: PositiveInt = Field(20, ge=4)
    """Number of steps of the running median, and of the metrics that a guard saves as evidence in `guards/` of the run.
    Until half of these steps are over, only absolute bounds apply."""
    rollbacks: NonNegativeInt = 2
    """Number of rollbacks by guards; instead of a further rollback, the run stops. The count starts anew when the run
    is `window` steps beyond the step of the last rollback."""
    pause_timeout_s: PositiveFloat = 259200.0
    """Seconds that a paused run waits for a person before the run stops; the default is three days."""
    grad_norm: GradNormGuard = GradNormGuard()
    """Guard on the gradient norm."""
    ref_kl: ReferenceKlGuard = ReferenceKlGuard()
    """Guard on the KL to the reference model."""
    rollout_kl: RolloutKlGuard = RolloutKlGuard()
    """Guard on the KL to the policy that sampled."""
    entropy: EntropyGuard = EntropyGuard()
    """Guard on the policy's entropy."""
    reward: RewardGuard = RewardGuard()
    """Guard on the mean reward."""
    mismatch: MismatchGuard = MismatchGuard()
    """Guard on the difference between engine and trainer."""
    length: LengthGuard = LengthGuard()
    """Guard on the mean length of answers."""
    not_finite: NotFiniteGuard = NotFiniteGuard()
    """Guard on updates that are not finite."""

    def chosen(self) -> dict[str, Guard]:
        """Return the guards that are on, by name."""
        guards = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: guard for name, guard in guards.items() if isinstance(guard, Guard) and guard.action != "off"}
