# SPDX-License-Identifier: Apache-2.0
"""Evaluation of weight versions on fixed tasks, with the run's rewards and separate seeds. Training is not affected."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.api.environment import Tool
from relax_core.api.events import EvalFinished
from relax_core.api.family import ModelFamily
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.data.tasks import HOLD_OUT, TaskSet, task_set, unmatched_filters
from relax_core.engines.pool import EnginePool
from relax_core.engines.requests import PendingRequest, SamplingParams
from relax_core.rewards.scorer import RewardScorer
from relax_core.sampling.rows import sample_record
from relax_core.sampling.session import sample_seeds

SEED_STREAM = 0x5EED
"""Value mixed into the run's seed, so that evaluation and training draw with different seeds."""
SHOWN = 16
"""Number of groups of each evaluation set whose samples a run records."""

Samples = Callable[..., Awaitable[Sequence[Trajectory]]]


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One evaluation set: the `indices` of its tasks, its samples per task, and its sampling parameters.

    `max_new_tokens`: most tokens of a turn; None: as in training.
    """

    name: str
    tasks: TaskSet
    indices: Sequence[int]
    samples: int
    sampling: SamplingParams
    max_new_tokens: int | None = None


class Evaluation:
    """The evaluation sets of a run.

    Invariants:
    - The seeds of a sample depend on the run's seed, the content of its task and its number, and on nothing else.
    - Equal tasks of a set count as one task with more samples: they have different seeds and form one cluster.
    """

    def __init__(
        self, sets: Sequence[EvalSet], run: Any, samples: Samples, scorer: RewardScorer, pool: EnginePool,
        shown: int | None = SHOWN,
    ) -> None:  # fmt: skip
        """`shown`: number of groups of each set whose samples are recorded; None: all groups."""
        self._shown = shown
        self._sets, self._run, self._samples, self._scorer, self._pool = sets, run, samples, scorer, pool
        self._draws = {one.name: _draws(one) for one in sets}
        self.done: set[Version] = set()
        """Evaluated versions. A rollback removes the versions of undone steps, so that these steps are due again."""

    def due(self, step: int) -> bool:
        known = any(version.step == step for version in self.done)
        return bool(self._sets) and not known and is_due(self._run, step)

    async def run(self, version: Version, requested: bool = False) -> list[EvalFinished]:
        """Evaluate `version`, which the engines serve, on every set.

        Return an empty list if its step is not due and no evaluation was `requested`.
        """
        if not (requested or self.due(version.step)):
            return []
        self.done.add(version)
        return [await self._one(one, version.step) for one in self._sets]

    async def _one(self, one: EvalSet, step: int) -> EvalFinished:
        draws = self._draws[one.name]
        groups = await asyncio.gather(
            *(self._group(one, index, draw, step) for index, draw in zip(one.indices, draws, strict=True))
        )
        scored_groups = await self._scorer.score(groups)
        tasks: dict[str, list[float]] = {}
        for (key, _), group in zip(draws, scored_groups, strict=True):
            tasks.setdefault(f"{key:016x}", []).extend(scored.value for scored in group if scored.outcome.judged)
        judged = list(tasks.values())
        values = [value for group in judged for value in group]
        mean = statistics.fmean(values) if values else math.nan  # not measured, which is no reward of 0
        failed = sum(map(len, scored_groups)) - len(values)
        records = tuple(
            sample_record(task, trajectory, scored)
            for (task, trajectories), scores in zip(groups[: self._shown], scored_groups, strict=False)
            for trajectory, scored in zip(trajectories, scores, strict=True)
        )
        metrics = {"standard_error": standard_error(judged), "failed": float(failed), **best_of(judged)}
        rewards = {key: tuple(own) for key, own in tasks.items()}
        temperature = one.sampling.temperature
        return EvalFinished(step, one.name, mean, len(values), temperature, metrics, records, tasks=rewards)

    async def _group(
        self, one: EvalSet, index: int, draw: tuple[int, int], step: int
    ) -> tuple[Task, tuple[Trajectory, ...]]:
        task, prompt = one.tasks.rendered(index)
        key, first = draw
        seeds = sample_seeds(self._run.seed ^ SEED_STREAM, key, range(first, first + one.samples))
        turns = EvaluatedTask((one.name, index), step, self._pool)
        sampling = [one.sampling] * one.samples
        played = await self._samples(task, prompt, seeds, sampling, turns, max_new_tokens=one.max_new_tokens)
        return task, tuple(played)


def _draws(one: EvalSet) -> list[tuple[int, int]]:
    """Return (content of 64 bits, number of the first sample) of each task of a set."""
    seen = Counter[int]()
    draws = []
    for index in one.indices:
        key = int.from_bytes(one.tasks.content(index).key[:8])
        draws.append((key, seen[key]))
        seen[key] += one.samples
    return draws


@dataclass(frozen=True, slots=True)
class EvaluatedTask:
    """The `Turns` of one task of an evaluation."""

    key: tuple[str, int]
    """Name of the evaluation set, and index of the task."""
    step: int
    """Step of the evaluated weights."""
    pool: EnginePool

    def sample_started(self, place: int) -> None: ...

    async def generate(self, requests: Sequence[PendingRequest]) -> None:
        """Use only engines with the evaluated version; a slow engine may still have an older version."""
        for request in requests:
            request.group_floor, request.session, request.group = self.step, (*self.key, request.place), self.key
        await self.pool.generate(requests)

    def sample_ended(self) -> None: ...


def standard_error(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the mean of all values, clustered by group (the samples of one task).

    The cluster-robust estimate of Liang and Zeger (1986), with the factor G / (G - 1) for a small number G of groups.
    With one value per group it equals the usual standard error. Return 0 if fewer than two groups have values.
    """
    groups = [group for group in groups if group]
    count = sum(map(len, groups))
    if len(groups) < 2:
        return 0.0
    mean = sum(map(sum, groups)) / count
    apart = sum((sum(group) - len(group) * mean) ** 2 for group in groups)
    return math.sqrt(apart * len(groups) / (len(groups) - 1)) / count


