# SPDX-License-Identifier: Apache-2.0
"""The events of a run, and the contract of sinks, which receive metrics and samples in addition to the run directory.

Roles emit events; the controller records them and passes them to observers.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from relax_core.api.component import Configurable, OptionsT
from relax_core.api.weights import Version

if TYPE_CHECKING:
    from relax_core.api.options import TableOptions

TableT = TypeVar("TableT", bound="TableOptions")
SpanKind = Literal["work", "overhead", "wait"]


@dataclass(frozen=True, slots=True)
class Span:
    """One timed activity on the track of a role, an engine or a rank; between its spans, a track is idle."""

    track: str
    kind: SpanKind
    """`work` serves the step directly; `overhead` moves weights, saves or loads; `wait` waits for `blocked_by`."""
    name: str
    start: float
    end: float
    blocked_by: str = ""
    devices: tuple[str, ...] = ()
    """Devices of the track's worker; empty for the track of a role."""


@dataclass(frozen=True, slots=True)
class RunOpened:
    """The first event of each start of a run, for observers only: the record is open, and no role runs yet."""

    name: str
    """Name of the run: `run.name`, or the name of the run directory."""
    run_dir: str
    config: Mapping[str, Any]
    """The configuration as plain data, with every default; secrets are references."""
    redact: Callable[[str], str]
    """Returns a text without the secrets of the run. Other events may contain secrets, such as the text of an error."""

    def table(self, name: str, model: type[TableT]) -> TableT:
        """Return the observer's own configuration table; `reveal` of its secrets reads their values."""
        return model.model_validate(self.config.get(name, {}))


@dataclass(frozen=True, slots=True)
class WorkAtEnd:
    """Work of an observer for which a finished run waits. `relax_run_opened` returns this declaration.

    The run waits until `done` is set, the time is over, or the run is asked to stop. `RunClosed` follows in each case.
    """

    what: str
    """The work as people read it, such as `the upload of the final model`."""
    timeout_s: float
    """Longest wait in seconds, after `RunFinished`."""
    done: threading.Event = field(default_factory=threading.Event)
    """The observer sets this event when nothing is left to wait for."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    run_id: str
    run_dir: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SamplesScored:
    """Groups were judged; `samples` are their transcripts for the run directory."""

    step: int
    samples: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step was trained and committed; `metrics` have the documented keys."""

    step: int
    metrics: Mapping[str, float]
    at: float = 0.0
    """Time of arrival on the hub's clock; set by the run status."""


@dataclass(frozen=True, slots=True)
class StepMeasured:
    """Metrics of a step that are known only after the step's end: use of time, and the metrics of a critic."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """The spans of a role and its devices on the hub's clock, complete up to `until`; made from a heartbeat."""

    role: str
    until: float
    spans: tuple[Span, ...]
    over: bool = False
    """True: the role has stopped or failed."""


@dataclass(frozen=True, slots=True)
class RolloutMeasured:
    """Metrics of the groups that finished since the last report; they count for step `step`."""

    step: int
    metrics: Mapping[str, float]
    completions: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Values of single samples, by name: the step's metrics of completions do not depend on how reports divide it."""


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    """Engines have loaded and proved a version."""

    version: Version
    seconds: float
    size_bytes: int
    receivers: tuple[str, ...] = ()
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase: the sender's gather, hash, write; the longest wire, load, proof of any receiver."""


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    step: int
    path: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ExportSaved:
    """The model of a step is complete on disk as a Hugging Face folder."""

    step: int
    path: str
    """The folder. The run deletes a regular export when `export.keep` newer ones exist."""
    final: bool
    """True: the model of the last step of the run or stage, `export/`."""
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
    """Meaning of `mean`. `mean`: mean reward over `count` samples; `loss`: loss on given rows of `count` groups."""
    tasks: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Rewards of the judged samples of each task, by a hash of the task's content; empty for a loss."""


@dataclass(frozen=True, slots=True)
class RoleFailed:
    role: str
    error: str
    exit_code: int
    fatal: bool
    """True: the run ends. False: the role or worker is being replaced."""
    frames: str = ""


