# SPDX-License-Identifier: Apache-2.0
"""Failed samples of a run: counts them, and ends the run with one saved sample if they fail alike.

A failed sample is replaced, so without this bound a run whose environment, media or engine always fails would go on for
ever. The rewards' own failures are found sooner, by the scorer; both use the same `CircuitBreaker`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError, LastingFailure, PluginError, RelaxError, one_line
from relax_core.api.options import revealed
from relax_core.api.task import Task
from relax_core.api.trajectory import Outcome
from relax_core.config.run_config import RunConfig
from relax_core.observe.redaction import Redactor, credentials
from relax_core.rewards.breaker import CircuitBreaker, Fault
from relax_core.rewards.host import ENGINE_OUTCOMES, ScoredSample
from relax_core.rewards.scorer import failing_sample
from relax_core.sampling.groups import InflightGroup

FILE = "failing-sample.json"
SHOWN = 4
"""Number of kinds of failures that `relax why` shows."""
TRY = "try it without a run: `relax try config.toml --tasks 1` in the run's folder"
PASSING = ("InfrastructureError", "DeadlineExceeded", "WorkerDied")
"""Errors of engines for which neither the sample nor the engine's code is to blame."""


class SampleFailures:
    """The failed samples of a run's training groups, by outcome and component.

    A task whose prompt is too long is not counted: `data.too_long` and `rollout.refill_limit` decide about such tasks.
    """

    def __init__(self, run: RunConfig, run_dir: str) -> None:
        self._run, self._run_dir = run, run_dir
        self._breaker = CircuitBreaker(limit=run.rollout.failure_limit)
        self._newest: dict[Fault, str] = {}
        """Error of the newest failure of each kind."""

    def record(self, groups: Sequence[InflightGroup], in_play: int) -> None:
        """Count the samples of scored groups; `in_play` is the number of samples that have started and not ended.

        Save a sample and raise an error that names the component if the circuit breaker opens.
        """
        for group in groups:
            issue = (group.issue.group, group.issue.retry)
            for trajectory, scored in zip(group.trajectories, group.scores, strict=True) if not group.unfit else ():
                component = "" if scored.outcome.judged else self._component(group.task, scored)
                if seen := self.count(scored.outcome, component, scored.error, issue, in_play):
                    named = dict([component.partition(" ")[::2]])
                    keep_sample(self._run, self._run_dir, failing_sample(named, group.task, trajectory, scored))
                    raise _error(scored, component, seen)

    def count(self, outcome: Outcome, component: str, error: str, group: Hashable, in_play: int = 0) -> str:
        """Count one sample or row. Return which samples failed if the circuit breaker opens, or ""."""
        fault = None if outcome.judged else (outcome.value, component)
        if fault is not None:
            self._newest[fault] = error
        return self._breaker.record(fault, group, in_play)

    def facts(self) -> Mapping[str, object]:
        """Describe the failures among the newest samples, for `relax why` and `relax status`; empty without any."""
        found = self._breaker.failing()
        kinds = [
            {"outcome": kind, "component": component, "count": count, "error": one_line(self._newest[kind, component])}
            for (kind, component), count in found[:SHOWN]
        ]
        return {"of": self._breaker.size, "kinds": kinds} if kinds else {}

    def _component(self, task: Task, scored: ScoredSample) -> str:
        """Return the component to blame, such as `environment guess-number`."""
        if scored.outcome in (Outcome.ENVIRONMENT_ERROR, Outcome.ENVIRONMENT_TIMEOUT):
            known = {choice.known_as for choice in self._run.environments}
            return f"environment {task.environment if task.environment in known else self._run.environment.known_as}"
        name, named, _ = scored.error.partition(": ")
        if named and name.startswith("reward "):
            return name
        if scored.outcome in ENGINE_OUTCOMES:
            return f"engine {self._run.engine.name}"
        return "media" if scored.outcome is Outcome.MEDIA_ERROR else "rewards"


def keep_sample(run: RunConfig, run_dir: str, document: Mapping[str, Any]) -> None:
    """Write a failing sample to the run directory, without the run's secrets."""
    redactor = Redactor([*revealed(run.dump()), *credentials(os.environ)])
    text = json.dumps(redactor.value(document), indent=1, default=lambda value: redactor.text(str(value)))
    (Path(run_dir) / FILE).write_text(text)


def _error(scored: ScoredSample, component: str, seen: str) -> RelaxError:
    """Return the error with which the run ends: its exit code tells whose failure it is."""
    what = f"samples failed {seen} with {scored.outcome}: {scored.error}"
    got = what.replace("samples failed", "samples that failed", 1)
    end = f"{TRY}; {FILE} there has one of the samples"
    if scored.outcome is Outcome.MEDIA_ERROR:
        return ConfigError("data", got, f"correct or remove such media, or raise the limits of [[media]]; {end}")
    if scored.outcome is Outcome.INVALID_TASK:
        return ConfigError("rewards", got, f"give every task a reward that applies; {end}")
    if scored.outcome is Outcome.ENGINE_TIMEOUT or (component[:6] == "engine" and scored.error.startswith(PASSING)):
        return LastingFailure(f"{component}: {what}; see logs/ and `relax why`; {end}")
    return PluginError(component, f"{what}; correct its code or its options, then {end}", scored.frames)