def best_of(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return `best_of_<k>` for k = 2, 4, 8, ... and the size of the largest group.

    `best_of_<k>` is the expected best of k values drawn without replacement from a group, averaged over groups with at
    least k values. For values 0 and 1 it is the unbiased pass@k of Chen et al. (arXiv 2107.03374, eq. 1).
    """
    most = max(map(len, groups), default=0)
    found = {}
    for k in sorted({2**power for power in range(1, most.bit_length())} | ({most} if most > 1 else set())):
        large = [sorted(group) for group in groups if len(group) >= k]
        expected = [sum(value * math.comb(below, k - 1) for below, value in enumerate(group)) / math.comb(len(group), k)
                    for group in large]  # fmt: skip
        found[f"best_of_{k}"] = statistics.fmean(expected)
    return found


def is_due(run: Any, step: int) -> bool:
    """Return True if `[eval]` schedules an evaluation of the weights of this step."""
    every: int = run.eval.every
    if not every:
        return False
    return bool(run.eval.at_start) if step == 0 else step % every == 0 or step == run.steps


def open_tasks(
    context: RunContext, family: ModelFamily, tools: Mapping[str, Sequence[Tool]], trains: bool = True
) -> tuple[TaskSet, Sequence[int], list[EvalSet]]:
    """Open the task files; return (tasks of data.train, indices of the tasks to train on, evaluation sets).

    `tools` is the result of `found_tools`. If not `trains` and the configuration has evaluation sets, `data.train` is
    not opened: the first set is returned in its place.
    """
    run = context.config
    teachers = run.teachers if "teacher" in context.plan.roles else ()
    given = run.eval.sets if run.eval.every else ()
    found = []
    if trains or not given:
        found = [task_set(context, family, "data.train", str(run.data.train), run.data.columns, tools, teachers)]
    for at, table in enumerate(given):
        columns = table.columns or run.data.columns
        found.append(task_set(context, family, f"eval.sets.{at}.path", str(table.path), columns, tools, (), table))
    for error in unmatched_filters(run, found) if trains else ():
        raise error
    tasks = found[0]
    train: Sequence[int] = range(len(tasks))
    held: Sequence[int] = ()
    if trains or not given:
        train, held = tasks.hold_out(run.eval.num_held_out, run.seed, context.run_dir)
    if not run.eval.every:
        return tasks, train, []
    if given:
        sets = []
        for table, own in zip(given, found[-len(given) :], strict=True):
            size, sampling = min(table.size or len(own), len(own)), eval_sampling(run, table.temperature)
            samples = table.samples or run.eval.samples
            sets.append(EvalSet(table.name, own, range(size), samples, sampling, table.max_new_tokens))
        return tasks, train, sets
    return tasks, train, [EvalSet(HOLD_OUT, tasks, held, run.eval.samples, eval_sampling(run, None))]


def eval_sampling(run: Any, own: float | None) -> SamplingParams:
    """Return the sampling parameters of an evaluation set. `own`: the set's temperature, or None.

    The temperature is `own`, else the temperature of `[eval]`, else the rollout's. At temperature 0, neither
    top_p nor top_k truncates.
    """
    chosen = own if own is not None else run.eval.temperature
    temperature = run.rollout.temperature if chosen is None else chosen
    return SamplingParams(temperature, run.rollout.top_p, run.rollout.top_k) if temperature else SamplingParams(0.0)
