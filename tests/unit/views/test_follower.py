# SPDX-License-Identifier: Apache-2.0
"""A run watched from outside: what its files say arrives once, in order, also after the run went back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from relax_core.api import events
from relax_core.api.events import Event
from relax_core.api.role import Heartbeat
from relax_core.api.weights import Version
from relax_core.observe.event_log import EventLog
from relax_core.observe.redaction import Redactor
from relax_core.observe.run_directory import RunDirectory
from relax_core.views.display import WIDTH
from relax_core.views.follower import LineFollower, RunFollower
from relax_core.views.run import RunView


class Shown:
    """A display that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.beats: tuple[Heartbeat, ...] = ()

    def event(self, event: Event) -> None:
        self.events.append(event)

    def heartbeats(self, beats: tuple[Heartbeat, ...]) -> None:
        self.beats = beats

    def close(self) -> None: ...

    def steps(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, events.StepFinished)]


def write_events(path: Path, *told: Event) -> None:
    log = EventLog(path, Redactor(), stderr=False)
    for event in told:
        log.write(event)
    log.close()


def write_metrics(path: Path, text: str) -> None:
    with (path / "metrics.jsonl").open("a") as metrics:
        metrics.write(text)


def test_a_run_under_way_is_shown_from_its_last_steps_on(write_run: Callable[..., Path], tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=60, ending=None)
    follower, shown = RunFollower(RunView(path)), Shown()
    state = follower.look(shown, time.time())
    assert shown.steps() == list(range(61 - WIDTH, 61)) and not state.ended
    (actor, rollout) = shown.beats
    assert (actor.role, rollout.doing) == ("actor", "generating 24 samples")
    status = RunView(path).status()
    assert actor.waits[0].since == status["written_at"] - 4, "waits are in seconds of the wall clock"
    again = Shown()
    follower.look(again, time.time())
    assert again.events == []
    write_metrics(path, '{"step": 61, "time": 5.0, "reward/mean": 0.5}\n')
    write_events(path, events.StepFinished(61, {}))
    follower.look(again, time.time())
    write_metrics(path, '{"step": 61, "time": 5.0, "time/bubble_fraction": 0.1}\n{"step": 62, "time": 6.0, "rew')
    write_events(path, events.StepMeasured(61, {}), events.StepFinished(62, {}))
    follower.look(again, time.time())
    assert again.events == [
        events.StepFinished(61, {"reward/mean": 0.5}),
        events.StepMeasured(61, {"reward/mean": 0.5, "time/bubble_fraction": 0.1}),
    ], "and half a line is none"


def test_a_run_that_went_back_shows_its_repeated_steps(write_run: Callable[..., Path], tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=12, ending=None)
    follower, shown = RunFollower(RunView(path)), Shown()
    follower.look(shown, time.time())
    RunDirectory.open(path).rewind(8)
    follower.look(back := Shown(), time.time())
    write_metrics(path, '{"step": 9, "time": 7.0, "reward/mean": 0.5}\n')
    write_events(path, events.StepFinished(9, {}))
    follower.look(back, time.time())
    assert back.steps() == [9]
    write_metrics(path, '{"step": 10, "time": 8.0, "reward/mean": 0.5}\n')
    write_events(path, events.StepFinished(10, {}))
    RunFollower(RunView(path)).look(later := Shown(), time.time())
    assert later.steps() == list(range(1, 11)), "undone steps are not shown, and repeated steps are shown once"


def test_failures_and_the_end_are_shown(write_run: Callable[..., Path], tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=3, ending=None)
    follower, shown = RunFollower(RunView(path)), Shown()
    told: tuple[Event, ...] = (
        events.RoleFailed("rollout", "it died", 4, False), events.RoleRecovered("rollout", 2.0),
        events.EvalFinished(3, "a", 0.5, 8, 1.0), events.GuardFired(3, "reward", "warn", "it fell", folder="guards/x"),
        events.RunRestarted(2, "it died", 1, 3), events.Logged("warning", "actor", "look here", {"seconds": 3}),
    )  # fmt: skip
    write_events(path, *told, events.RolledBack(2, Version("actor", 1, 2), "it died"))
    follower.look(shown, time.time())
    assert tuple(shown.events[-7:]) == (*told, events.RolledBack(2, Version("actor", 1, 2), "it died"))
    ended = write_run(tmp_path, steps=3, ending="stopped", name="other")
    follower, shown = RunFollower(RunView(ended)), Shown()
    assert follower.look(shown, time.time()).ended and shown.events[-1] == events.RunFinished("stopped", {})


def test_lines_that_are_whole_are_given_once(tmp_path: Path) -> None:
    lines = LineFollower(tmp_path / "lines.jsonl")
    assert lines.added() == []
    with (tmp_path / "lines.jsonl").open("w") as file:
        file.write('{"a": 1}\n{"a"')
        file.flush()
        assert lines.added() == [{"a": 1}]
        file.write(": 2}\n")
    assert lines.added() == [{"a": 2}] and lines.added() == []
