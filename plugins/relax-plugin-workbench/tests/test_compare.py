# SPDX-License-Identifier: Apache-2.0
"""Two evaluations on the same tasks: their paired difference, its error, its interval, and `relax compare`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from relax_plugin_workbench.compare import compare, paired_difference
from typer.testing import CliRunner, Result

from relax_core.api.errors import ConfigError
from relax_core.api.events import EvalFinished
from relax_core.cli.main import app
from relax_core.observe.recorder import Recorder
from relax_core.observe.run_directory import RunDirectory
from tests.clocks import HandClock

FIRST = {"a": (0.0, 0.0), "b": (1.0, 0.0), "c": (1.0,), "d": ()}
SECOND = {"a": (1.0, 0.0), "b": (1.0, 0.0), "c": (1.0, 1.0), "e": (1.0,)}
Tasks = Mapping[str, tuple[float, ...]]


@pytest.fixture
def evaluated(write_run: Callable[..., Path], clock: HandClock, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run with evaluations: (step, set) -> rewards by task."""

    def write(name: str, evaluations: Mapping[tuple[int, str], Tasks], temperature: float = 1.0) -> Path:
        path = write_run(tmp_path, steps=1, ending=None, name=name)
        recorder = Recorder(RunDirectory.reopen(path), clock=clock)
        for (step, of), tasks in evaluations.items():
            recorder.write(EvalFinished(step, of, 0.5, 4, temperature, tasks=tasks))
        recorder.close()
        return path

    return write


def _relax(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_difference_is_over_the_tasks_that_both_have_judged() -> None:
    found = paired_difference(FIRST, SECOND)
    assert found is not None
    assert (found.tasks, found.left_out, found.better, found.worse) == (3, 1, 1, 0)
    assert (found.first, found.second) == pytest.approx((0.5, 2 / 3))
    assert found.difference == pytest.approx(1 / 6)
    assert found.standard_error == pytest.approx(statistics.stdev([0.5, 0.0, 0.0]) / math.sqrt(3))
    assert found.low == 0.0 and found.high == pytest.approx(0.5)
    assert paired_difference({"a": (1.0,)}, {"b": (1.0,)}) is None


@settings(max_examples=10)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=20))
def test_a_comparison_the_other_way_round_has_the_opposite_difference(pairs: list[tuple[float, float]]) -> None:
    before, after = ({str(at): (pair[side],) for at, pair in enumerate(pairs)} for side in (0, 1))
    one, other = paired_difference(before, after), paired_difference(after, before)
    assert one is not None and other is not None
    assert (one.difference, one.standard_error) == pytest.approx((-other.difference, other.standard_error))
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))
    assert (one.better, one.worse) == (other.worse, other.better)
    assert one == paired_difference(before, after), "the same seed gives the same interval"


def test_what_both_evaluations_have_in_common_cancels() -> None:
    """Tasks that differ much, and a gain of 0.1 in each: pairing leaves no error at all."""
    random = np.random.default_rng(3)
    hard = {str(at): (float(value),) for at, value in enumerate(random.random(40))}
    gained = {task: (rewards[0] + 0.1,) for task, rewards in hard.items()}
    found = paired_difference(hard, gained)
    assert found is not None and found.standard_error < 1e-12
    assert (found.low, found.high) == pytest.approx((0.1, 0.1))


def test_the_interval_is_that_of_all_resamples_of_a_few_tasks() -> None:
    """Three tasks have 27 resamples; the bootstrap's percentiles are those of their means, in float64."""
    gains = [0.3, -0.1, 0.4]
    found = paired_difference({str(at): (0.0,) for at in range(3)}, {str(at): (gain,) for at, gain in enumerate(gains)})
    means = [statistics.fmean(gains[at] for at in (a, b, c)) for a in range(3) for b in range(3) for c in range(3)]
    assert found is not None
    assert (found.low, found.high) == pytest.approx((min(means), max(means)))


def test_two_runs_and_two_steps_are_compared_by_set(evaluated: Callable[..., Path]) -> None:
    one = evaluated("one", {(0, "held"): FIRST, (5, "held"): FIRST, (5, "other"): {"z": (1.0,)}})
    two = evaluated("two", {(4, "held"): SECOND, (8, "held"): FIRST}, temperature=0.5)
    (found,) = compare(str(one), f"{two}@4")
    assert (found.set_name, found.first_step, found.second_step, found.temperatures) == ("held", 5, 4, (1.0, 0.5))
    assert found.paired == paired_difference(FIRST, SECOND)
    (same,) = compare(f"{two}@8", f"{two}@4")
    assert (same.first_step, same.second_step, same.paired) == (8, 4, found.paired)
    (along,) = compare(str(two))
    assert (along.first_step, along.second_step) == (4, 8)
    with pytest.raises(ConfigError, match=r"no task of the same set other.*steps 0, 5 and 4, 8"):
        compare(str(one), str(two), "other")
    with pytest.raises(ConfigError, match="rewards by task of the steps 4, 8"):
        compare(f"{two}@4")
    with pytest.raises(ConfigError, match="rewards by task of the steps 4, 8 and 0, 5"):
        compare(f"{two}@5", str(one))


def test_the_command_prints_a_table_or_a_document_and_says_what_differs(evaluated: Callable[..., Path]) -> None:
    one, two = evaluated("one", {(5, "held"): FIRST}), evaluated("two", {(4, "held"): SECOND}, temperature=0.5)
    said = _relax(one, two)
    assert "held" in said.stdout and "+0.167" in said.stdout and "+0.000 to +0.500" in said.stdout
    assert "1 tasks are judged in only one evaluation" in said.stderr and "temperatures differ (1, 0.5)" in said.stderr
    document = json.loads(_relax(one, two, "--json", "--seed", "3").stdout)
    assert (document["schema"], document["seed"]) == ("relax.compare/1", 3)
    assert document["sets"][0]["paired"]["tasks"] == 3


def test_undone_evaluations_are_not_compared_and_repeated_ones_count_once(evaluated: Callable[..., Path]) -> None:
    path = evaluated("one", {(0, "held"): FIRST, (4, "held"): FIRST, (6, "held"): FIRST})
    run = RunDirectory.reopen(path)
    run.rewind(4)
    run.append_evaluation(4, "held", 1.0, SECOND)
    run.close()
    (found,) = compare(str(path))
    assert (found.first_step, found.second_step, found.paired) == (0, 4, paired_difference(FIRST, SECOND))


def test_a_damaged_record_is_named_with_its_run(evaluated: Callable[..., Path]) -> None:
    path = evaluated("one", {(0, "held"): FIRST})
    (path / "evaluations.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="unexpected content"):
        compare(str(path))
