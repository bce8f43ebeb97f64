# SPDX-License-Identifier: Apache-2.0
"""Evaluation: fixed tasks, seeds of their own, the same rewards. It never changes training."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.api.events import EvalFinished
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory
from relax_core.data.tasks import TaskSet
from relax_core.engines.pool import EnginePool, Sampling
from relax_core.engines.requests import Completion, GenerateAll, GenerateCall
from relax_core.rewards.scorer import RewardScorer, ScoredSample
from relax_core.sampling.sample_record import sample_record
from relax_core.sampling.session import sample_seed

SEED_STREAM = 0x5EED
"""Keeps evaluation's seeds apart from training's."""
SHOWN = 16
"""Transcripts kept of each evaluation."""

Samples = Callable[..., Awaitable[Sequence[Trajectory]]]


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Tasks to be judged on."""

    name: str
    tasks: TaskSet
    indices: Sequence[int]
    samples: int
    sampling: Sampling


class Evaluation:
    """All evaluation sets of a run."""

    def __init__(
        self, sets: Sequence[EvalSet], run: Any, samples: Samples, scorer: RewardScorer, pool: EnginePool
    ) -> None:
        self._sets, self._run, self._samples, self._scorer, self._pool = sets, run, samples, scorer, pool
        self._done: set[int] = set()

    def due(self, step: int) -> bool:
        return bool(self._sets) and step not in self._done and is_due(self._run, step)

    async def run(self, step: int) -> list[EvalFinished]:
        if not self.due(step):
            return []
        self._done.add(step)
        return [await self._one(one, step) for one in self._sets]

    async def _one(self, one: EvalSet, step: int) -> EvalFinished:
        groups = await asyncio.gather(*(self._group(one, index, step) for index in one.indices))
        judged = await self._scorer.score(groups)
        values = [j.value for group in judged for j in group if j.outcome.judged]
        mean = statistics.fmean(values) if values else 0.0
        failed = sum(len(group) for group in judged) - len(values)
        spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        records = _records(groups[:SHOWN], judged)
        metrics = {"standard_error": spread, "failed": float(failed)}
        return EvalFinished(step, one.name, mean, len(values), one.sampling.temperature, metrics, records)

    async def _group(self, one: EvalSet, index: int, step: int) -> tuple[Task, tuple[Trajectory, ...]]:
        task, prompt = one.tasks.rendered(index)
        seeds = [sample_seed(self._run.seed ^ SEED_STREAM, index, number) for number in range(one.samples)]

        def generator(places: Sequence[int]) -> GenerateAll:
            sessions = [(one.name, index, place) for place in places]
            return _at_least(step, sessions, self._pool.generator([one.sampling] * len(places)))

        return task, tuple(await self._samples(task, prompt, seeds, generator, _unnoticed))


def is_due(run: Any, step: int) -> bool:
    """Whether `[eval]` wants this version of the weights judged."""
    every: int = run.eval.every
    if not every:
        return False
    return bool(run.eval.at_start) if step == 0 else step % every == 0 or step == run.steps


def _at_least(step: int, sessions: Sequence[tuple[str, int, int]], generate: GenerateAll) -> GenerateAll:
    """On engines that have the version which is evaluated: a slow one may still have an older."""

    async def floored(calls: Sequence[GenerateCall]) -> Sequence[Completion]:
        return await generate(
            [
                call._replace(floor=max(call.floor, step), session=session, group=session[:2])
                for call, session in zip(calls, sessions, strict=True)
            ]
        )

    return floored


def _unnoticed() -> None:
    """Nobody counts what is missing of an evaluation."""


def _records(
    groups: Sequence[tuple[Task, Sequence[Trajectory]]], judged: Sequence[Sequence[ScoredSample]]
) -> tuple[dict[str, Any], ...]:
    return tuple(
        sample_record(task, trajectory, judgement)
        for (task, trajectories), judgements in zip(groups, judged, strict=False)
        for trajectory, judgement in zip(trajectories, judgements, strict=True)
    )
