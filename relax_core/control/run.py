# SPDX-License-Identifier: Apache-2.0
"""Conducts one run: starts its roles, writes down what they say, stops them, and says how it ended.

The order at the end is fixed: roles stop, files are finished, processes are gone, the report is written.

The one way to run what was prepared, for the command line and for Python: pick the runner, conduct, report.

Conducts the stages of a run one after another: one recorder, a runner and a conductor for each.

A stage that does not finish ends the run; what it came to is told as of all stages together.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from relax_core.api.clock import Clock, SystemClock
from relax_core.api.errors import RelaxError
from relax_core.api.events import RunFinished, RunStarted
from relax_core.api.role import Role
from relax_core.api.sink import Sink
from relax_core.api.status import Heartbeat
from relax_core.control.prepare import Prepared, PreparedStage
from relax_core.control.runner import make_runner
from relax_core.control.stages import places, point_to_export
from relax_core.observe.observers import Notifier
from relax_core.observe.recorder import Display, Recorder
from relax_core.runners.launch import RoleEnd, Runner
from relax_core.tensor_files.mapped_files import sweep

WATCH_S = 0.25
HISTOGRAMS = ("dropped_lengths", "trained_lengths")
"""Of the bus's statistics: what the summary keeps. They begin anew with a resumed run."""
GRACE_S = 8.0
"""How long roles may take to save and stop before they are ended."""


@dataclass(frozen=True, slots=True)
class RunPart:
    """Which part of a whole run a conductor plays."""

    first: bool = True
    last: bool = True
    first_step: int = 0
    """Steps of the parts before it."""
    former: Mapping[str, Any] = field(default_factory=dict)
    """Their accounts, added up."""


WHOLE = RunPart()


