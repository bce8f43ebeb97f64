# SPDX-License-Identifier: Apache-2.0
"""A recorder that is killed at any place has a successor, and the files are those of a record without a kill."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import given, settings, strategies as st

from relax_core.api.events import (
    EvalFinished,
    Event,
    RoleRecovered,
    RolledBack,
    RolloutMeasured,
    SamplesScored,
    Span,
    StepFinished,
    StepMeasured,
    TimeSpent,
    WeightsPublished,
    WorkRetried,
)
from relax_core.api.weights import Version
from relax_core.observe.record_position import RecordPosition
from relax_core.observe.recorder import Recorder
from relax_core.observe.run_directory import RunDirectory

KINDS = ("scored", "measured", "step", "late", "eval", "time", "publish", "recovered", "retried", "rollback")


class Killed(BaseException):
    """The process is killed here."""


class StoppedClock:
    def now(self) -> float:
        return 50.0

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def events_of(kinds: Sequence[str], first_step: int = 0) -> list[tuple[int, Event]]:
    """Number events as the run status of a run does whose steps go on, and now and then back."""
    step, at, spent, found = first_step, 1.0, 0.0, list[tuple[int, Event]]()
    for number, kind in enumerate(kinds, 1):
        at += 0.5
        event: Event
        match kind:
            case "scored":
                event = SamplesScored(step + 1, ({"group_id": number, "response": f"answer {number}"},))
            case "measured":
                event = RolloutMeasured(step + 1 + number % 2, {"reward/mean": number / 7, "samples/scored": 4.0})
            case "step":
                step += 1
                trained = {"samples/trained": 4.0 * step, "tokens/generated": 10.0 + number, "time/step_s": 0.5}
                event = StepFinished(step, trained, at)
            case "late" if step:
                event = StepMeasured(step, {"critic/loss": number / 3})
            case "eval":
                event = EvalFinished(step, "held-out", number / 9, 8, 0.0, samples=({"group_id": number},))
            case "time":
                event = TimeSpent("actor", at, (Span("actor", "work", "fit", spent, at),))
                spent = at
            case "publish":
                event = WeightsPublished(Version("actor", 0, step), 0.1, 5, (), {"write": number / 11})
            case "recovered" | "late":
                event = RoleRecovered("rollout", 1.0)
            case "retried":
                event = WorkRetried("reward", "samples", 2, "it died")
            case _:
                step = step // 2
                event = RolledBack(Version("actor", 1, step), "a rank died")
        found.append((number, event))
    return found


def new_run(root: str) -> RunDirectory:
    run = RunDirectory.create(Path(root) / "run", "run", datetime(2026, 1, 1), Random(0))
    run.write_config("")
    return run


def recorder(run: RunDirectory) -> Recorder:
    return Recorder(run, clock=StoppedClock(), wall=lambda: 1000.0)


def files(run: RunDirectory) -> dict[str, bytes]:
    paths = (run.path / "metrics.jsonl", *sorted((run.path / "samples").iterdir()))
    return {path.name: path.read_bytes() for path in paths if path.exists() and path.stat().st_size}


def killed_after(run: RunDirectory, writes: int) -> None:
    """Let the process that writes a run be killed once it has added to files so many times."""
    left = writes

    def dying(write: Callable[..., None]) -> Callable[..., None]:
        def written(*args: Any, **more: Any) -> None:
            nonlocal left
            write(*args, **more)
            left -= 1
            if left < 0:
                raise Killed

        return written

    run.append_metrics = dying(run.append_metrics)  # type: ignore[method-assign]
    run.append_samples = dying(run.append_samples)  # type: ignore[method-assign]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=30),
    st.lists(st.integers(0, 12), min_size=1, max_size=3),
    st.integers(0, 2),
)
def test_a_record_that_a_successor_goes_on_with_is_that_of_one_process(
    kinds: list[str], kills: list[int], first_step: int
) -> None:
    events = events_of(kinds)
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as broken:
        alone = recorder(run := new_run(whole))
        alone.enter("stage", first_step)
        for numbered in events:
            alone.handle(*numbered)

        now = new_run(broken)
        position: RecordPosition | None = None
        for writes in [*kills, None]:
            if position is not None:
                now = RunDirectory.reopen(now.path, lives=True)
                now.cut(position.sizes)
            if writes is not None:
                killed_after(now, writes)
            successor = recorder(now)
            successor.enter("stage", first_step)
            if position is not None:
                successor.go_on(position, events)
            successor.keep_positions("run-1")
            after = position.number if position is not None else 0
            try:
                for numbered in (each for each in events if each[0] > after):
                    successor.handle(*numbered)
            except Killed:
                now.close()
            position = RecordPosition.read(now.path)
            assert position is not None and position.run_id == "run-1"
        assert files(now) == files(run)
        (one, other) = (each.finish("finished") for each in (alone, successor))
        assert {key: one[key] for key in one if "seconds" not in key and "per_second" not in key} == {
            key: other[key] for key in other if "seconds" not in key and "per_second" not in key
        }
        alone.close()
        successor.close()


def test_a_position_that_was_damaged_is_none(tmp_path: Path) -> None:
    assert RecordPosition.read(tmp_path) is None
    for text in ("{", "[]", '{"schema": "relax.recorded/1", "strange": 1}'):
        (tmp_path / ".recorded.json").write_text(text)
        assert RecordPosition.read(tmp_path) is None


def test_what_was_asked_of_a_run_that_lives_is_not_forgotten_when_it_is_reopened(tmp_path: Path) -> None:
    run = new_run(str(tmp_path))
    run.write_config("")
    run.close()
    run.request("stop")
    lives = RunDirectory.reopen(run.path, lives=True)
    assert lives.take_request("stop")
    lives.request("stop")
    lives.close()
    RunDirectory.reopen(run.path).close()
    assert not run.is_requested("stop")
