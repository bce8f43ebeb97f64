# SPDX-License-Identifier: Apache-2.0
"""`profile.steps` records the actor and an engine in these steps, and says where the files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.api.events import Logged, RoleFailed, StepFinished
from relax_core.api.run_commands import Profile
from relax_core.observe.event_log import EventLog
from relax_core.observe.redaction import Redactor
from relax_core.views.follower import ProfileCount
from relax_core.views.run import RunView
from tests.unit.roles.simulated_run import SimulatedRun
from tests.unit.roles.test_recovery import dies_in


def files_of(run: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((run / "profile").glob("*actor*"))}


def told(outcome: Any) -> list[tuple[str, str]]:
    logged = [event for event in outcome.told(Logged) if "profile" in event.message and event.role == "actor"]
    return [(event.level, event.message) for event in logged]


def test_the_chosen_steps_are_profiled_on_the_first_rank(tmp_path: Path) -> None:
    outcome = SimulatedRun(tmp_path, steps=4, profile={"steps": [2, 4]}).run()
    assert files_of(tmp_path) == {"step-000002-actor-rank-0": "2", "step-000004-actor-rank-0": "4"}
    assert [level for level, _ in told(outcome)] == ["info", "info"]
    assert len(outcome.of("actor-rank", "start_profile")) == 2


def test_a_trace_above_the_limit_is_a_warning_that_names_the_option(tmp_path: Path) -> None:
    trainer = {"name": "scripted-trainer", "trace_bytes": 3_000_000}
    outcome = SimulatedRun(tmp_path, steps=1, trainer=trainer, profile={"steps": [1], "max_mb": 2}).run()
    ((level, message),) = told(outcome)
    assert level == "warning" and "3 MB: raise profile.max_mb" in message


def test_a_step_that_is_trained_again_is_profiled_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint": {"every": 1}, "profile": {"steps": [3]}}
    SimulatedRun(tmp_path, steps=3, **settings).run(dies_in("accumulate", "stop_profile", after=2))
    assert files_of(tmp_path) == {"step-000003-actor-rank-0": "3"}


def test_one_engine_is_profiled_while_it_has_the_weights_before_the_step(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"profile": {"steps": [2]}, "placement": {"mode": "hybrid", "rollout": {"engines": 2}}}

    async def ask(run: SimulatedRun) -> None:
        await run.until_event(StepFinished, 4)
        await run.run_status.command("rollout", Profile(2))

    outcome = SimulatedRun(tmp_path, steps=8, **settings).run(ask)
    first, second, third = sorted((tmp_path / "profile").glob("*engine*"))
    assert (first.name, first.read_text()) == ("step-000002-engine-0", "1")
    begun = int(second.read_text())
    assert begun >= 3 and int(third.read_text()) == begun + 1
    said = [event for event in outcome.told(Logged) if "profile" in event.message and event.role == "rollout"]
    assert [event.fields["step"] for event in said] == [2, begun + 1, begun + 2]
    assert len(outcome.of("engine-0", "profile")) == 3 and not outcome.of("engine-1", "profile")


def test_an_engine_that_records_no_profiles_costs_a_warning(tmp_path: Path) -> None:
    outcome = SimulatedRun(tmp_path, steps=3, engine="scripted-letting-engine", profile={"steps": [2]}).run()
    (said,) = [event for event in outcome.told(Logged) if event.role == "rollout" and "profile" in event.message]
    assert said.level == "warning" and "engine scripted-letting-engine can't record profiles" in said.message
    assert files_of(tmp_path) == {"step-000002-actor-rank-0": "2"}


@pytest.mark.parametrize("methods", [("accumulate",), ("stop_profile",), ("start_profile", "begin_step")])
def test_a_request_outlives_the_actor_s_ranks(tmp_path: Path, methods: tuple[str, ...]) -> None:
    """The ranks die before the profile begins, before its file is written, and twice."""

    async def ask(run: SimulatedRun) -> None:
        await dies_in(*methods, after=1)(run)
        await run.until_event(StepFinished, 1)
        await run.run_status.command("actor", Profile(2))

    outcome = SimulatedRun(tmp_path, steps=8, checkpoint={"every": 1}).run(ask)
    assert len(files_of(tmp_path)) == len(told(outcome)) == 2
    assert len(outcome.told(RoleFailed)) == len(methods)


def test_the_next_steps_are_profiled_on_request_and_counted_from_the_run_s_events(tmp_path: Path) -> None:
    async def ask(run: SimulatedRun) -> None:
        await run.until_event(StepFinished, 1)
        await run.run_status.command("actor", Profile(2))

    outcome = SimulatedRun(tmp_path, steps=8).run(ask)
    first, second = (int(content) for content in files_of(tmp_path).values())
    assert first > 1 and second == first + 1
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "config.toml").touch()
    count = ProfileCount(RunView(tmp_path / "events"))
    log = EventLog(tmp_path / "events", Redactor(()), stderr=False)
    for event in outcome.told(Logged):
        log.write(event)
    log.close()
    assert (count.now(), count.now()) == (2, 2)