class RunController:
    """One run, or one stage of it, under way."""

    def __init__(
        self, prepared: Prepared, runner: Runner, display: Display | None = None, clock: Clock | None = None,
        part: RunPart = WHOLE,
    ) -> None:  # fmt: skip
        self._prepared, self._runner, self._display, self._part = prepared, runner, display, part
        self._clock = clock or SystemClock()
        self._stop_reason = ""
        self._stopped = asyncio.Event()
        self._seen = 0
        self._running: set[str] = set()

    def stop(self, reason: str = "stopped") -> None:
        """Ask the run to end with a checkpoint; from any callback of the loop."""
        self._stop_reason = self._stop_reason or reason
        self._stopped.set()

    async def run(self) -> dict[str, Any]:
        """Until the run has ended; returns its summary. Raises what made it fail, after writing it down."""
        with make_recorder(self._prepared, self._display, self._clock) as recorder:
            return await self.play(recorder)

    async def play(self, recorder: Recorder) -> dict[str, Any]:
        """`run`, written down by a recorder of somebody else."""
        try:
            return await self._attempt(recorder)
        finally:
            await self._close(recorder)

    async def _attempt(self, recorder: Recorder) -> dict[str, Any]:
        launch = self._prepared.launch
        if launch.resume is not None:
            recorder.rewind(launch.resume.step + self._part.first_step)
        self._running = set(launch.plan.roles)
        try:
            if not (await self._started() and await self._until_ready(recorder)):
                return self._ended(recorder, "stopped", {})
            if self._part.first:
                run_dir = str(self._prepared.directory.path)
                recorder.write(RunStarted(launch.run_id, run_dir, {**launch.config, "steps": self._prepared.steps}))
            busy = await self._watch(recorder)
        except RelaxError as error:
            with contextlib.suppress(RelaxError):  # what can't be read any more must not hide the reason
                await self._drain(recorder)
            own = await self._account()
            recorder.write(RunFinished("failed", {**total([self._part.former, own]), "error": str(error)}))
            raise
        await self._drain(recorder)
        ending = "interrupted" if busy else "stopped" if self._stop_reason else "finished"
        more = {"busy": busy} if busy else {}
        return self._ended(recorder, ending, {**await self._account(), **more})

    def _ended(self, recorder: Recorder, status: str, more: dict[str, Any]) -> dict[str, Any]:
        """Write how it ended, unless others follow; the summary is what the file says."""
        busy = {"busy": more.pop("busy")} if "busy" in more else {}
        if self._part.last or status != "finished":
            recorder.write(RunFinished(status, {**total([self._part.former, more]), **busy}))
        summary = self._prepared.directory.read("summary") or {}
        return summary if self._part is WHOLE else {"status": status, "own": more}

    async def _started(self) -> bool:
        """Whether the runner came up before somebody stopped the run; what it had started by then, `close` ends."""
        starting = asyncio.ensure_future(self._runner.start(self._prepared.launch))
        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False

    async def _watch(self, recorder: Recorder) -> list[str]:
        """Until every role has returned. A stop gives them their grace; returns those that were ended while saving."""
        told_at: float | None = None
        looked_at = float("-inf")
        while self._running:
            await self._drain(recorder, WATCH_S)
            if self._clock.now() - looked_at >= WATCH_S:  # events come faster, and each look costs calls
                looked_at = self._clock.now()
                await self._look(recorder)
            if self._stop_reason and told_at is None:
                told_at = self._clock.now()
                for role in self._prepared.launch.plan.roles:
                    await self._runner.board.command(role, "stop", self._stop_reason)
            if told_at is not None and self._clock.now() - told_at > GRACE_S:
                break
        return sorted(role for role in self._running if self._saves(role))

    def _saves(self, role: str) -> bool:
        """Whether something is lost when it is ended: the others have nothing that a resume does not make anew."""
        return not cast(type[Role], self._prepared.catalogue.target("role", role)).stateless

    async def _until_ready(self, recorder: Recorder) -> bool:
        """Whether every role has said more than that it starts, before a stop; one that can't start ends the run here."""
        starting = set(self._running)
        while starting and not self._stop_reason:
            await asyncio.sleep(WATCH_S)
            starting -= {beat.role for beat in await self._look(recorder) if beat.state != "starting"}
        return not starting

    async def _look(self, recorder: Recorder) -> tuple[Heartbeat, ...]:
        """At role states and ends."""
        beats = await self._runner.board.beats()
        recorder.beats(beats)
        for end in await self._runner.ended(0.0):
            self._take(end)
        return beats

    def _take(self, end: RoleEnd) -> None:
        self._running.discard(end.role)
        if isinstance(end.error, RelaxError):
            raise end.error
        if end.error is not None:
            raise RelaxError(f"role {end.role}: {type(end.error).__name__}: {end.error}") from end.error

    async def _drain(self, recorder: Recorder, wait_s: float = 0.0) -> None:
        board = getattr(self._runner, "board", None)
        if board is None:
            return  # it never came so far
        for number, event in await board.events(self._seen, wait_s):
            self._seen = number
            recorder.handle(number, event)

    async def _account(self) -> dict[str, Any]:
        """What became of the samples; nothing where the bus never came up or is lost."""
        try:
            account, measured = await self._runner.bus.account(), await self._runner.bus.statistics()
        except (AttributeError, RelaxError):
            return {}
        return {
            **{name: measured[name] for name in HISTOGRAMS if measured.get(name)},
            "samples_issued": account.issued,
            "samples_trained": account.trained,
            "samples_dropped": dict(account.dropped),
            "samples_in_flight": account.in_flight,
            "balanced": account.balanced,
        }

    async def _close(self, recorder: Recorder) -> None:
        await self._runner.close()
        sweep(self._prepared.launch.run_id)


def make_recorder(prepared: Prepared, display: Display | None = None, clock: Clock | None = None) -> Recorder:
    """Of a run, with its sinks and observers."""
    config, catalogue = prepared.config, prepared.catalogue
    sinks = {choice.name: cast(Sink, catalogue.build(choice.chosen)) for choice in config.sinks}
    observers: dict[str, object] = catalogue.observers().plugins()
    if config.notify.urls:
        urls = [url.reveal() for url in config.notify.urls]
        observers["notify"] = Notifier(urls, config.run.name or prepared.launch.run_id)
    return Recorder(prepared.directory, sinks, observers, display, clock=clock)


