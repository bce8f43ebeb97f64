# SPDX-License-Identifier: Apache-2.0
"""Conducts the stages of a run one after another: one recorder, a runner and a conductor for each.

A stage that does not finish ends the run; what it came to is told as of all stages together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relax_core.api.clock import Clock
from relax_core.control.conduct import Conductor, Part, make_recorder, total
from relax_core.control.prepare import Prepared, PreparedStage
from relax_core.control.runner import make_runner
from relax_core.control.stages import places, point_to_export
from relax_core.observe.recorder import Display, Recorder
from relax_core.runners.launch import Runner


class Succession:
    """A run with stages under way."""

    def __init__(
        self, prepared: Prepared, runner: Runner, display: Display | None = None, clock: Clock | None = None
    ) -> None:
        """`runner`: of the first stage to be run."""
        self._prepared, self._display, self._clock = prepared, display, clock
        self._runner: Runner | None = runner
        self._present: Conductor | None = None
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
        part = Part(stage is stages[0], stage is stages[-1], stage.first_step, former)
        self._runner, self._present = None, Conductor(own, runner, clock=self._clock, part=part)
        if self._stop_reason:
            self._present.stop(self._stop_reason)
        return await self._present.play(recorder)


def _without_steps(account: Mapping[str, Any]) -> dict[str, Any]:
    """Steps are the recorder's to count."""
    return {key: value for key, value in account.items() if key != "steps"}