@dataclass(frozen=True, slots=True)
class RoleRecovered:
    """A role or worker works again after a failure."""

    role: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The trainer went back to a version; earlier events of later steps are void, and those steps run again."""

    step: int
    """Completed steps of the version; the recorder counts them over all stages."""
    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class GuardFired:
    """A guard found evidence that training diverges; no engine has the weights of this step yet."""

    step: int
    guard: str
    action: str
    """Reaction of the run: warn, pause, roll-back or stop."""
    reason: str
    """One sentence with the metric, its value and the bound."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """`metric`, `value`, `bound`, `since` (first step of the evidence), `window` (metrics of the last steps) and
    `groups` (ids of the groups that the step trained)."""
    folder: str = ""
    """Folder of the run directory that has the evidence, the configuration and the samples; set by the recorder."""


@dataclass(frozen=True, slots=True)
class FirstStepSeen:
    """A role describes step 1 for the checks of that step: plain data, as `FirstStepFacts.told`."""

    role: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FirstStepChecked:
    """The checks of step 1, or of the first step of a later stage; made right after that step has finished."""

    step: int
    checks: tuple[Mapping[str, str], ...]
    """Each check with `name`, `state` (ok, warning, failed, not applicable), `found`, `evidence` and `advice`."""


@dataclass(frozen=True, slots=True)
class RunRestarted:
    """The whole run restarts automatically from a checkpoint, after a fault that could not be repaired in place."""

    step: int
    """Step of the checkpoint; 0: no checkpoint, so the run begins again."""
    reason: str
    in_a_row: int
    """Number of restarts without progress in between, including this restart."""
    limit: int
    """Largest number of restarts in a row (`recovery.restarts`)."""


@dataclass(frozen=True, slots=True)
class WorkRetried:
    """Work is repeated after a fault that it did not cause; no samples are lost."""

    role: str
    """Role or worker of the work, as in `RoleFailed`."""
    what: str
    """Unit that `count` counts, in the plural: samples, requests, steps, publishes."""
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """Unread events were dropped, so the run's files lack them; the run status sends this event instead."""

    count: int


@dataclass(frozen=True, slots=True)
class RunFinished:
    status: str
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RolesReported:
    """The states and waits of all roles, at most every few seconds, for observers only."""

    heartbeats: tuple[Any, ...]
    """The last `Heartbeat` of each role; `api.role`, which defines that class, imports this module."""
    at: float
    """Time on the clock of the waits."""


@dataclass(frozen=True, slots=True)
class RunClosed:
    """The last event of a run, for observers only: sinks are closed, and all files of the run are complete.

    The run waits for its observers until their deadline. Longer work is declared before: see `WorkAtEnd`.
    """

    run_dir: str
    status: str
    """Status of the run, as in `RunFinished`."""


@dataclass(frozen=True, slots=True)
class Logged:
    """A log line from a role; the role may run in another process."""

    level: str
    role: str
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EnginesMeasured:
    """The signals of one window, for scaling policies; `signals` are those of `Signals.plain`."""

    signals: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ScalingProposed:
    """A scaling policy proposed a number of engines for a pool."""

    pool: str
    size: int
    """Number of engines when the policy decided."""
    wanted: int
    """Number of engines that the policy proposed."""
    target: int | None
    """Number of engines within the limits of `[autoscale]`; None: no change."""
    reason: str
    held_by: str = ""
    """Limit that reduced or stopped the proposal; empty: none."""


Event = (
    RunStarted | SamplesScored | StepFinished | StepMeasured | TimeSpent | RolloutMeasured | WeightsPublished
    | CheckpointSaved | EvalFinished | RoleFailed | RoleRecovered | RolledBack | RunRestarted | WorkRetried
    | EventsDropped | RunFinished | Logged | GuardFired | FirstStepSeen | FirstStepChecked
    | EnginesMeasured | ScalingProposed | ExportSaved
)  # fmt: skip
"""An event that the run records. Observers also get `RunOpened`, `RolesReported` and `RunClosed`."""


GUARD_ACTIONS = {
    "warn": "the run continues",
    "pause": "the run is paused until `relax continue`, and `relax why` says more",
    "roll-back": "the run goes back to its last checkpoint",
    "stop": "the run is stopped",
}
"""Description of each action of a guard."""


