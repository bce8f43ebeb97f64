# SPDX-License-Identifier: Apache-2.0
"""The recorder of a run: passes each event to the run directory, sinks, observers and display.

Files are written at once, and a failure to write a file fails the run. Threads call the sinks, which work in another
process (`control.sink_process`), and the observers. They can neither delay the run nor fail it; `summary.json` counts
their failed calls.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Protocol, Self

from relax_core.api import events
from relax_core.api.errors import InfrastructureError, RelaxError
from relax_core.api.events import Event, Sink, Span
from relax_core.api.role import Clock, Heartbeat, SystemClock
from relax_core.api.run_commands import USER, ClearMetrics, LogError, LogMetrics
from relax_core.api.scaling import Signals
from relax_core.observe.completions import completion_metrics
from relax_core.observe.event_log import EventLog
from relax_core.observe.logged_values import HELD, NAMES, LoggedValues
from relax_core.observe.metrics import WHOLE_RUN, EventCounts, MeasuredMetric, Totals
from relax_core.observe.observers import Call, CallbackWorker, close_all
from relax_core.observe.run_directory import RunDirectory
from relax_core.observe.signals import SignalMeter
from relax_core.observe.spans import TimeAccount, Trace, Window
from relax_core.observe.status import status_document, status_key
from relax_core.registry.loader import HOOKS

ENDINGS = ("finished", "stopped", "preempted", "diverged", "failed", "interrupted")
SHOWN_SAMPLES = 4
"""Number of transcripts of each delivery of samples that are passed to sinks."""
CURVES = {"lag": ("lag/mean", "lag/max"), "samples in flight": ("samples/in_flight",), "rows": ("bus/rows",)}
"""Metrics that trace viewers draw as curves, by chart."""
PROGRAM = "program"
"""Role of the log's records that a program has sent."""
STATUS_EVERY_S = 5.0
"""Longest age in seconds of `status.json`, which is written earlier if a role's state changes, and shortest time between
two `RolesReported`."""


