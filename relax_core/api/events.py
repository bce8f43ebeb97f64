# SPDX-License-Identifier: Apache-2.0
"""What happens in a run, one frozen event each. Roles emit them; the controller writes them down and tells observers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_core.api.version import Version


@dataclass(frozen=True, slots=True)
class RunStarted:
    run_id: str
    run_dir: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SamplesScored:
    """Some groups were judged; `samples` are transcripts for the run directory."""

    step: int
    samples: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One step was trained and committed; `metrics` have the documented keys."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RolloutMeasured:
    """Means over the groups that finished since the last report, for the step's metrics."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    version: Version
    seconds: float
    size_bytes: int
    receivers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    step: int
    path: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EvalFinished:
    step: int
    set_name: str
    mean: float
    count: int
    temperature: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class RoleFailed:
    role: str
    error: str
    exit_code: int
    fatal: bool
    """The run can't go on; False where the role or worker is being replaced."""
    frames: str = ""


@dataclass(frozen=True, slots=True)
class RoleRecovered:
    role: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RunFinished:
    status: str
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Logged:
    """A line for the log, from a role in another process."""

    level: str
    role: str
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)


Event = (
    RunStarted | SamplesScored | StepFinished | RolloutMeasured | WeightsPublished | CheckpointSaved | EvalFinished
    | RoleFailed | RoleRecovered | RunFinished | Logged
)  # fmt: skip