def describe(event: Event) -> tuple[str, str] | None:
    """Return a fault, a repair or a guard's finding as a title and a detail for people; None for other events."""
    match event:
        case RoleFailed(role, error):
            return f"{role} failed", error
        case RoleRecovered(role, seconds, detail):
            return f"{role} works again", f"after {seconds:.1f} s{': ' * bool(detail)}{detail}"
        case RolledBack(step, _, reason):
            return f"rolled back to step {step}", reason
        case RunRestarted(step, reason, in_a_row, limit):
            after = f"after step {step}" if step else "from its beginning"
            return f"the run restarted {after}", f"restart {in_a_row} of {limit} in a row, after: {reason}"
        case GuardFired(step, guard, action, reason):
            return f"guard {guard} fired at step {step}", f"{reason}; {GUARD_ACTIONS[action]}"
        case WorkRetried(role, what, count, reason):
            return f"{role}: {count} {what} retried", reason
    return None


UNDONE = "run/undone_steps"
"""Metric with which a sink marks a rollback by default: the number of steps that are trained again."""


class Sink(Configurable[OptionsT], Generic[OptionsT]):
    """A receiver of each step's metrics, in a process of the run's sinks.

    Life cycle: `check`, `open`, then `metrics`, `samples`, `spans` and `rewind` in any order, `close`. Before the run
    starts, the controller calls `check` of an instance of its own. The process calls it again when it builds the sink,
    and makes the other calls in a thread of the sink; the run waits for none of them. A sink is turned off if `open`
    raises, or if a call takes longer than 2 minutes. If other calls raise three times, the sink is paused: it misses
    the calls of the next minute, or of up to ten minutes if it keeps raising, and is then tried again, at most six
    times in a row. The run continues, and `summary.json` counts failed and missed calls.
    """

    kind: ClassVar[str] = "sink"

    def check(self) -> None:
        """Raise ConfigError with the fix if an account or a setting is missing; called before the run starts.

        An ImportError also refuses the run, with the extra of the plugin's distribution that installs the package.
        `check` contacts no service, since the run waits for it.
        """

    @abstractmethod
    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        """Start to write for a run; called again when a run is resumed."""

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Receive a few samples of the step, with the keys of `samples.jsonl`; see `sample_turns` and `sample_row`."""

    def spans(self, step: int, spans: Sequence[Span]) -> None:
        """Receive the work and waits of roles, engines and ranks in a step, in seconds since 1970 (UTC).

        The first span is the step itself, on the track `steps`. The spans of a step come a little after its metrics.
        """

    def rewind(self, step: int, last: int) -> None:
        """Receive that the run went back to `step`: the steps after it, up to `last`, are undone and trained again.

        A guard, a restart, and a resume from an earlier checkpoint undo steps. By default, the metric `run/undone_steps`
        marks the place. Override this method if the sink can remove or replace what it wrote for these steps.
        """
        self.metrics(step, {UNDONE: float(last - step)})

    def close(self) -> None:
        """Write all buffered data."""


def sample_turns(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (role, text) of the turns of a sample that a sink receives. The last turn is the response, if there is one.

    A medium is shown as its type in brackets.
    """
    messages: Any = sample.get("messages") or sample.get("prompt") or ()
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    turns = [(str(message.get("role", "")), _text(message.get("content"))) for message in messages]
    response = sample.get("response")
    if response is not None and (not turns or turns[-1][0] != "assistant"):
        turns.append(("assistant", str(response)))
    return turns


def sample_row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample that a sink receives as a row of a table: `task`, `prompt`, `response`, `reward`, `outcome`."""
    turns = sample_turns(sample)[: -1 if sample.get("response") is not None else None]
    prompt = "\n\n".join(f"{role}: {text}" for role, text in turns)
    kept = {key: sample.get(key) for key in ("response", "reward", "outcome")}
    return {"task": str(sample.get("task_id")), "prompt": prompt, **kept}


def _text(content: Any) -> str:
    if isinstance(content, str) or not isinstance(content, Sequence):
        return "" if content is None else str(content)
    return " ".join(str(part.get("text") or f"[{part.get('type', 'medium')}]") for part in content)