class Display(Protocol):
    """A live view of a running run. The controller waits for its calls, so they must be quick."""

    def event(self, event: Event) -> None: ...

    def heartbeats(self, beats: Sequence[Heartbeat]) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """The only consumer of a run's events; a context manager that records the end of the run on exit.

    Life cycle: `starting -> running -> finished | stopped | preempted | diverged | failed | interrupted`. In a run with
    stages, each stage begins with `enter`.

    Invariants:
    - Each event of a stage is written once, in the order of event numbers.
    - The totals of `summary.json` can be rebuilt from `metrics.jsonl`, and its counts from `events.jsonl`.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        sinks: Mapping[str, Sink] | None = None,
        observers: Mapping[str, object] | None = None,
        display: Display | None = None,
        *,
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
        deadline_s: float = 30.0,
        sink_call_s: float = 120.0,
    ) -> None:
        """Open the log; sinks open when the run starts.

        `sink_call_s`: longest call of a sink; the first one includes the imports of its package. `deadline_s`: longest
        call of an observer, and longest wait for all of them, and for all sinks, at the end.
        """
        self.run_dir, self.ending = run_dir, ""
        self._clock, self._wall = clock or SystemClock(), wall
        self._log = EventLog(run_dir.path, run_dir.redactor, wall=wall)
        self._display = display
        records = list(run_dir.metrics())
        self._totals, self._counts = Totals.replay(records), EventCounts()
        for record in run_dir.events():
            self._counts.count(record)
        self._logged = LoggedValues(key for record in records for key in record if key.startswith(USER))
        self._elapsed_before = max((float(record.get("elapsed_s") or 0) for record in records), default=0.0)
        self._opened = self._clock.now()
        self._meter = SignalMeter()
        self._ready: float | None = None
        self._tokens_before = self._totals.tokens_generated
        self._trace, self._time = Trace(self._opened), TimeAccount()
        self._hub_behind: float | None = None
        """Seconds by which the hub's clock lags behind `_clock`, estimated as the smallest delay of an event so far."""
        self._generated: dict[int, float] = {}
        """Sampled tokens of steps whose time is not yet accounted for, by step."""
        self._published: dict[str, float] = {}
        self._measured: dict[int, list[events.RolloutMeasured]] = {}
        self._last_number = -1
        self._stage, self._first_step = "", 0
        """Name of the stage in a run with stages, and the number of steps of the earlier stages."""
        self._facts: dict[str, Any] = {"run_id": run_dir.name, "state": "starting", "step": self._totals.steps}
        self._beats: tuple[Heartbeat, ...] = ()
        self._status_key: tuple[Any, ...] | None = None
        self._status_at = self._reported_at = float("-inf")
        self._restarting_since: float | None = None
        self._deadline_s = deadline_s
        self._summary: dict[str, Any] | None = None
        """The summary as last written; None before the end of the run."""
        self._sinks, self._sinks_opened = dict(sinks or {}), False
        self._undone: tuple[int, int] | None = None
        """Step that the run rolled back to, and the last step before the rollback; None if the sinks know of both."""
        self._sink_workers = {name: CallbackWorker(name, self._clock, self._off, sink_call_s) for name in self._sinks}
        self._observers = dict(observers or {})
        self._work_at_end: dict[str, events.WorkAtEnd] = {}
        """Work that observers declared when the run was opened, by the observer's name."""
        self._observer_workers = {
            name: CallbackWorker(name, self._clock, self._off, deadline_s) for name in self._observers
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if not self.ending:
                failed = isinstance(error, Exception)
                facts = {"error": str(error), "exit_code": getattr(error, "exit_code", 1)} if failed else {}
                self.write(events.RunFinished("failed" if failed else "interrupted", facts))
        except InfrastructureError as unwritten:
            if error is None:
                raise
            # The original error stays the reason of the failure; the failed write of the summary is only logged.
            self._log.note("error", f"the end of the run could not be recorded: {unwritten}")
        finally:
            self.close()

    # -- input: events, heartbeats, spans

    def handle(self, number: int, event: Event) -> None:
        """Record a numbered event; skip numbers that were handled before."""
        if number <= self._last_number:
            return
        self._last_number = number
        self.write(event)

    def enter(self, stage: str, first_step: int) -> None:
        """Begin a stage after `first_step` steps of earlier stages; its events are numbered anew."""
        self._account(finish=True)
        self._stage, self._first_step, self._last_number = stage, first_step, -1
        self._hub_behind, self._time = None, TimeAccount()
        self._measured.clear()
        self._facts["stage"] = stage
        self._log.note("info", "stage begins", stage=stage, first_step=first_step)

    def write(self, event: Event) -> None:
        """Record an event, and pass it to the log, the display and observers."""
        step = getattr(event, "step", None)
        if self._first_step and step is not None:
            event = replace(event, step=step + self._first_step)
        event = self._record(event)
        self._log_and_show(event)
        self.tell_observers(event)

    def heartbeats(self, beats: Sequence[Heartbeat]) -> None:
        """Show the states of roles, and write `status.json` if they changed or the file is old."""
        self._beats = tuple(beats)
        self._meter.add(beats, self._clock.now())
        self._show(lambda display: display.heartbeats(beats))
        for worker in (*self._sink_workers.values(), *self._observer_workers.values()):
            worker.check()
        if self._clock.now() - self._reported_at > STATUS_EVERY_S:
            self._reported_at = self._clock.now()
            self.tell_observers(events.RolesReported(self._beats, self._now()))
        if status_key(beats) != self._status_key or self._clock.now() - self._status_at > STATUS_EVERY_S:
            self._write_status()

    def log(self, commands: Iterable[LogMetrics | ClearMetrics | LogError]) -> None:
        """Record what programs log. Values of a step that has not finished wait for the step's end."""
        refused = self._logged.refused
        for command in commands:
            match command:
                case LogMetrics(values, step):
                    self._logged.add(self._totals.steps + 1 if step is None else step, values)
                case ClearMetrics(step):
                    self._logged.clear(step)
                case LogError(message, traceback):
                    self.write(events.Logged("error", PROGRAM, message, {"frames": traceback} if traceback else {}))
        for step, values in self._logged.take(self._totals.steps).items():
            self._metrics(step, values)
        if count := self._logged.refused - refused:
            most = f"at most {NAMES} names, and {HELD} values of steps that have not finished"
            self._log.note("warning", f"{count} logged values are not recorded: {most}")

    def signals(self) -> Signals | None:
        """Record and return the signals of a window that has ended since the last call; None if none has."""
        signals = self._meter.window(self._clock.now())
        if signals is not None and signals.size is not None:
            self.write(events.EnginesMeasured(signals.plain()))
        return signals

    def span(self, name: str, role: str, start: float, end: float) -> None:
        """Add a span to the trace; `start` and `end` are seconds of the recorder's clock."""
        self._trace.span(name, role, start, end)

    def ready(self) -> None:
        """Record that all roles are ready; after a restart of the whole run, report its recovery."""
        if self._restarting_since is not None:
            since, self._restarting_since = self._restarting_since, None
            self._trace.span("restart", "controller", since, self._clock.now())
            self._log_and_show(events.RoleRecovered(WHOLE_RUN, self._clock.now() - since))
            self._facts["state"] = "running"
            self._write_status()

    def rewind(self, step: int, in_place: bool = False) -> None:
        """Remove metrics and transcripts of the steps after `step`, a number that counts over all stages.

        `in_place`: the roles keep running, and rows on the bus stay, as in `RunDirectory.rewind`.
        """
        last = self._totals.steps
        self.run_dir.rewind(step, in_place)
        if last > step:
            self._undone = (step, last)
            self._rewind_sinks()
        self._totals = Totals.replay(self.run_dir.metrics())
        self._tokens_before = min(self._tokens_before, self._totals.tokens_generated)
        self._measured.clear()
        self._time.rewind()

    def finish(self, status: str, more: Mapping[str, Any] | None = None) -> dict[str, object]:
        """Record the end of the run in `summary.json`, `trace.json` and `status.json`; return the summary."""
        if status not in ENDINGS:
            raise RelaxError(f"status: got {status!r}; a run ends as one of {', '.join(ENDINGS)}")
        self.ending = status
        self._account(finish=True)
        if self._logged:
            self._log.note(
                "warning", f"{len(self._logged)} logged values are not recorded: their steps have not finished"
            )
        self._summary = summary = self.summary(status) | dict(more or {})
        self.run_dir.write("summary", summary)
        self._facts["state"] = status
        self._write_status()
        self.run_dir.write("trace", self._trace.document())
        return summary

    def summary(self, status: str = "running") -> dict[str, object]:
        """Return the content of `summary.json` for a run that ends now with this status."""
        now = self._clock.now()
        ready = self._ready if self._ready is not None else now
        # Count also the tokens that were sampled for a step that is not trained yet.
        reports = chain.from_iterable(self._measured.values())
        waiting = sum(report.metrics.get("tokens/generated", 0.0) for report in reports)
        tokens = self._totals.tokens_generated + waiting - self._tokens_before
        return {
            "run_id": self.run_dir.name,
            "status": status,
            "wall_seconds": self._elapsed(),
            "startup_seconds": ready - self._opened,
            "tokens_per_second": tokens / (now - ready) if now > ready else 0.0,
            **self._totals.summary(),
            "tokens_generated": int(self._totals.tokens_generated) + int(waiting),
            **self._counts.summary(),
            "callback_failures": self._callback_failures(),
        }

    def close(self) -> None:
        """Let sinks and then observers finish within their deadlines, then close all files and threads."""
        last = {name: sink.close for name, sink in self._sinks.items() if self._sinks_opened}
        close_all([(worker, last.get(name)) for name, worker in self._sink_workers.items()], self._deadline_s)
        self._count_last_failures()
        closed = self._calls(events.RunClosed(str(self.run_dir.path), self.ending))
        close_all([(worker, closed.get(name)) for name, worker in self._observer_workers.items()], self._deadline_s)
        self._count_last_failures()
        self._show(lambda display: display.close())
        self._log.close()
        self.run_dir.close()

    def _callback_failures(self) -> dict[str, int]:
        """Return the numbers of failed calls to sinks and observers, by name; names without a failure are left out."""
        workers = (*self._sink_workers.values(), *self._observer_workers.values())
        failures = Counter({worker.name: 0 for worker in workers})
        for worker in workers:
            failures[worker.name] += worker.failures
        return {name: count for name, count in failures.items() if count}

    def _count_last_failures(self) -> None:
        """Write the summary again if sinks or observers failed after it was written."""
        failures = self._callback_failures()
        if self._summary is None or failures == self._summary["callback_failures"]:
            return
        try:
            self.run_dir.write("summary", self._summary | {"callback_failures": failures})
        except InfrastructureError as error:
            self._log.note("warning", f"failures of sinks and observers are not in the summary: {error}")

    # -- handling of each kind of event

    def _record(self, event: Event) -> Event:
        """Record an event in files, trace and totals; return the event to log, to show and to pass to observers."""
        now = self._now()
        match event:
            case events.RunStarted():
                self._start(event)
            case events.SamplesScored(step, samples):
                self.run_dir.append_samples(step, samples)
                shown = list(map(self.run_dir.redactor.document, samples[:SHOWN_SAMPLES])) if self._sinks else []
                self._to_sinks(lambda sink: sink.samples(step, shown))
            case events.RolloutMeasured():
                self._measured.setdefault(event.step, []).append(event)
            case events.StepFinished():
                return self._step(event)
            case events.StepMeasured():
                self._totals.measured(event.step, event.metrics)
                self._metrics(event.step, event.metrics)
            case events.EvalFinished():
                self._metrics(event.step, self._totals.evaluated(event))
                self.run_dir.append_samples(event.step, [{"purpose": "eval", **sample} for sample in event.samples])
                if event.tasks:
                    self.run_dir.append_evaluation(event.step, event.set_name, event.temperature, event.tasks)
            case events.TimeSpent():
                self._trace.add(event.spans)
                self._time.add(event)
                self._account()
            case events.RolledBack(step):
                self.rewind(step, in_place=True)
                self._facts["step"] = step
            case events.GuardFired():
                return self._guard_fired(event)
            case events.RunRestarted(step):
                self._restart(step)
            case events.RunFinished():
                return events.RunFinished(event.status, self.finish(event.status, event.summary))
            case events.WeightsPublished(version, seconds, size_bytes, _, times):
                self._published = {f"time/publish/{part}_s": spent for part, spent in times.items()}
                self._trace.span(
                    f"publish {version}", "weights", now - seconds, now, bytes=size_bytes, seconds=dict(times)
                )
            case events.CheckpointSaved(step, _, seconds):
                self.run_dir.sync()
                self._trace.span(f"checkpoint {step}", "controller", now - seconds, now)
            case events.RoleFailed(role):
                self._trace.mark("failed", role, now)
            case events.RoleRecovered(role, seconds):
                self._trace.span("recovery", role, now - seconds, now)
        return event

    def _guard_fired(self, event: events.GuardFired) -> Event:
        """Save a guard's evidence before a rollback deletes it; return the event with the folder of the evidence."""
        evidence = dict(event.evidence)
        evidence["since"] = evidence.get("since", event.step - self._first_step) + self._first_step
        evidence["window"] = [
            {**metrics, "step": metrics["step"] + self._first_step} for metrics in evidence.get("window", ())
        ]
        facts = {"step": event.step, "guard": event.guard, "action": event.action, "reason": event.reason}
        groups = evidence.get("groups", ())
        folder = self.run_dir.save_evidence(event.step, event.guard, facts | evidence, groups, self._first_step)
        self._trace.mark(f"guard {event.guard}", "actor", self._now())
        return replace(event, evidence=evidence, folder=str(folder))

    def _start(self, event: events.RunStarted) -> None:
        """Open the sinks; do not wait for them. A sink that cannot open is turned off."""
        self._ready = self._clock.now()
        self._facts |= {"run_id": event.run_id, "state": "running", "steps": event.config.get("steps")}
        self._trace.span("startup", "controller", self._opened, self._ready)
        path, name, config = str(self.run_dir.path), self.run_dir.name, self.run_dir.redactor.document(event.config)
        self._sinks_opened = True
        for sink_name, sink in self._sinks.items():
            self._sink_workers[sink_name].give(partial(sink.open, path, name, config), vital=True)
        self._rewind_sinks()
        self._write_status()

    def _restart(self, step: int) -> None:
        """Go back to `step`, from which the run restarts. The run's new hub has a new clock and numbers events anew."""
        self._account(finish=True)
        self._restarting_since, self._last_number = self._clock.now(), -1
        self._hub_behind, self._time = None, TimeAccount()
        self.rewind(step)
        self._trace.mark("restarted", "controller", self._restarting_since)
        self._facts |= {"state": "restarting", "step": step}
        self._write_status()

    def _step(self, event: events.StepFinished) -> Event:
        measured, completions = MeasuredMetric(), dict[str, list[float]]()
        for step in sorted(step for step in self._measured if step <= event.step):
            for report in self._measured.pop(step):
                measured.add(report.metrics)
                for name, values in report.completions.items():
                    completions.setdefault(name, []).extend(values)
        metrics = measured.values() | completion_metrics(completions) | dict(event.metrics)
        metrics |= self._meter.step()
        metrics |= {"weights/publishes": 0.0} | {key: float(count) for key, count in self._counts.items()}
        at = event.at or self._now()
        behind = self._clock.now() - at
        self._hub_behind = behind if self._hub_behind is None else min(behind, self._hub_behind)
        window = self._time.step(event.step, at, metrics.get("time/step_s", 0.0))
        metrics |= _rates(window, metrics, self._totals)
        logged = self._logged.take(event.step)
        metrics |= logged.pop(event.step, {})
        for earlier, late in logged.items():
            self._metrics(earlier, late)
        self._totals.stepped(event.step, metrics)
        self._metrics(event.step, metrics)
        self._facts["step"] = event.step
        self._generated[event.step] = metrics.get("tokens/generated", 0.0)
        curves = {name: {key: metrics[key] for key in keys if key in metrics} for name, keys in CURVES.items()}
        self._trace.step(event.step, window.start, at, curves)
        return events.StepFinished(event.step, metrics, at)

    def _account(self, finish: bool = False) -> None:
        """Write the time metrics of steps whose spans all roles have sent; with `finish`, of all steps."""
        for window, metrics in self._time.take(finish):
            self._spans_to_sinks(window)
            metrics |= self._published
            self._published = {}
            tokens, busy = self._generated.pop(window.step, 0.0), metrics.get("time/generate_s", 0.0)
            if tokens > 0 and busy > 0:
                metrics["tokens/per_busy_s"] = tokens / busy
            if metrics:
                self._log_and_show(self._record(events.StepMeasured(window.step, metrics)))

    def _now(self) -> float:
        """Return the time on the hub's clock."""
        return self._clock.now() - (self._hub_behind or 0.0)

    def _metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        stage = {"stage": self._stage} if self._stage else {}
        self.run_dir.append_metrics(step, self._wall(), metrics, elapsed_s=round(self._elapsed(), 3), **stage)
        self._to_sinks(lambda sink: sink.metrics(step, dict(metrics)))

    # -- output: log, display, sinks, observers, status

    def _log_and_show(self, event: Event) -> None:
        if record := self._log.write(event):
            self._counts.count(record)
        self._show(lambda display: display.event(event))

    def _show(self, call: Callable[[Display], None]) -> None:
        """Call the display; turn it off if its terminal is gone."""
        if self._display is None:
            return
        try:
            call(self._display)
        except OSError as error:
            self._display = None
            self._log.note("warning", f"the display is off: {error}")

    def _to_sinks(self, call: Callable[[Sink], None]) -> None:
        for name, sink in self._sinks.items():
            self._sink_workers[name].give(lambda sink=sink: call(sink))  # type: ignore[misc]

    def _rewind_sinks(self) -> None:
        """Report undone steps to the sinks, as soon as they are open."""
        if self._sinks_opened and self._undone is not None:
            step, last = self._undone
            self._undone = None
            self._to_sinks(lambda sink: sink.rewind(step, last))

    def _spans_to_sinks(self, window: Window) -> None:
        """Pass the spans of a step to the sinks that take spans, in seconds since 1970."""
        takers = {name: sink for name, sink in self._sinks.items() if type(sink).spans is not Sink.spans}
        if not takers:
            return
        ahead = self._wall() - self._now()
        step = Span("steps", "work", f"step {window.step}", window.start, window.end)
        spans = [
            replace(span, start=span.start + ahead, end=span.end + ahead) for span in (step, *self._time.spans(window))
        ]
        for name, sink in takers.items():
            self._sink_workers[name].give(partial(sink.spans, window.step, spans))

    def tell_observers(self, event: object) -> None:
        """Pass an event to the observers that have a hook for its type; do not record the event."""
        for name, call in self._calls(event).items():
            opened = partial(self._open_observer, name, call)
            self._observer_workers[name].give(opened if isinstance(event, events.RunOpened) else call)

    def work_at_end(self) -> list[events.WorkAtEnd]:
        """Return the declared work that is not done, without that of observers that are paused or off."""
        declared = [(self._observer_workers[name], work) for name, work in self._work_at_end.items()]
        return [work for worker, work in declared if worker.works and not work.done.is_set()]

    def _open_observer(self, name: str, call: Call) -> None:
        if isinstance(work := call(), events.WorkAtEnd):
            self._work_at_end[name] = work

    def _calls(self, event: object) -> dict[str, Call]:
        """Return the call of each observer that has a hook for the type of the event, by the observer's name."""
        hook = HOOKS.get(type(event), "")
        found = {name: getattr(observer, hook, None) for name, observer in self._observers.items()}
        return {  # as in pluggy, an implementation may omit the parameter
            name: partial(function, event) if inspect.signature(function).parameters else function
            for name, function in found.items()
            if callable(function)
        }

    def _off(self, name: str, why: str, frames: str) -> None:
        self._log.note("warning", f"{name} {why}", frames=frames)

    def _write_status(self) -> None:
        self._status_key, self._status_at = status_key(self._beats), self._clock.now()
        self.run_dir.write("status", status_document(self._beats, self._now(), self._wall(), self._facts))

    def _elapsed(self) -> float:
        return self._elapsed_before + self._clock.now() - self._opened


def _rates(window: Window, metrics: Mapping[str, float], before: Totals) -> dict[str, float]:
    """Return the tokens and samples per second of the step."""
    if window.seconds <= 0:
        return {}
    rates = {"tokens/per_s": metrics["tokens/generated"] / window.seconds} if "tokens/generated" in metrics else {}
    if "samples/trained" in metrics:
        trained, earlier = metrics["samples/trained"], before.latest.get("samples/trained", 0.0)
        since = trained - earlier if trained >= earlier else trained  # each stage counts from 0
        rates["samples/per_s"] = since / window.seconds
    return rates
