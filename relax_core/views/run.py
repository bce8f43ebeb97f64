# SPDX-License-Identifier: Apache-2.0
"""Read access to runs: `open_run(dir)` for notebooks and the views, a run's health, and the list of runs.

All functions are safe on a live run: they only read, except for the requests of `RunView`. The health of a run follows from its
documents, the wall clock and the process table. The list of runs reads only small files of ended runs.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from relax_core.api.checks import CheckFinding
from relax_core.api.errors import ConfigError
from relax_core.api.events import FirstStepChecked
from relax_core.api.run_commands import MAX_TEXT, MAX_TRACEBACK, ClearMetrics, Command, LogError, LogMetrics
from relax_core.media.previews import read_preview
from relax_core.observe.event_log import event_name
from relax_core.observe.metrics import mean
from relax_core.observe.recorder import ENDINGS
from relax_core.observe.run_directory import MAX_WAITING, RunDirectory, find_run, run_paths, runs_root
from relax_core.observe.status import host_mark

_NOT_METRICS = ("schema", "time", "elapsed_s")


class Metrics(list[dict[str, Any]]):
    """One mapping per step with `step` and the step's metrics; `pandas.DataFrame(metrics)` makes a table."""

    @classmethod
    def merged(cls, records: Iterable[dict[str, Any]]) -> Metrics:
        """Merge the lines of each step; later lines override earlier ones."""
        steps: dict[int, dict[str, Any]] = {}
        for record in records:
            if isinstance(record.get("step"), int):
                kept = {key: value for key, value in record.items() if key not in _NOT_METRICS}
                steps.setdefault(record["step"], {}).update(kept)
        return cls(steps[step] for step in sorted(steps))

    def column(self, key: str) -> list[float]:
        """Return the values of one key in order of steps, without steps that lack the key."""
        return [value for _, value in self.points(key)]

    def points(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of one key, without steps that lack the key."""
        return [(record["step"], record[key]) for record in self if record.get(key) is not None]

    def names(self) -> list[str]:
        """Return the sorted names of all metrics that some step has."""
        return sorted({key for record in self for key in record if key != "step"})


class RunView:
    """Read access to one run directory, and requests to its live run."""

    def __init__(self, path: Path) -> None:
        self._directory = RunDirectory.open(path)

    @property
    def path(self) -> Path:
        return self._directory.path

    @property
    def name(self) -> str:
        return self._directory.name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        source = self.path / "config.toml"
        try:
            return tomllib.loads(source.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(str(source), f"text that is not TOML ({error})", "restore the file") from error

    def summary(self) -> dict[str, Any]:
        """Return the summary of the run's last end; empty if the run never ended."""
        return self._directory.read("summary") or {}

    def status(self) -> dict[str, Any]:
        """Return the last written status of the run and its roles; empty before the first."""
        return self._directory.read("status") or {}

    def document(self, name: str) -> dict[str, Any]:
        """Return the document `plugins`, `provenance`, `supervisor` or `trace`; empty if the run has none."""
        return self._directory.read(name) or {}

    def metrics(self) -> Metrics:
        """Return the metrics of all steps so far."""
        return Metrics.merged(self._directory.metrics())

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the newest record of each evaluation with rewards by task, in order of steps and sets."""
        found = {(int(one["step"]), str(one["set"])): one for one in self._directory.evaluations()}
        return [found[key] for key in sorted(found)]

    def send(self, command: Command) -> None:
        """Send a command to the live run."""
        self._directory.send(command)

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Record values in the metrics of the live run, and send them to its sinks; any program may call this.

        `values`: finite numbers, by names that begin with `user/`. `step`: counts over all stages; None: the step that is
        trained now. Values of a step that has not finished come with the step's metrics, and are lost if the run ends
        before. Raises ConfigError.
        """
        self.log(LogMetrics({name: float(value) for name, value in values.items()}, step))

    def log_error(self, message: str, traceback: str = "") -> None:
        """Record an error in the log of the live run; long texts are cut. Raises ConfigError."""
        self.log(LogError(message[:MAX_TEXT], traceback[:MAX_TRACEBACK]))

    def log(self, command: LogMetrics | ClearMetrics | LogError) -> None:
        """Send what a program logs. Raises ConfigError if no process will record it, or if the run is behind."""
        state = health(self, time.time()).state
        if state in (*ENDINGS, "lost"):
            raise ConfigError("run", f"{self.name}, which is {state}", "only a live run records what programs log")
        if (waiting := self._directory.waiting()) >= MAX_WAITING:
            fix = "log less often, and many values at once"
            raise ConfigError("commands", f"{waiting} that the run has not taken", fix)
        self.send(command)

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Return the sample records of a step."""
        return list(self._directory.samples(step))

    def sample_steps(self) -> list[int]:
        """Return the steps that have sample records."""
        return self._directory.sample_steps()

    def preview(self, kind: str, key: str) -> bytes | None:
        """Return the viewable copy of a sample's medium; None if no copy was kept."""
        return read_preview(self.path, kind, key)

    def events(self) -> Iterable[dict[str, Any]]:
        """Return the records of `events.jsonl` in the order of their writing."""
        return self._directory.events()

    def first_steps(self) -> dict[int, tuple[CheckFinding, ...]]:
        """Return the checks of step 1, and of the first step of each later stage, by step; empty before they are made."""
        name = event_name(FirstStepChecked)
        records = (record for record in self.events() if record["event"] == name)
        return {record["step"]: tuple(CheckFinding(**check) for check in record["checks"]) for record in records}


def open_run(run: str | Path | None = None) -> RunView:
    """Open a run by directory, or by name under `$RELAX_RUNS` or ./runs; None: the latest run."""
    return RunView(find_run(str(run) if run is not None else None))


@contextmanager
def readable_documents(run: RunView) -> Iterator[None]:
    """Raise ConfigError naming the run if the body fails on one of the run's files."""
    with readable(run.path):
        yield


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise ConfigError naming a run directory if the body fails on one of its files."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
        got = f"files with unexpected content ({type(error).__name__}: {error})"
        fix = "restore status.json, summary.json, the .jsonl files and samples from a copy, or undo changes to these files"
        raise ConfigError(str(path), got, fix) from error


STALE_S = 30.0
"""Seconds without a new status after which a run counts as silent; a live controller writes far more often."""


@dataclass(frozen=True, slots=True)
class RunHealth:
    """The state of a run at one time."""

    state: str
    """One of the endings, or `starting`, `running`, `paused` (until a person continues the run), `restarting` (the
    process is gone and the supervisor starts a new one), `silent` (no new status), `lost` (the process is gone)."""
    said_s_ago: float | None = None
    """Seconds since the last status; None: no status yet."""
    detail: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDINGS


def pause_reason(status: Mapping[str, Any]) -> str:
    """Return the reason of a run's pause; empty if the run is not paused."""
    paused = [wait for role in status.get("roles", ()) if role.get("state") == "paused" for wait in role["waits"]]
    return str(paused[0]["reason"]) if paused else ""


def health(run: RunView, wall: float) -> RunHealth:
    """Return a run's state at wall-clock time `wall`."""
    status, summary = run.status(), run.summary()
    if not status:
        ending = str(summary.get("status", ""))
        return RunHealth(ending) if ending else RunHealth("starting", None, "no status written yet")
    age = max(wall - float(status.get("written_at", wall)), 0.0)
    state = str(status.get("state", "running"))
    if state == "failed" and summary.get("retry") and _supervised(run.document("supervisor")):
        return RunHealth("restarting", age, f"{summary.get('error')}; its supervisor resumes it")
    if state in ENDINGS:
        return RunHealth(state, age, str(summary.get("error") or ""))
    if status.get("host") == host_mark() and not process_of(run):
        if _supervised(run.document("supervisor")):
            return RunHealth("restarting", age, f"its process {status['pid']} is gone; its supervisor resumes it")
        return RunHealth("lost", age, f"its process {status['pid']} is gone; continue with `relax resume {run.name}`")
    if age > STALE_S:
        return RunHealth("silent", age, f"process {status.get('pid')} may hang or run on another machine")
    if reason := pause_reason(status):
        return RunHealth("paused", age, f"for {reason}; continue with `relax continue {run.name}`, or stop the run")
    return RunHealth(state, age)


def process_of(run: RunView) -> int:
    """Return the id of the run's last process if the process is alive on this machine, else 0."""
    status = run.status()
    if status.get("host") != host_mark():
        return 0
    try:
        process = psutil.Process(int(status.get("pid", 0)))
        return 0 if process.status() == psutil.STATUS_ZOMBIE else process.pid
    except psutil.Error:
        return 0


def _supervised(supervisor: Mapping[str, Any]) -> bool:
    """Return True if the supervisor that a run directory names is alive on this machine."""
    if supervisor.get("host") != host_mark():
        return False
    try:
        return "relax_core.control.supervisor" in psutil.Process(int(supervisor.get("pid", 0))).cmdline()
    except psutil.Error:
        return False


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of `relax runs`."""

    name: str
    path: str
    state: str
    step: int
    steps: int | None
    reward_first: float | None
    reward_last: float | None
    eval_last: float | None
    wall_seconds: float | None


def list_runs(wall: float, root: Path | None = None) -> list[Listed]:
    """Return the runs under `root`, newest first."""
    found = []
    for path in run_paths(root or runs_root()):
        view = RunView(path)
        try:
            with readable_documents(view):
                found.append(listed(view, wall))
        except ConfigError:  # list the run as unreadable; `relax status` shows the error
            found.append(Listed(view.name, str(path), "unreadable", 0, None, None, None, None, None))
    return found


def listed(run: RunView, wall: float) -> Listed:
    state, summary, status = health(run, wall), run.summary(), run.status()
    # A resumed run still has the summary of its last end.
    final = summary if state.ended else {}
    rewards = run.metrics().column("reward/mean") if not final else []
    evaluated = final.get("eval_last") or {}
    return Listed(
        name=run.name,
        path=str(run.path),
        state=state.state,
        step=int(final.get("steps", status.get("step", 0))),
        steps=status.get("steps"),
        reward_first=final.get("reward_first") if final else mean(rewards[:10]),
        reward_last=final.get("reward_last") if final else mean(rewards[-10:]),
        eval_last=evaluated.get("mean"),
        wall_seconds=final.get("wall_seconds"),
    )
