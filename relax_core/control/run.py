# SPDX-License-Identifier: Apache-2.0
"""The execution of a prepared run: start its roles, record their events, stop the roles, return the summary.

The command line and the Python API both use this module. The order at the end is fixed: stop the roles, record their
last events, wait until all processes are gone, read the summary.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, cast

from relax_core.api.checks import FirstStepFacts
from relax_core.api.errors import Diverged, InfrastructureError, LastingFailure, RelaxError
from relax_core.api.events import (
    FirstStepChecked,
    FirstStepSeen,
    Logged,
    RunFinished,
    RunOpened,
    RunRestarted,
    RunStarted,
    ScalingProposed,
    StepFinished,
    WorkAtEnd,
)
from relax_core.api.role import Clock, Heartbeat, Role, SystemClock
from relax_core.api.run_commands import (
    Autoscale,
    ClearMetrics,
    Command,
    Evaluate,
    LogError,
    LogMetrics,
    Pause,
    Profile,
    SaveCheckpoint,
    ScaleRequest,
    Stop,
)
from relax_core.api.scaling import Autoscaler, ScalingPolicy
from relax_core.control.preflight import first_step
from relax_core.control.prepare import Prepared, PreparedStage, make_runner
from relax_core.control.sink_process import sinks_apart
from relax_core.control.stages import point_to_export, stage_directories
from relax_core.engines.scaler import role_of
from relax_core.observe.console import say_stopping, waiting_for
from relax_core.observe.event_log import CONTROLLER
from relax_core.observe.first_step import add_facts, fault_lines
from relax_core.observe.process_log import SUFFIX, ProcessLog, captured
from relax_core.observe.recorder import Display, Recorder
from relax_core.roles.checkpoint import discard_partial
from relax_core.rpc.waiting import attended
from relax_core.runners.launch import Launch, Runner
from relax_core.tensor_files.mapped_files import sweep, sweep_abandoned, sweep_published

DRIVER = "driver"
"""Name of this process in the logs."""
WATCH_S = 0.25
HISTOGRAMS = ("dropped_lengths", "trained_lengths")
"""Statistics of the bus that the summary contains; a resumed run starts to count from zero."""
STATELESS_GRACE_S = 8.0
"""Seconds that stateless roles get to stop; roles with state get `[checkpoint] grace_s`."""
RECEIVERS: Mapping[type[Command], frozenset[str]] = {
    Pause: frozenset({"actor"}), Evaluate: frozenset({"actor", "rollout"}), Profile: frozenset({"actor", "rollout"}),
}  # fmt: skip
"""Roles that get a command; every other command goes to all roles with state, and a request to scale to its pool's."""
Receive = Callable[[signal.Signals], bool]
"""A function that obeys a signal, and returns False if the run has not obeyed the same signal before."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PREEMPTIONS = (signal.SIGTERM, signal.SIGHUP)
"""Signals sent when the machine is taken back or the terminal is closed, and no user can press Ctrl-C again."""


def run(
    prepared: Prepared,
    display: Display | None = None,
    *,
    obey: Callable[[Receive], AbstractContextManager[None]] | None = None,
) -> dict[str, object]:
    """Run a prepared run to its end in a new event loop; return the summary or raise the error that ended the run.

    A run that was ended by a second Ctrl-C has the status `interrupted`. `obey`: passes signals to its argument while
    the context is open; None: signals of this process, which needs its main thread.
    """
    with waiting_for(f"starting the runner {prepared.config.run.runner}"):
        runner = prepared.runner.result() if prepared.runner else make_runner(prepared.config, prepared.catalogue)

    async def supervise() -> dict[str, object]:
        controller = RunController(prepared, runner, display)
        with (obey or obey_signals)(receiver(controller)):
            return await controller.run()

    directory = prepared.directory
    log = ProcessLog(
        directory.logs / f"{DRIVER}{SUFFIX}", directory.redactor, {"run": directory.name, "process": DRIVER}
    )
    log.append({"level": "info", "pid": os.getpid(), "message": f"process {os.getpid()} runs the run"})
    try:
        with (
            captured(log, log.processors), asyncio.Runner(loop_factory=runner.loop_factory) as loop,
            contextlib.suppress(asyncio.CancelledError),
        ):  # fmt: skip
            return loop.run(supervise())
    finally:
        log.close()
    return prepared.directory.read("summary") or {"status": "interrupted"}


def receiver(controller: RunController) -> Receive:
    """Return what obeys a signal for the run of this task, from any thread and in a signal handler.

    SIGUSR1 saves a checkpoint. Ctrl-C, SIGTERM and SIGHUP stop the run, SIGTERM and SIGHUP with the longer grace of a
    preemption. Schedulers may repeat SIGTERM, so a second SIGTERM has no effect. A Ctrl-C after a stop ends the run at
    once. The event loop obeys the signal, so nothing happens while other code blocks the loop.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    pending: set[signal.Signals] = set()

    def obey(number: signal.Signals) -> None:
        pending.discard(number)
        if number is signal.SIGUSR1:
            controller.checkpoint()
        elif number is signal.SIGINT and controller.stopping:
            task.cancel()
        else:
            controller.stop(number.name, preempted=number in PREEMPTIONS)

    def receive(number: signal.Signals) -> bool:
        if number in pending:
            return False
        pending.add(number)
        if number is not signal.SIGUSR1 and not controller.stopping:
            say_stopping(number)
        loop.call_soon_threadsafe(obey, number)
        return True

    return receive


