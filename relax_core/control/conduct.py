# SPDX-License-Identifier: Apache-2.0
"""Conducts one run: starts its roles, writes down what they say, stops them, and says how it ended.

The order at the end is fixed: roles stop, files are finished, processes are gone, the report is written.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, cast

from relax_core.api.clock import Clock, SystemClock
from relax_core.api.errors import RelaxError
from relax_core.api.events import RunFinished, RunStarted
from relax_core.api.sink import Sink
from relax_core.control.prepare import Prepared
from relax_core.observe.notify import Notifier
from relax_core.observe.recorder import Display, Recorder
from relax_core.runners.launch import RoleEnd, Runner

WATCH_S = 0.25
GRACE_S = 8.0
"""How long roles may take to save and stop before they are ended."""


class Conductor:
    """One run under way."""

    def __init__(
        self, prepared: Prepared, runner: Runner, display: Display | None = None, clock: Clock | None = None
    ) -> None:
        self._prepared, self._runner, self._display = prepared, runner, display
        self._clock = clock or SystemClock()
        self._stop_reason = ""
        self._seen = 0
        self._running: set[str] = set()

    def stop(self, reason: str = "stopped") -> None:
        """Ask the run to end with a checkpoint; from any callback of the loop."""
        self._stop_reason = self._stop_reason or reason

    async def run(self) -> dict[str, Any]:
        """Until the run has ended; returns its summary. Raises what made it fail, after writing it down."""
        with self._recorder() as recorder:
            try:
                ending = await self._attempt(recorder)
            finally:
                await self._close(recorder)
            return ending

    def _recorder(self) -> Recorder:
        config, catalogue = self._prepared.config, self._prepared.catalogue
        sinks = {choice.name: cast(Sink, catalogue.build(choice.chosen)) for choice in config.sinks}
        observers: dict[str, object] = catalogue.observers().plugins()
        if config.notify.urls:
            urls = [url.reveal() for url in config.notify.urls]
            observers["notify"] = Notifier(urls, config.run.name or self._prepared.launch.run_id)
        return Recorder(self._prepared.directory, sinks, observers, self._display, clock=self._clock)

    async def _attempt(self, recorder: Recorder) -> dict[str, Any]:
        launch = self._prepared.launch
        if launch.resume is not None:
            recorder.rewind(launch.resume.step)
        self._running = set(launch.plan.roles)
        try:
            await self._runner.start(launch)
            await self._until_ready(recorder)
            recorder.write(RunStarted(launch.run_id, launch.run_dir, launch.config))
            await self._watch(recorder)
        except RelaxError as error:
            await self._drain(recorder)
            recorder.write(RunFinished("failed", {"error": str(error)}))
            raise
        await self._drain(recorder)
        recorder.write(RunFinished("stopped" if self._stop_reason else "finished", await self._account()))
        return recorder.summary(recorder.ending)

    async def _watch(self, recorder: Recorder) -> None:
        """Until every role has returned; a stop gives them their grace, then ends them."""
        told_at: float | None = None
        while self._running:
            await self._drain(recorder, WATCH_S)
            recorder.beats(await self._runner.board.beats())
            for end in await self._runner.ended(0.0):
                self._take(end)
            if self._stop_reason and told_at is None:
                told_at = self._clock.now()
                for role in self._prepared.launch.plan.roles:
                    await self._runner.board.command(role, "stop", self._stop_reason)
            if told_at is not None and self._clock.now() - told_at > GRACE_S:
                raise RelaxError(
                    f"roles {', '.join(sorted(self._running))} did not stop within {GRACE_S:.0f} s; ended them"
                )

    async def _until_ready(self, recorder: Recorder) -> None:
        """Until every role has said more than that it starts; one that can't start ends the run here."""
        starting = set(self._running)
        while starting and not self._stop_reason:
            await asyncio.sleep(WATCH_S)
            beats = await self._runner.board.beats()
            recorder.beats(beats)
            starting -= {beat.role for beat in beats if beat.state != "starting"}
            for end in await self._runner.ended(0.0):
                self._take(end)

    def _take(self, end: RoleEnd) -> None:
        self._running.discard(end.role)
        if isinstance(end.error, RelaxError):
            raise end.error
        if end.error is not None:
            raise RelaxError(f"role {end.role}: {type(end.error).__name__}: {end.error}") from end.error

    async def _drain(self, recorder: Recorder, wait_s: float = 0.0) -> None:
        with contextlib.suppress(AttributeError):  # a runner that never started has no board to read
            for number, event in await self._runner.board.events(self._seen, wait_s):
                self._seen = number
                recorder.handle(number, event)

    async def _account(self) -> dict[str, Any]:
        account = await self._runner.bus.account()
        return {
            "samples_issued": account.issued,
            "samples_trained": account.trained,
            "samples_dropped": dict(account.dropped),
            "samples_in_flight": account.in_flight,
            "balanced": account.balanced,
        }

    async def _close(self, recorder: Recorder) -> None:
        await self._runner.close()
        _sweep(Path(f"/dev/shm/relax-{self._prepared.launch.run_id}"))


def _sweep(directory: Path) -> None:
    """Published weights that nobody reads any more."""
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
