# SPDX-License-Identifier: Apache-2.0
"""Checks of a run's configuration by the metrics of its first step.

Before any update, engine, trainer and reference have the same weights, so a difference between them is a mistake of the
configuration. The checks also find a step without anything to learn from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MEAN = "train/rollout_log_prob_diff_lag0"
"""Metric of the mean |log-prob difference| of engine and trainer over tokens without lag, unaffected by learning."""
FAR = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
"""Largest mean |log-prob difference| that a number format explains: several times the largest in correct runs."""
MOST_FAILED = 0.5
"""Largest fraction of issued samples that may fail."""


@dataclass(frozen=True, slots=True)
class FirstStepCheck:
    """The result of one check of the first step."""

    name: str
    """Statement that must hold, such as `rewards differ`."""
    is_so: bool
    found: str
    """Measured value, as text."""
    advice: str = ""
    """Possible cause of a failed check."""


def far_apart(config: Mapping[str, Any]) -> float:
    """Return the largest |log-prob difference| that the number formats of a run explain."""
    own = str(config.get("model", {}).get("dtype") or "float32")
    engine = str(config.get("rollout", {}).get("dtype") or own)
    return max(FAR[own], FAR[engine])


def first_step_checks(metrics: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[FirstStepCheck, ...]:
    """Return the checks of step 1 for which the run has metrics."""
    return tuple(_checks(metrics, config, far_apart(config)))


def _checks(metrics: Mapping[str, Any], config: Mapping[str, Any], limit: float) -> Iterator[FirstStepCheck]:
    if (apart := metrics.get(MEAN)) is not None:
        weights = "check that both use the same weights, tokens, temperature and top_p"
        yield FirstStepCheck("engine and trainer agree", apart <= limit, f"|log-prob difference| {apart:.1e}", weights)
    updates = config.get("batch", {}).get("updates_per_step", 1)
    if updates == 1 and (ratio := metrics.get("policy/ratio_max")) is not None:
        most = math.exp(max(limit, float(metrics.get("train/rollout_log_prob_diff_max", 0.0))))
        what = "before an update the ratio must be 1; check for dropout, and for a loss that changes log-probs"
        yield FirstStepCheck("the ratio is 1", ratio <= most, f"at most {ratio:.4g}", what)
    if (divergence := metrics.get("policy/ref_kl")) is not None:
        what = "both must start from the model folder; check that the reference loads that folder"
        yield FirstStepCheck("policy and reference agree", divergence <= limit, f"KL {divergence:.1e}", what)
    if (tokens := metrics.get("tokens/trained")) is not None:
        what = "every token is masked; check that samples contain tokens sampled by the policy"
        yield FirstStepCheck("tokens are trained", tokens > 0, f"{tokens:.0f}", what)
    if (spread := metrics.get("reward/std")) is not None:
        what = (
            "all samples earn the same; check for tasks that are too hard or easy, and a reward that misreads answers"
        )
        mean = metrics.get("reward/mean", math.nan)
        yield FirstStepCheck("rewards differ", spread > 0, f"mean {mean:.3g}, spread {spread:.3g}", what)
    if (norm := metrics.get("train/grad_norm")) is not None:
        flat, trained = metrics.get("samples/no_gradient", 0.0), metrics.get("samples/trained", 0.0)
        skipped = metrics.get("train/skipped_updates", 0.0)
        what = f"{flat:.0f} of {trained:.0f} samples have no gradient, since their whole group earns the same reward"
        if skipped:
            what = "the update was not finite and was skipped; check the number formats, learning rate and losses"
        yield FirstStepCheck(
            "the gradient is finite and not 0", 0 < norm < math.inf and not skipped, f"norm {norm:.3g}", what
        )
    issued = metrics.get("samples/issued", 0.0)
    failed = metrics.get("samples/dropped/failed", 0.0)
    if issued:
        what = "see their outcomes and errors in `samples/` of the run directory"
        yield FirstStepCheck(
            "samples are judged", failed <= MOST_FAILED * issued, f"{failed:.0f} of {issued:.0f} failed", what
        )


def first_step_lines(checks: tuple[FirstStepCheck, ...]) -> list[str]:
    """Return one line with all passed checks, and one line for each failed check."""
    if not checks:
        return []
    well = ", ".join(f"{check.name} ({check.found})" for check in checks if check.is_so)
    odd = [f"step 1: check failed: {check.name}: {check.found}; {check.advice}" for check in checks if not check.is_so]
    return ([f"step 1: {well}"] if well else []) + odd
