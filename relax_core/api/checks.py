# SPDX-License-Identifier: Apache-2.0
"""Checks of plugins: pure functions that take the facts of one stage of a run and yield findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from relax_core.api.plan import Plan

CheckState = Literal["ok", "warning", "failed", "not applicable"]
MISMATCH = "train/rollout_log_prob_diff_lag0"
"""Metric of the mean |log-prob difference| of engine and trainer over tokens without lag, unaffected by learning."""
FAR = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
"""Largest mean |log-prob difference| that a number format explains: several times the largest in correct runs."""


def far_apart(config: Mapping[str, Any]) -> float:
    """Return the largest |log-prob difference| that the number formats of a run explain."""
    own = str(config.get("model", {}).get("dtype") or "float32")
    engine = str(config.get("rollout", {}).get("dtype") or own)
    return max(FAR[own], FAR[engine])


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """The result of one check."""

    name: str
    """Statement that must hold, such as `rewards differ`."""
    state: CheckState
    """`warning`: not as in most runs, but it may be intended. `failed`: the run can't be right."""
    found: str
    """Measured value, or the reason why the check is not applicable, as text."""
    evidence: str = ""
    """Tokens, texts or samples that show the fault; empty if the check holds."""
    advice: str = ""
    """Possible cause of a fault, and what to do."""
    field: str = ""
    """Key of the configuration to change; empty: none in particular."""

    def plain(self) -> dict[str, str]:
        """Return the finding as it is recorded; an empty `field` is left out."""
        return {key: value for key, value in asdict(self).items() if value or key != "field"}


@dataclass(frozen=True, slots=True)
class PreflightFacts:
    """Facts that are known before a run starts; its model folder and its task files exist."""

    config: Mapping[str, Any]
    """The whole configuration as plain data, with every default; secrets are references."""
    plan: Plan
    """Roles, operations and worker groups of the run."""
    free_memory_bytes: int
    """Memory of this machine or container that new processes may use."""
    starts: bool = True
    """True if the run starts on this machine after the checks; False for checks alone, as of `relax doctor`."""


@dataclass(frozen=True, slots=True)
class FirstStepFacts:
    """Facts about the first step of a run or of a stage, once the step has finished."""

    config: Mapping[str, Any]
    """The whole configuration as plain data, with every default; secrets are references."""
    metrics: Mapping[str, float]
    """The metrics of the step."""
    told: Mapping[str, Any]
    """Descriptions of the step by its roles. The rollout describes the first tasks and their samples (`stops`, `tasks`),
    the actor its rows (`rows`) and the log-probs of a few of them (`log_probs`)."""