@contextlib.contextmanager
def obey_signals(receive: Receive) -> Iterator[None]:
    """Pass the signals of this process to `receive`, and end the process at a Ctrl-C that `receive` refuses.

    A SIGHUP that is ignored, as under `nohup`, stays ignored.
    """

    def handle(number: int, _: FrameType | None) -> None:
        if not receive(signal.Signals(number)) and number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, before[number])


class RunController:
    """One run from the start of its roles to its summary, in one stage or several in sequence.

    Each stage goes through

        preparing -> starting -> running -> stopping -> finished | stopped | preempted | diverged | failed | interrupted

    where a stop leads from any of the first three to `stopped`, a preemption to `preempted`, an error to `failed`, a
    guard's error to `diverged`, and roles with state that do not stop within their grace to `interrupted`.

    Invariants:
    - A stage begins only when the previous stage has finished.
    - One recorder is open from before the first role starts until after the last process is gone.
    - Events of the roles are recorded before RunFinished, which is recorded once, for all stages together.
    - However a stage ends, its runner is closed and the weights that it published are deleted. Weights of a killed
      start are deleted before the roles start.
    """

    def __init__(
        self, prepared: Prepared, runner: Runner, display: Display | None = None, clock: Clock | None = None
    ) -> None:
        """Create the controller; `runner` runs the first stage, and each later stage gets its own runner."""
        self._prepared, self._runner, self._display = prepared, runner, display
        self._clock = clock or SystemClock()
        self._stop_reason = ""
        self._preempted = False
        self._commands: list[Command] = []
        """Commands that the roles have not got yet."""
        self._stop_asked = asyncio.Event()
        self._last_event = 0
        self._running: set[str] = set()
        self._stage = prepared.stages[0]
        self._first_facts: dict[str, Any] = {}
        """Facts that the roles of the stage told about its first step; see `observe.first_step`."""
        self._unchecked: dict[str, str] = {}
        """Entry of the summary if no plugin checks the first step."""
        self._started = False
        """True once the run's start is recorded."""
        finished = [directory.account() or {} for directory in stage_directories(prepared.directory.path)]
        self._former = total(
            {key: of[key] for key in of if key != "steps"} for of in finished
        )  # the recorder counts steps

    def stop(self, reason: str = "stopped", preempted: bool = False) -> None:
        """Ask the run to save a checkpoint and end; call it from the event loop. A preemption has a longer grace."""
        self._stop_reason = self._stop_reason or reason
        self._preempted |= preempted
        self._stop_asked.set()

    @property
    def stopping(self) -> bool:
        return self._stop_asked.is_set()

    def checkpoint(self) -> None:
        """Ask for a checkpoint after the current step; call it from the event loop."""
        self._commands.append(SaveCheckpoint())

    async def run(self) -> dict[str, object]:
        """Run every stage, obeying stop requests, and return the run's summary. Raises the error that ended the run."""
        async with attended(self._take_commands()):
            return await self._run_stages()

    async def _take_commands(self) -> None:
        """Take commands from the run directory; obey a stop at once, even before the first role starts."""
        while True:
            for command in self._prepared.directory.take_commands():
                if isinstance(command, Stop):
                    self.stop("requested")
                else:
                    self._commands.append(command)
            await self._clock.sleep(WATCH_S)

    async def _run_stages(self) -> dict[str, object]:
        """Run every stage and return the run's summary. Raises the error that ended the run, after recording it."""
        prepared, config, catalogue = self._prepared, self._prepared.config, self._prepared.catalogue
        observers, directory = catalogue.observers(), prepared.directory
        chosen, files = [choice.chosen for choice in config.sinks], prepared.stages[0].launch.plugin_files
        with (
            sinks_apart(chosen, catalogue, files, directory.logs, directory.redactor, directory.name) as sinks,
            Recorder(directory, sinks, observers, self._display, clock=self._clock) as recorder,
        ):
            name = config.run.name or directory.name
            data = {**prepared.stages[0].launch.config, "steps": prepared.steps}
            recorder.tell_observers(RunOpened(name, str(directory.path), data, directory.redactor.text))
            left = list(prepared.stages)
            while left:
                left = await self._run_next(left, recorder)
                if left:
                    self._runner = make_runner(left[0].config, catalogue)
            if recorder.ending == "finished":
                await self._wait_for_observers(recorder)
        last = prepared.stages[-1].directory
        if last is not None and last.account() is not None:
            point_to_export(prepared.directory.path, last)
        return prepared.directory.read("summary") or {}

    async def _wait_for_observers(self, recorder: Recorder) -> None:
        """Wait for the work that observers declared, each until its own deadline, or until the run is asked to stop."""
        since = self._clock.now()

        def left() -> list[WorkAtEnd]:
            return [work for work in recorder.work_at_end() if self._clock.now() - since < work.timeout_s]

        for work in left():
            recorder.write(Logged("info", CONTROLLER, f"the run waits for {work.what}, up to {work.timeout_s:g} s"))
        with waiting_for(lambda: "waiting for " + ", ".join(f"{w.what}, up to {w.timeout_s:g} s" for w in left())):
            while left() and not self.stopping:
                await self._clock.sleep(WATCH_S)
        for work in recorder.work_at_end():
            recorder.write(Logged("warning", CONTROLLER, f"the run ends without {work.what}"))

    async def _run_next(self, left: Sequence[PreparedStage], recorder: Recorder) -> list[PreparedStage]:
        """Run the first of these stages to its end; return the remaining stages, or [] if the run stopped."""
        stage = left[0]
        try:
            finished, account = await self._run_stage(stage, recorder)
        except RelaxError as error:
            await self._fail(error, recorder)
            raise
        finally:
            await self._runner.close()
            await asyncio.to_thread(_sweep_weights, stage.launch)
            await asyncio.to_thread(discard_partial, Path(stage.launch.run_dir))
        if not finished:
            return []
        if stage.directory is not None:
            stage.directory.finish({"steps": stage.config.steps, **account})
            self._former = total([self._former, account])
        return list(left[1:])

    async def _run_stage(self, stage: PreparedStage, recorder: Recorder) -> tuple[bool, dict[str, object]]:
        """Run one stage until its roles have returned; return True if it finished, and the account of its samples."""
        launch, stages = stage.launch, self._prepared.stages
        self._running, self._last_event = set(launch.plan.roles), 0
        self._stage, self._first_facts = stage, {}
        if stage.directory is not None:
            recorder.enter(stage.directory.name, stage.first_step)
        if stage is stages[0]:  # it continues from its checkpoint, if it has one
            step = launch.resume.step if launch.resume else 0
            recorder.rewind(stage.first_step + step)
            if (death := self._prepared.death) is not None:
                limit = self._prepared.config.recovery.restarts
                recorder.write(RunRestarted(step, death.reason, death.in_a_row, limit))
        busy: list[str] = []
        await asyncio.to_thread(_sweep_weights, launch)
        ready = await self._start_runner(stage) and await self._wait_until_ready(recorder)
        if ready:
            if not self._started:
                self._started = True
                config = {**launch.config, "steps": self._prepared.steps}
                recorder.write(RunStarted(launch.run_id, str(self._prepared.directory.path), config))
            recorder.ready()
            busy = await self._watch(stage, recorder)
        ended = "preempted" if self._preempted else "stopped"
        status, account = ended, {}
        if ready:
            await self._record_events(recorder)
            account = await self._account()
            status = "interrupted" if busy else ended if self._stop_reason else "finished"
        if stage is stages[-1] or status != "finished":
            facts = {**self._unchecked, **({"busy": busy} if busy else {})}
            recorder.write(RunFinished(status, total([self._former, account]) | facts))
        return status == "finished", account

    async def _fail(self, error: RelaxError, recorder: Recorder) -> None:
        """Record the remaining events, and the error with which the run failed."""
        with contextlib.suppress(RelaxError):  # an error of reading events must not hide the run's error
            await self._record_events(recorder)
        account = total([self._former, await self._account()])
        ending = "diverged" if isinstance(error, Diverged) else "failed"
        # A first start that fails more likely needs a person, and a retry would fill a full disk again.
        works = self._started or self._prepared.death is not None
        retry = works and isinstance(error, InfrastructureError) and not isinstance(error, LastingFailure)
        facts = {"error": str(error), "exit_code": error.exit_code, "retry": retry}
        recorder.write(RunFinished(ending, {**account, **self._unchecked, **facts}))

    async def _start_runner(self, stage: PreparedStage) -> bool:
        """Start the runner; return False if a stop came first, and leave it to `close` to end started processes."""
        starting = asyncio.ensure_future(self._runner.start(stage.launch))
        stopped = asyncio.ensure_future(self._stop_asked.wait())
        with waiting_for("starting the roles' processes"):
            await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False

    async def _wait_until_ready(self, recorder: Recorder) -> bool:
        """Wait until every role has left `starting`; return False if a stop came first. Raises the error of a role."""
        starting = set(self._running)
        doing: dict[str, str] = {}

        def shown() -> str:  # a role of this process has its own lines
            return "starting " + ", ".join(f"{role}{doing.get(role, '')}" for role in sorted(starting))

        with waiting_for(shown):
            while starting and not self._stop_reason:
                await asyncio.sleep(WATCH_S)
                beats = await self._poll_roles(recorder)
                starting -= {beat.role for beat in beats if beat.state != "starting"}
                doing = {beat.role: f" ({beat.doing})" for beat in beats if beat.pid != os.getpid()}
        return not starting

    async def _watch(self, stage: PreparedStage, recorder: Recorder) -> list[str]:
        """Record events until every role has returned; meanwhile pass requests, and a stop, to the roles.

        After a stop, roles with state get the configured grace. When only stateless roles are left, these get
        STATELESS_GRACE_S.

        Returns the roles with state that had not stopped in time. Stateless roles are not returned, because a resume
        restores everything that they lose.
        """
        stop_sent_at: float | None = None
        polled_at = float("-inf")
        catalogue, table, target = self._prepared.catalogue, stage.config.checkpoint, self._prepared.catalogue.target
        autoscaler: Autoscaler | None = None
        if (autoscale := stage.config.autoscale) is not None:
            policy, least = catalogue.build(autoscale.chosen, ScalingPolicy), stage.config.placement.rollout.least
            made = catalogue.part("relax_autoscaler", policy=policy, limits=autoscale, min_engines=least)
            autoscaler = cast(Autoscaler, made)
        scaling, scales = autoscaler.start() if autoscaler else None, True
        stateful = {role for role in self._running if not cast(type[Role], target("role", role)).stateless}
        while self._running:
            await self._record_events(recorder, WATCH_S)
            if self._clock.now() - polled_at >= WATCH_S:  # events come more often, but each poll costs several calls
                polled_at = self._clock.now()
                await self._poll_roles(recorder)
                signals = recorder.signals()
                if signals and autoscaler and scales and not self.stopping:
                    scaling, event = autoscaler.decide(scaling, signals, signals.at)
                    if event is not None:
                        recorder.write(event)
                    if isinstance(event, ScalingProposed) and event.target is not None:
                        key = f"autoscale-{uuid.uuid4().hex}"
                        self._commands.append(ScaleRequest(key, event.pool, event.target, keep_partial=True))
                self._log(recorder)
                commands, self._commands = self._commands, []
                for command in commands:
                    if isinstance(command, Autoscale):
                        scales, scaling = command.enabled, autoscaler.start() if autoscaler else None
                        said = f"a user turned autoscaling {'on' if scales else 'off'}"
                        recorder.write(Logged("info", CONTROLLER, said, asdict(command)))
                        continue
                    receivers = self._running & RECEIVERS.get(type(command), stateful)
                    if isinstance(command, ScaleRequest):
                        receivers = {role_of(stage.config, command.pool)}
                    for role in receivers:
                        await self._runner.run_status.command(role, command)
            if self._stop_reason and stop_sent_at is None:
                stop_sent_at = self._clock.now()
                for role in stage.launch.plan.roles:
                    await self._runner.run_status.command(role, Stop())
            if stop_sent_at is not None:
                grace_s = table.preemption_grace_s if self._preempted else table.grace_s
                if self._clock.now() - stop_sent_at > (grace_s if stateful & self._running else STATELESS_GRACE_S):
                    break
        self._log(recorder)
        return sorted(stateful & self._running)

    def _log(self, recorder: Recorder) -> None:
        """Record what programs have logged since the last call."""
        recorder.log([one for one in self._commands if isinstance(one, LogMetrics | ClearMetrics | LogError)])
        self._commands = [one for one in self._commands if not isinstance(one, LogMetrics | ClearMetrics | LogError)]

    async def _poll_roles(self, recorder: Recorder) -> tuple[Heartbeat, ...]:
        """Display the roles' heartbeats, and find the roles that ended. Raises the error of a role that failed."""
        heartbeats = await self._runner.run_status.heartbeats()
        recorder.heartbeats(heartbeats)
        for end in await self._runner.ended(0.0):
            self._running.discard(end.role)
            if isinstance(end.error, RelaxError):
                raise end.error
            if end.error is not None:
                raise RelaxError(f"role {end.role}: {type(end.error).__name__}: {end.error}") from end.error
        return heartbeats

    async def _record_events(self, recorder: Recorder, wait_s: float = 0.0) -> None:
        run_status = getattr(self._runner, "run_status", None)
        if run_status is None:
            return  # the runner failed before it created its run status
        for number, event in await run_status.events(self._last_event, wait_s):
            self._last_event = number
            recorder.handle(number, event)
            if isinstance(event, FirstStepSeen):
                add_facts(self._first_facts, event.facts)
            elif isinstance(event, StepFinished) and event.step == 1:
                self._check_first_step(event.metrics, recorder)

    def _check_first_step(self, metrics: Mapping[str, float], recorder: Recorder) -> None:
        """Record the checks of the stage's first step. Raises Diverged if a failed check is to stop the run."""
        config = self._stage.config
        if config.guards.first_step == "off":
            return
        facts = FirstStepFacts(self._stage.launch.config, metrics, self._first_facts)
        checks = first_step(facts, self._prepared.catalogue)
        if not checks:
            self._unchecked = {"first_step": "no plugin checked the first step"}
            return
        recorder.write(FirstStepChecked(1, tuple(check.plain() for check in checks)))
        failed = [check.name for check in checks if check.state == "failed"]
        if failed and config.guards.first_step == "stop":
            raise Diverged(f"guards.first_step is stop: {'; '.join(fault_lines(checks)[: len(failed)])}")

    async def _account(self) -> dict[str, object]:
        """Return the counts of the samples; empty if the bus never started or is lost."""
        try:
            account, measured = await self._runner.bus.account(), await self._runner.bus.statistics()
        except (AttributeError, RelaxError):
            return {}
        return {
            **{name: value for name, value in measured.items() if name in HISTOGRAMS and value},
            "samples_issued": account.issued,
            "samples_trained": account.trained,
            "samples_dropped": dict(account.dropped),
            "samples_in_flight": account.in_flight,
            "balanced": account.balanced,
        }


def _sweep_weights(launch: Launch) -> None:
    """Delete published weights that are never read again.

    Before the roles start, these are weights of killed starts; after the roles end, the run's own weights. Weights of a
    live run, and of a later start of this run, stay.
    """
    sweep(launch.run_id)
    sweep_abandoned()
    with contextlib.suppress(InfrastructureError), launch.epoch.hold() if launch.epoch else contextlib.nullcontext():
        sweep_published(launch.run_dir)


def total(accounts: Iterable[Mapping[str, Any]]) -> dict[str, object]:
    """Add up accounts of several stages: numbers, and counts by reason or length; a flag must be true in each."""
    added: dict[str, Any] = {}
    for account in accounts:
        for key, value in account.items():
            if isinstance(value, bool):
                added[key] = value and added.get(key, True)
            elif isinstance(value, Mapping):
                added[key] = total((added.get(key, {}), value))
            elif isinstance(value, int | float):
                added[key] = value + added.get(key, 0)
    return added
