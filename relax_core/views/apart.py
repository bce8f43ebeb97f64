# SPDX-License-Identifier: Apache-2.0
"""How far a run's engine and trainer are apart on the same tokens, and whether their number formats explain it. Reads only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.views.run import RunView

MEAN = "train/rollout_log_prob_diff_lag0"
"""Over tokens without lag: between others lies learning."""
FAR = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
"""Mean |difference| beyond any that was measured of sound runs, several times over, by the coarser format of the two."""
STEPS = 10
TOP_P = "rollout.top_p is below 1, which the trainer does not know"


def formats(config: Mapping[str, Any]) -> tuple[str, str]:
    """The trainer's and the engine's."""
    own = str(config.get("model", {}).get("dtype") or "float32")
    return own, str(config.get("rollout", {}).get("dtype") or own)


def apart(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean of the last steps that tell it."""
    told = [float(step[MEAN]) for step in steps if step.get(MEAN) is not None][-STEPS:]
    return sum(told) / len(told) if told else None


def warning(run: RunView) -> str:
    """In a sentence; empty where nothing is odd."""
    found = apart(run.metrics())
    if found is None:
        return ""
    own, engine = formats(run.config)
    limit = max(FAR[own], FAR[engine])
    if found <= limit:
        return ""
    cut = float(run.config.get("rollout", {}).get("top_p") or 1.0) < 1.0
    cause = TOP_P if cut else "do they have the same weights, tokens and temperature?"
    return (
        f"engine and trainer are {found:.2g} apart (mean |log-prob difference| without lag), more than {limit:g}: {engine} and "
        f"{own} alone do not do that; {cause}"
    )
