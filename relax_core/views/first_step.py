# SPDX-License-Identifier: Apache-2.0
"""Checks of a run's set-up by its first step: engine, trainer and reference see the same tokens alike, and there is something
to learn.

It is made from the metrics of step 1 alone. Before any update all of them have the same weights, so what differs then is a
mistake and not learning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MEAN = "train/rollout_log_prob_diff_lag0"
"""Mean |log-prob difference| of engine and trainer, over tokens without lag: the difference of others is learning."""
FAR = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
"""A difference several times beyond any that was measured of sound runs, by the coarser format of the two."""
MOST_FAILED = 0.5
"""Share of the samples without a verdict from which on a step is odd."""


@dataclass(frozen=True, slots=True)
class FirstStepCheck:
    """One thing that has to be so in the first step."""

    name: str
    is_so: bool
    found: str
    """What was measured."""
    advice: str = ""
    """What to look at where it is not so."""


def far_apart(config: Mapping[str, Any]) -> float:
    """Return the largest |log-prob difference| that the number formats of a run explain."""
    own = str(config.get("model", {}).get("dtype") or "float32")
    engine = str(config.get("rollout", {}).get("dtype") or own)
    return max(FAR[own], FAR[engine])


def first_step_checks(metrics: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[FirstStepCheck, ...]:
    """Judge the metrics of step 1; a check whose metric the run does not have is left out."""
    return tuple(_checks(metrics, config, far_apart(config)))


def _checks(metrics: Mapping[str, Any], config: Mapping[str, Any], limit: float) -> Iterator[FirstStepCheck]:
    if (apart := metrics.get(MEAN)) is not None:
        weights = "do they have the same weights, tokens, temperature and top_p?"
        yield FirstStepCheck("engine and trainer agree", apart <= limit, f"|log-prob difference| {apart:.1e}", weights)
    updates = config.get("batch", {}).get("updates_per_step", 1)
    if updates == 1 and (ratio := metrics.get("policy/ratio_max")) is not None:
        most = math.exp(max(limit, float(metrics.get("train/rollout_log_prob_diff_max", 0.0))))
        what = "a policy that has not moved has ratio 1: is there dropout, or does the loss change its log-probs?"
        yield FirstStepCheck("the ratio is 1", ratio <= most, f"at most {ratio:.4g}", what)
    if (divergence := metrics.get("policy/ref_kl")) is not None:
        what = "at the start both are the model's folder: is that the folder the reference loads?"
        yield FirstStepCheck("policy and reference agree", divergence <= limit, f"KL {divergence:.1e}", what)
    if (tokens := metrics.get("tokens/trained")) is not None:
        what = "every token is masked: do samples have tokens that the policy sampled?"
        yield FirstStepCheck("tokens are trained", tokens > 0, f"{tokens:.0f}", what)
    if (spread := metrics.get("reward/std")) is not None:
        what = "all samples earn the same: is the task too hard, too easy, or does the reward not read the answers?"
        mean = metrics.get("reward/mean", math.nan)
        yield FirstStepCheck("rewards differ", spread > 0, f"mean {mean:.3g}, spread {spread:.3g}", what)
    if (norm := metrics.get("train/grad_norm")) is not None:
        flat, trained = metrics.get("samples/no_gradient", 0.0), metrics.get("samples/trained", 0.0)
        skipped = metrics.get("train/skipped_updates", 0.0)
        what = f"{flat:.0f} of {trained:.0f} samples teach nothing, as all of their group earn the same"
        if skipped:
            what = "the update was not finite and was skipped: look at the number formats, the rate and the losses"
        yield FirstStepCheck(
            "the gradient is finite and not 0", 0 < norm < math.inf and not skipped, f"norm {norm:.3g}", what
        )
    issued = metrics.get("samples/issued", 0.0)
    failed = metrics.get("samples/dropped/failed", 0.0)
    if issued:
        what = "their outcomes and errors are in `samples/` of the run directory"
        yield FirstStepCheck(
            "samples are judged", failed <= MOST_FAILED * issued, f"{failed:.0f} of {issued:.0f} failed", what
        )


def first_step_lines(checks: tuple[FirstStepCheck, ...]) -> list[str]:
    """Tell what was found in a line, and what is not as it has to be in one line each."""
    if not checks:
        return []
    well = ", ".join(f"{check.name} ({check.found})" for check in checks if check.is_so)
    odd = [f"step 1: not so that {check.name}: {check.found}; {check.advice}" for check in checks if not check.is_so]
    return ([f"step 1: {well}"] if well else []) + odd
