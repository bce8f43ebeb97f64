# SPDX-License-Identifier: Apache-2.0
"""Values that programs log: each is recorded once, in its step, and none replaces a metric of the run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from relax_core.api.errors import ConfigError
from relax_core.api.events import RunStarted, StepFinished
from relax_core.api.run_commands import MAX_VALUES, ClearMetrics, LogError, LogMetrics
from relax_core.observe import logged_values
from relax_core.observe.logged_values import LoggedValues
from relax_core.observe.metrics import Totals
from tests.unit.observe.test_recorder import Remembers, metrics_of, notes, recorder

STEPS = st.integers(0, 5)
VALUES = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), min_size=1)


@given(st.lists(st.tuples(STEPS, VALUES) | STEPS))
def test_the_last_value_of_a_name_is_taken_once_and_not_before_its_step_has_finished(events: list[Any]) -> None:
    logged, expected, finished = LoggedValues(), dict[int, dict[str, float]](), 0
    for event in events:
        if isinstance(event, int):
            finished = max(finished, event)
            due = {step: expected.pop(step) for step in sorted(expected) if step <= finished}
            assert logged.take(finished) == due and logged.take(finished) == {}
        else:
            logged.add(*event)
            expected.setdefault(event[0], {}).update(event[1])
        assert len(logged) == sum(map(len, expected.values())) and not logged.refused
    logged.clear(3)
    assert not expected.pop(3, None) or len(logged) == sum(map(len, expected.values()))
    logged.clear(None)
    assert not len(logged)


def test_values_beyond_the_limits_are_counted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_values, "HELD", 3)
    monkeypatch.setattr(logged_values, "NAMES", 3)
    logged = LoggedValues(["a"])
    logged.add(1, {"a": 1, "b": 2, "c": 3})
    logged.add(2, {"a": 4, "d": 5})  # one value and one name too many
    logged.add(1, {"a": 6})
    assert (logged.take(2), logged.refused) == ({1: {"a": 6, "b": 2, "c": 3}}, 2)
    logged.add(2, {"a": 4, "d": 5})
    assert (logged.take(2), logged.refused) == ({2: {"a": 4}}, 3)


@pytest.mark.parametrize(
    ("values", "step", "said"),
    [
        ({"reward/mean": 1.0}, None, "log it as 'user/reward/mean'"),
        ({"user/a b": 1.0}, None, "use at most 128 letters"),
        ({"user/": 1.0}, None, "use at most 128 letters"),
        ({"user/" + "a" * 130: 1.0}, None, "use at most 128 letters"),
        ({"user/a": float("nan")}, None, "user/a: got nan; log a finite number"),
        ({"user/a": True}, None, "user/a: got True"),
        ({"user/a": 1.0}, -1, "give a step from 0"),
        ({}, None, "give 1 to 1000 at once"),
        ({f"user/{number}": 1.0 for number in range(MAX_VALUES + 1)}, 1, "got 1001 values"),
    ],
)
def test_other_names_and_values_are_refused(values: dict[str, float], step: int | None, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LogMetrics(values, step)
    assert said in str(refused.value)


def test_values_come_with_their_step_or_in_a_line_of_their_own(run_dir: Any, clock: Any) -> None:
    sink = Remembers()
    with recorder(run_dir, clock, sinks={"mine": sink}) as run:
        run.write(RunStarted("r", "", {}))
        run.log(
            [LogMetrics({"user/a": 1}), LogMetrics({"user/b": 2}, 2), LogMetrics({"user/z": 0}, 0), LogError("no disk")]
        )
        run.log([LogMetrics({"user/a": 3}, 1), LogMetrics({"user/lost": 1}, 9), LogMetrics({"user/cleared": 1}, 8)])
        run.log([ClearMetrics(8)])
        run.write(StepFinished(1, {"reward/mean": 0.5}))
        run.log([LogMetrics({"user/late": 4}, 1)])
        run.write(StepFinished(3, {"reward/mean": 0.7}))  # step 2 was trained before a restart
    lines = [{key: value for key, value in line.items() if "/" in key} for line in run_dir.metrics()]
    told = [values for _, values in metrics_of(sink)]
    assert lines == told and [line["step"] for line in run_dir.metrics()] == [step for step, _ in metrics_of(sink)]
    assert [line["step"] for line in run_dir.metrics()] == [0, 1, 1, 2, 3]
    assert lines[0] == {"user/z": 0} and lines[1].items() >= {"user/a": 3, "reward/mean": 0.5}.items()
    assert (lines[2], lines[3]) == ({"user/late": 4}, {"user/b": 2}) and "user/lost" not in lines[4]
    assert [note["message"] for note in notes(run_dir)] == [
        "no disk", "1 logged values are not recorded: their steps have not finished",
    ]  # fmt: skip
    totals = Totals.replay(list(run_dir.metrics()))
    assert (totals.steps, totals.rewards_first) == (3, [0.5, 0.7])