def total(accounts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Accounts of several stages as one: numbers and counts added, also those by reason and length, and balanced where all
    are."""
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


class StageRunner:
    """A run with stages under way."""

    def __init__(
        self, prepared: Prepared, runner: Runner, display: Display | None = None, clock: Clock | None = None
    ) -> None:
        """`runner`: of the first stage to be run."""
        self._prepared, self._display, self._clock = prepared, display, clock
        self._runner: Runner | None = runner
        self._present: RunController | None = None
        self._stop_reason = ""

    def stop(self, reason: str = "stopped") -> None:
        """Ask the present stage to end with a checkpoint; no other one begins."""
        self._stop_reason = self._stop_reason or reason
        if self._present is not None:
            self._present.stop(self._stop_reason)

    async def run(self) -> dict[str, Any]:
        """Until the last stage has ended; returns the run's summary."""
        prepared = self._prepared
        former = total(_without_steps(place.account() or {}) for place in places(prepared.directory.path))
        with make_recorder(prepared, self._display, self._clock) as recorder:
            for stage in prepared.stages:
                ended = await self._stage(stage, recorder, former)
                if ended.get("status") != "finished":
                    break
                own = dict(ended["own"])
                stage.place.finish({"steps": stage.config.steps, **own})
                former = total([former, own])
        if prepared.stages[-1].place.account() is not None:
            point_to_export(prepared.directory.path, prepared.stages[-1].place)
        return prepared.directory.read("summary") or {}

    async def _stage(self, stage: PreparedStage, recorder: Recorder, former: Mapping[str, Any]) -> dict[str, Any]:
        recorder.enter(stage.place.name, stage.first_step)
        own = replace(self._prepared, config=stage.config, launch=stage.launch)
        runner = self._runner or make_runner(stage.config, self._prepared.catalogue)
        stages = self._prepared.stages
        part = RunPart(stage is stages[0], stage is stages[-1], stage.first_step, former)
        self._runner, self._present = None, RunController(own, runner, clock=self._clock, part=part)
        if self._stop_reason:
            self._present.stop(self._stop_reason)
        return await self._present.play(recorder)


def _without_steps(account: Mapping[str, Any]) -> dict[str, Any]:
    """Steps are the recorder's to count."""
    return {key: value for key, value in account.items() if key != "steps"}


STOPS = (signal.SIGINT, signal.SIGTERM)
Report = Callable[[str], None]


def run(prepared: Prepared, display: Display | None = None, *, signals: bool = True) -> dict[str, Any]:
    """Conduct a prepared run to its end in a new event loop; returns the summary or raises what made it fail.

    One that was ended by a second signal has the status `interrupted`.
    """
    runner = prepared.ahead.take() if prepared.ahead else make_runner(prepared.config, prepared.catalogue)
    with asyncio.Runner(loop_factory=runner.loop_factory) as loop, contextlib.suppress(asyncio.CancelledError):
        return loop.run(_run(prepared, runner, display, signals))
    return prepared.directory.read("summary") or {"status": "interrupted"}


async def _run(prepared: Prepared, runner: Runner, display: Display | None, signals: bool) -> dict[str, Any]:
    conductor = StageRunner(prepared, runner, display) if prepared.stages else RunController(prepared, runner, display)
    with _listening(conductor) if signals else contextlib.nullcontext():
        return await conductor.run()


@contextlib.contextmanager
def _listening(conductor: RunController | StageRunner) -> Any:
    """Ctrl-C and SIGTERM ask for a stop; a second one ends at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    asked: list[str] = []

    def take(name: str) -> None:
        asked.append(name)
        if len(asked) == 1:
            conductor.stop(name)
        elif task is not None:
            task.cancel()

    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        loop.add_signal_handler(number, take, number.name)
    try:
        yield
    finally:
        for number in STOPS:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
