# SPDX-License-Identifier: Apache-2.0
"""Events of a run, each a frozen dataclass, and sinks, which receive metrics and samples besides the run directory.

Roles emit events; the controller writes them down and tells observers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal

from relax_core.api.component import Configurable, OptionsT
from relax_core.api.weights import Version

SpanKind = Literal["work", "overhead", "wait"]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time that one track (a role, an engine, a rank) spent on one thing; between its spans it was idle."""

    track: str
    kind: SpanKind
    """work is what the step is for; overhead moves weights, saves, wakes; wait has an owner."""
    name: str
    start: float
    end: float
    owed_by: str = ""
    devices: tuple[str, ...] = ()
    """On which it ran; a role has none."""


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
    at: float = 0.0
    """When the run status heard of it, by the hub's clock; the run status fills it in."""


@dataclass(frozen=True, slots=True)
class StepMeasured:
    """Metrics of a step that are known only after its end: where its time went, and what a role that follows learnt
    from it."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Spans of a role and its devices by the hub's clock, whole up to `until`. The run status makes it of a heartbeat."""

    role: str
    until: float
    spans: tuple[Span, ...]
    over: bool = False
    """The role works no more."""


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
    times: Mapping[str, float] = field(default_factory=dict)
    """Where `seconds` and the sender's time went: gather, hash, write, then wire, load, proof of the slowest receiver."""


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
    measure: str = "mean"
    """What `mean` is: the mean reward, or the `loss` of rows that were given."""


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
class RolledBack:
    """The trainer went back to a version: what was told of later steps is undone, and comes again."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class GuardFired:
    """A guard found evidence that training diverges, in a step whose weights have not reached any engine yet."""

    step: int
    guard: str
    action: str
    """warn, pause, roll-back or stop: what the run does now."""
    reason: str
    """The metric, its value and the bound, in a sentence."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """`metric`, `value`, `bound`, `since` (first step of the evidence), `window` (metrics of the last steps) and `groups`
    (ids of the groups that the step trained on)."""


@dataclass(frozen=True, slots=True)
class RunRestarted:
    """The whole run starts again by itself from a checkpoint, after a fault that could not be repaired in place."""

    step: int
    """The checkpoint's; 0: there was none, and it begins anew."""
    reason: str
    in_a_row: int
    """Restarts since it last got further, this one included."""
    limit: int
    """Most in a row (`recovery.restarts`)."""


@dataclass(frozen=True, slots=True)
class WorkRetried:
    """Work is done once more after a fault that is not its own; nothing of it was lost."""

    role: str
    """Role or worker whose work it is, as in `RoleFailed`."""
    what: str
    """The unit of work, in the plural: samples, requests, steps, publishes."""
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """Events that nobody read in time were dropped: the files of the run lack them. The run status tells so in their place."""

    count: int


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
    RunStarted | SamplesScored | StepFinished | StepMeasured | TimeSpent | RolloutMeasured | WeightsPublished
    | CheckpointSaved | EvalFinished | RoleFailed | RoleRecovered | RolledBack | RunRestarted | WorkRetried
    | EventsDropped | RunFinished | Logged | GuardFired
)  # fmt: skip


class Sink(Configurable[OptionsT], Generic[OptionsT]):
    """Receives each step's metrics in the controller; a sink that raises three times is off and reported."""

    kind: ClassVar[str] = "sink"

    @abstractmethod
    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        """Start writing for a run; a resumed run opens again."""

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """A few transcripts of the step."""

    def close(self) -> None:
        """Flush."""
