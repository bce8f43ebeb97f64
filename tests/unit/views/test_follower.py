# SPDX-License-Identifier: Apache-2.0
"""A run watched from outside: what its files say arrives once, in order, also after the run went back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from relax_core.api import events
from relax_core.api.events import Event
from relax_core.api.role import Heartbeat
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


def test_a_run_under_way_is_shown_from_its_last_steps_on(write_run: Callable[..., Path], tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=60, ending=None)
    follower, shown = RunFollower(RunView(path)), Shown()
    state = follower.look(shown, time.time())
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()][-WIDTH:]
    assert (
        shown.steps() == sorted({line["step"] for line in lines if "reward/mean" in line}) and shown.steps()[-1] == 60
    )
    assert not state.ended
    (actor, rollout) = shown.beats
    assert (actor.role, rollout.doing) == ("actor", "generating 24 samples")
    status = RunView(path).status()
    assert actor.waits[0].since == status["written_at"] - 4, "waits are in seconds of the wall clock"
    again = Shown()
    follower.look(again, time.time())
    assert again.events == []
    with (path / "metrics.jsonl").open("a") as metrics:
        metrics.write(
            '{"step": 61, "time": 5.0, "reward/mean": 0.5}\n{"step": 61, "time": 5.0, "time/bubble_fraction": 0.1}\n'
        )
        metrics.write('{"step": 61, "time": 5.0, "eval/a/mean": 0.5, "eval/a/count": 8.0, "eval/a/temperature": 1.0}\n')
        metrics.write('{"step": 62, "time": 6.0, "rew')
    follower.look(again, time.time())
    assert again.events == [
        events.StepFinished(61, {"reward/mean": 0.5}),
        events.StepMeasured(61, {"time/bubble_fraction": 0.1}),
        events.EvalFinished(61, "a", 0.5, 8, 1.0),
    ], "and half a line is none"


def test_a_run_that_went_back_shows_its_repeated_steps(write_run: Callable[..., Path], tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=12, ending=None)
    follower, shown = RunFollower(RunView(path)), Shown()
    follower.look(shown, time.time())
    RunDirectory.open(path).rewind(8)
    follower.look(back := Shown(), time.time())
    with (path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 9, "time": 7.0, "reward/mean": 0.5}\n')
    follower.look(back, time.time())
    assert back.steps() == [9]


def test_failures_and_the_end_are_shown(write_run: Callable[..., Path], tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=3, ending=None)
    follower, shown = RunFollower(RunView(path)), Shown()
    with (path / "logs/controller.jsonl").open("a") as log:
        for record in (
            {"level": "warning", "event": "role failed", "failed": "rollout", "error": "it died", "exit_code": 4},
            {"level": "info", "event": "role recovered", "recovered": "rollout", "seconds": 2.0, "detail": ""},
            {"level": "info", "event": "weights published"},
            {"level": "warning", "event": "run restarted", "step": 2, "reason": "it died", "in_a_row": 1, "limit": 3},
            {"level": "warning", "event": "look here", "from_role": "actor"},
        ):
            log.write(json.dumps(record) + "\n")
    follower.look(shown, time.time())
    assert shown.events[3:] == [
        events.RoleFailed("rollout", "it died", 4, False),
        events.RoleRecovered("rollout", 2.0),
        events.RunRestarted(2, "it died", 1, 3),
        events.Logged("warning", "actor", "look here"),
    ]
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
