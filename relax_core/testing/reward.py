# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of rewards: a finite and reproducible score for every response."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, ClassVar

from relax_core.api.reward import BatchReward, GroupReward, Score
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory
from relax_core.config.run_config import DEFAULT_SANDBOX
from relax_core.testing.direct_sandbox import DirectSandbox
from relax_core.testing.number import is_finite
from relax_core.testing.samples import trajectory
from relax_core.testing.scripted_client import ScriptedClient
from relax_core.testing.suite import Suite

Sample = tuple[Task, str]
TOLERANCE = 1e-9
SUM = Task("sum", "What is 2 + 2?", "4")


class RewardSuite(Suite):
    """The suite of a reward; a subclass sets `component`, and `samples` that suit it."""

    kind = "reward"
    slow_modules: ClassVar[tuple[str, ...]] = ("numpy", "sympy", "math_verify")
    samples: ClassVar[Sequence[Sample]] = ((SUM, "4"), (SUM, "5"), (SUM, "The answer is 4."))
    """(task, response) pairs."""
    best: ClassVar[int | None] = None
    """Index of the sample that must score highest; None skips this check."""
    sandbox: ClassVar[str] = DEFAULT_SANDBOX
    """Name of the sandbox for a reward that needs one."""

    @classmethod
    def engine_says(cls, prompt: str) -> str:
        """Return the scripted answer of the engines in `needs_engines`; override this for a different answer."""
        return "1"

    @classmethod
    def judged(cls, reward: Any, samples: Sequence[Sample]) -> list[Any]:
        """Score copies of samples with the reward's method; return one result per sample."""
        return cls.handed(reward, copy.deepcopy(samples))

    @classmethod
    def handed(cls, reward: Any, samples: Sequence[Sample]) -> list[Any]:
        """Score samples like `judged`, but without copying them first."""
        reward.engines = {name: ScriptedClient(name, cls.engine_says) for name in reward.needs_engines}
        if reward.needs_sandbox is not None:
            reward.sandbox = DirectSandbox.of(cls.sandbox, reward.needs_sandbox, cls.files)
        tasks = [_with_columns(task, reward.needs_columns) for task, _ in samples]
        attempts = [trajectory(task, response) for task, (_, response) in zip(tasks, samples, strict=True)]
        return asyncio.run(_judge(reward, tasks, attempts))

    @classmethod
    def exercise(cls, component: Any) -> Any:
        return [plain(result) for result in cls.judged(component, cls.samples)]

    def test_scores_are_finite_numbers(self, made: Any) -> None:
        results = self.judged(made, self.samples)
        assert len(results) == len(self.samples), "the reward must return one score per sample, in order"
        for result in results:
            _check(result)

    def test_gold_answers_score_best(self, made: Any) -> None:
        for task, _ in self.samples:
            gold = made.gold(_with_columns(task, made.needs_columns))
            said = [(task, response) for response in gold.responses] if gold is not None else []
            for (_, response), result in zip(said, self.judged(made, said) if said else (), strict=True):
                assert _value(result) >= gold.best - TOLERANCE, (
                    f"the gold answer read as {gold.read} scores {_value(result)} for {response!r}; it must score Gold.best"
                )

    def test_an_empty_response_is_judged(self, made: Any) -> None:
        for result in self.judged(made, [(task, "") for task, _ in self.samples]):
            _check(result)

    def test_tasks_are_left_as_they_were(self, made: Any) -> None:
        samples = copy.deepcopy(self.samples)
        self.handed(made, samples)
        assert samples == self.samples

    def test_needed_columns_are_names(self) -> None:
        needed = getattr(self.target(), "needs_columns", ())
        assert isinstance(needed, tuple) and all(isinstance(name, str) for name in needed), (
            "needs_columns must be a tuple of column names"
        )

    def test_a_reward_that_asks_a_sandbox_awaits_it(self, made: Any) -> None:
        assert made.needs_sandbox is None or self._waits(made), (
            "a reward with needs_sandbox waits for programs; define its method with `async def`"
        )

    def test_a_reward_that_asks_engines_awaits_them(self, made: Any) -> None:
        needed = made.needs_engines
        assert isinstance(needed, tuple) and all(isinstance(name, str) for name in needed), (
            "needs_engines must be a tuple of pool names"
        )
        assert not needed or self._waits(made), (
            "a reward with needs_engines waits for engines; define its method with `async def`"
        )

    @staticmethod
    def _waits(made: Any) -> bool:
        form = {GroupReward: "score_group", BatchReward: "score_batch"}
        method = next((name for base, name in form.items() if isinstance(made, base)), "score")
        return inspect.iscoroutinefunction(getattr(made, method))

    def test_the_best_sample_scores_highest(self, made: Any) -> None:
        if self.best is None:
            return
        scores = [_value(result) for result in self.judged(made, self.samples)]
        assert scores[self.best] == max(scores) > min(scores)


async def _judge(reward: Any, tasks: Sequence[Task], attempts: Sequence[Trajectory]) -> list[Any]:
    if isinstance(reward, BatchReward):
        return list(await _settled(reward.score_batch(tasks, attempts)))
    if isinstance(reward, GroupReward):
        return [
            r
            for task, one in zip(tasks, attempts, strict=True)
            for r in await _settled(reward.score_group(task, [one]))
        ]
    return [await _settled(reward.score(task, one)) for task, one in zip(tasks, attempts, strict=True)]


async def _settled(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _with_columns(task: Task, needed: Sequence[str]) -> Task:
    """Return the task with a text added in each column that the reward reads but the task lacks."""
    missing = {name: "4" for name in needed if task.column(name) is None}
    return replace(task, metadata={**task.metadata, **missing}) if missing else task


def _check(result: Any) -> None:
    assert isinstance(result, (Score, Real)), f"the reward returned {type(result).__name__}; return a number or a Score"
    score = result if isinstance(result, Score) else Score(float(result))
    for value in (score.value, *score.parts.values(), *score.steps):
        assert is_finite(value), f"the reward returned {value!r}; scores must be finite numbers"


def _value(result: Any) -> float:
    return float(result.value if isinstance(result, Score) else result)


def plain(result: Any) -> Any:
    """Convert a result to plain data that can be compared."""
    if isinstance(result, Score):
        return [
            repr(result.value),
            {name: repr(part) for name, part in result.parts.items()},
            list(map(repr, result.steps)),
        ]
    return repr(float(result)) if isinstance(result, Real) else type(result).__name__
