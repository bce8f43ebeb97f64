# SPDX-License-Identifier: Apache-2.0
"""Paired comparison of two evaluations on the same tasks, of one run or of two.

Both evaluations draw a task with the same seeds if their runs have the same `seed`, so much of the noise cancels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax_core.api.errors import ConfigError
from relax_core.runs import open_run, readable
from relax_plugin_workbench.eval_result import EvalResult, is_result, read_result

RESAMPLES, AT_ONCE = 10_000, 100
"""Resamples of the bootstrap, and those that are in memory at a time."""
INTERVAL = (2.5, 97.5)
"""Percentiles of the bootstrap's interval."""


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The difference of two evaluations, second minus first, over the tasks that both have judged."""

    tasks: int
    """Number of tasks that both evaluations have judged."""
    left_out: int
    """Number of tasks that only one of the evaluations has judged."""
    first: float
    """Mean over the common tasks of the task's mean reward."""
    second: float
    difference: float
    standard_error: float
    """Standard error of `difference`, from the differences of the tasks; 0 for a single task."""
    low: float
    """2.5th percentile of the difference under the paired bootstrap."""
    high: float
    """97.5th percentile."""
    better: int
    """Number of tasks whose mean reward is higher in the second evaluation."""
    worse: int


@dataclass(frozen=True, slots=True)
class SetComparison:
    """Two evaluations of one set, and their difference."""

    set_name: str
    first_step: int
    second_step: int
    temperatures: tuple[float, float]
    paired: PairedDifference


def paired_difference(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]], seed: int = 0
) -> PairedDifference | None:
    """Compare the rewards of each task, by task; return None if no task is judged in both.

    The interval is the percentile interval of the paired bootstrap (Efron and Tibshirani 1993, chapter 13): tasks are
    drawn with replacement `RESAMPLES` times, and a task brings its difference. Raises ValueError for a reward that is
    not finite.
    """
    judged = [{task for task, rewards in rewards_of.items() if rewards} for rewards_of in (first, second)]
    tasks = sorted(judged[0] & judged[1])
    if not tasks:
        return None
    before, after = ([statistics.fmean(rewards_of[task]) for task in tasks] for rewards_of in (first, second))
    differences = np.subtract(after, before)
    if not np.isfinite(differences).all():
        raise ValueError("a reward that is not finite")
    random = np.random.default_rng(seed)
    drawn = (random.integers(len(tasks), size=(AT_ONCE, len(tasks))) for _ in range(RESAMPLES // AT_ONCE))
    means = [differences[places].mean(axis=1) for places in drawn]
    low, high = np.percentile(means, INTERVAL)
    error = float(differences.std(ddof=1)) / math.sqrt(len(tasks)) if len(tasks) > 1 else 0.0
    return PairedDifference(
        len(tasks), len(judged[0] ^ judged[1]), statistics.fmean(before), statistics.fmean(after),
        float(differences.mean()), error, float(low), float(high),
        int((differences > 0).sum()), int((differences < 0).sum()),
    )  # fmt: skip


def compare(first: str, second: str | None = None, set_name: str = "", seed: int = 0) -> list[SetComparison]:
    """Compare the evaluations of two runs, or of one run, on each set that both have.

    `first` and `second` are RUN, RUN@STEP or the folder of a `relax eval`; without a step, the last evaluation counts.
    Without `second`, the first evaluation of the run `first` is compared with the evaluation that `first` names.
    `set_name`: the only set to compare; empty: all sets. Raises ConfigError if no task is judged in two evaluations.
    """
    path, records, step = _split(first)
    other_path, others, other_step = (path, records, step) if second is None else _split(second)
    with readable(path), readable(other_path):
        before = _by_set(records, step) if second is not None else _by_set(records[::-1], None)
        after = _by_set(others, other_step)
        if path == other_path:
            differing = [name for name in before if name in after and before[name]["step"] != after[name]["step"]]
            before = {name: before[name] for name in differing}
        comparisons = compare_records(before, after, set_name, seed)
    if not comparisons:
        every = (records,) if second is None else (records, others)
        steps = [", ".join(map(str, sorted({int(record["step"]) for record in run}))) or "none" for run in every]
        kept = " and ".join(steps)
        got = f"{first} and {second or 'its first evaluation'}, which judged no task of the same set"
        fix = "name two evaluations of the same tasks; the runs keep rewards by task of the steps"
        raise ConfigError("run", f"{got} {set_name}".rstrip(), f"{fix} {kept}")
    return comparisons


def compare_records(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]], set_name: str = "", seed: int = 0
) -> list[SetComparison]:
    """Compare the records of two evaluations by set: keys `step`, `temperature` and `tasks`, the rewards by task."""
    comparisons = []
    for name in before if not set_name else before.keys() & {set_name}:
        start, end = before[name], after.get(name)
        if end is not None and (paired := paired_difference(start["tasks"], end["tasks"], seed)) is not None:
            temperatures = (float(start["temperature"]), float(end["temperature"]))
            comparisons.append(SetComparison(name, int(start["step"]), int(end["step"]), temperatures, paired))
    return comparisons


def compare_results(first: EvalResult, second: EvalResult) -> list[SetComparison]:
    """Compare two evaluations of `relax eval` on each set that both have. Raises ConfigError if they share no task."""
    with readable(first.directory), readable(second.directory):
        comparisons = compare_records(_by_set(first.sets, None), _by_set(second.sets, None))
    if not comparisons:
        got = f"{first.directory}, which shares no set with a judged task with {second.directory}"
        raise ConfigError("--against", got, "name an evaluation of the same tasks")
    return comparisons


def _split(name: str) -> tuple[Path, list[dict[str, Any]], int | None]:
    """Return the path, the evaluations and the step of RUN or RUN@STEP, or of the folder of a `relax eval`."""
    if is_result(Path(name)):
        return Path(name).resolve(), [*read_result(Path(name)).sets], None
    given, _, text = name.rpartition("@")
    run, step = (open_run(given), int(text)) if given and text.isdecimal() else (open_run(name), None)
    with readable(run.path):
        return run.path, run.evaluations(), step


def _by_set(records: Iterable[dict[str, Any]], step: int | None) -> dict[str, dict[str, Any]]:
    """Return the last of the records of a step, or of all steps for None, by set."""
    return {str(record["set"]): record for record in records if step in (None, record["step"])}
