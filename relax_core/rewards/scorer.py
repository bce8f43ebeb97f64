# SPDX-License-Identifier: Apache-2.0
"""Scoring of samples: calls each reward for every sample that it applies to, and sums the results to one score.

The score includes the environment's rewards. A failed reward gives the sample an outcome without a score, never a zero.
Rewards run in killable processes. If a reward fails in the same way on sample after sample, it has a bug, and training
on the remaining samples would hide the bug. So the circuit breaker ends the run with exit code 3.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any, TypeAlias

from relax_core.api.component import Chosen
from relax_core.api.engine import ModelClient
from relax_core.api.errors import InfrastructureError, PluginError, RelaxError
from relax_core.api.reward import LARGEST_REWARD
from relax_core.api.role import Clock
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.config.run_config import RewardChoice
from relax_core.data.tasks import applies
from relax_core.engines.model_rpc import model_handlers
from relax_core.observe.process_log import bound_fields
from relax_core.registry.shapes import checked
from relax_core.rewards.breaker import LIMIT, CircuitBreaker
from relax_core.rewards.host import (
    ENGINE_OUTCOMES,
    FUNCTION,
    GoldResult,
    RewardFacts,
    ScoredSample,
    Unit,
    check_results,
    pack_units,
)
from relax_core.rpc.isolated_pool import (
    Handler,
    IsolatedPool,
    Item,
    ItemCrash,
    ItemTimeout,
    PoolSettings,
    ProcessStarter,
    untrusted,
)
from relax_core.rpc.waiting import start_all
from relax_core.sandboxes.pool import SandboxPool

ENVIRONMENT = "environment"
"""Name of the part that logs the environment's own reward."""
SCHEMA = 1
Group = tuple[Task, Sequence[Trajectory]]
Result: TypeAlias = float | ScoredSample
"""The result of a reward for one sample; a score without parts and steps is a plain number."""
Weighed: TypeAlias = tuple["RewardPool", Result]


class RewardScorer:
    """All rewards of a run. `models`: engine pools that rewards may call; `sandboxes`: boxes for their programs."""

    def __init__(
        self, rewards: Sequence[RewardChoice], starter: ProcessStarter, clock: Clock, num_workers: int = 1,
        models: Mapping[str, ModelClient] | None = None, sandboxes: SandboxPool | None = None,
        filters: Sequence[str] | None = None, failure_limit: float = LIMIT,
        functions: Mapping[str, bytes] | None = None,
    ) -> None:  # fmt: skip
        """Make the rewards' pools. `functions`: cloudpickles of the rewards that were passed from Python, by name.

        `filters`: the `only` filters of every reward of the run; None if `rewards` holds all of them.
        `failure_limit`: share of a reward's samples that may fail alike; see `CircuitBreaker`.
        """
        self._clock = clock
        self._started_at: list[float] = []
        """Start times of the open calls of `score`."""
        self._rewards: list[RewardPool] = []
        only_of_all = [one.only for one in rewards] if filters is None else filters
        for table in rewards:
            component = table.chosen
            if (function := (functions or {}).get(table.name)) is not None:
                component = Chosen(FUNCTION, table.known_as, {"function": function})
            pool = RewardPool(
                table, component, starter, num_workers, models or {}, sandboxes, only_of_all, failure_limit
            )
            self._rewards.append(pool)

    async def start(self) -> None:
        await asyncio.gather(*(reward.start() for reward in self._rewards))

    async def answers(self, tasks: Sequence[Task]) -> list[float | None]:
        """Return the reward that each task's own answer earns as a response; None if the rewards do not judge it.

        The answer is scored as it is written and as the rewards state it; the best reward counts. Failures do not count
        for the circuit breakers. A reward of whole groups can't judge an answer alone.
        """
        if not (self._rewards and tasks) or self.judges_groups:
            return [None] * len(tasks)
        groups: list[Group] = []
        for task, golds in zip(tasks, await self.golds(tasks), strict=True):
            asked = (Message("user", task.prompt),) if isinstance(task.prompt, str) else task.prompt
            texts = dict.fromkeys((str(task.answer), *(said for gold in golds.values() for said in gold.responses)))
            groups.append((task, [Trajectory((*asked, Message("assistant", text)), text, ()) for text in texts]))
        found = await self.score(groups, counts=False)
        return [max((one.value for one in scores if one.outcome.judged), default=None) for scores in found]

    async def score(self, groups: Sequence[Group], counts: bool = True) -> list[list[ScoredSample]]:
        """Score each trajectory, in order. Concurrent calls may send their samples to processes together.

        `counts`: count failures for the circuit breakers. Raises CircuitOpen, or the error that made a reward's
        processes unusable.
        """
        start = self._clock.now()
        self._started_at.append(start)
        try:
            by_reward = await start_all(*(reward.score(groups, counts) for reward in self._rewards))
        finally:
            self._started_at.remove(start)
        return [
            [
                self._combine(trajectory, [
                    (reward, result) for reward, found in zip(self._rewards, by_reward, strict=True)
                    if (result := found[at][place]) is not None
                ])
                for place, trajectory in enumerate(trajectories)
            ]
            for at, (_, trajectories) in enumerate(groups)
        ]  # fmt: skip

    @property
    def judges_groups(self) -> bool:
        """Return True if a reward judges the samples of a group together; known after `start`."""
        return any(reward.facts.form == "group" for reward in self._rewards)

    @property
    def reads_golds(self) -> bool:
        """Return True if a reward of the run reads gold answers; known after `start`."""
        return any(reward.facts.reads_golds for reward in self._rewards)

    async def golds(self, tasks: Sequence[Task]) -> list[dict[str, GoldResult]]:
        """Score each task's own gold answer by every reward that reads gold answers; return results by reward's name."""
        found = await start_all(*(reward.golds(tasks) for reward in self._rewards))
        names = [reward.name for reward in self._rewards]
        return [
            {name: own for name, own in zip(names, results, strict=True) if own is not None}
            for results in zip(*found, strict=True)
        ] or [{} for _ in tasks]

    async def stop(self) -> None:
        await asyncio.gather(*(reward.stop() for reward in self._rewards))

    def unanswered(self) -> dict[str, object]:
        """Return the number of unanswered samples of each reward, and the seconds since the oldest open call."""
        unanswered = {reward.name: reward.num_unanswered for reward in self._rewards if reward.num_unanswered}
        if not unanswered or not self._started_at:
            return {}
        return {"rewards": unanswered, "for_s": round(self._clock.now() - min(self._started_at), 3)}

    def _combine(self, trajectory: Trajectory, results: Sequence[Weighed]) -> ScoredSample:
        """Combine the results of all rewards; the first failed reward sets the outcome, and `parts` keep the values.

        Rewards are summed in the order of the configuration, so that sums are the same bit for bit.
        """
        if not trajectory.outcome.judged:
            return ScoredSample(math.nan, outcome=trajectory.outcome, error=str(trajectory.info.get("error", "")))
        if self._rewards and not results and not trajectory.step_rewards and trajectory.outcome is Outcome.FINISHED:
            error = "no reward applies to this task and its environment gave none"
            return ScoredSample(math.nan, outcome=Outcome.INVALID_TASK, error=error)
        for reward, result in results:
            if failed := _failed(result):
                parts: dict[str, float] = {f"{reward.name}/{name}": part for name, part in failed.parts.items()}
                for other, own in results:
                    if _failed(own) is None:
                        parts[other.name] = own.value if isinstance(own, ScoredSample) else own
                error = f"reward {reward.name}: {failed.error}"
                return ScoredSample(math.nan, parts, (), failed.outcome, error, failed.frames)
        steps: tuple[float, ...] = ()
        value = 0.0
        if trajectory.step_rewards:
            steps, value = trajectory.turn_rewards, trajectory.environment_reward
        parts = {ENVIRONMENT: value} if trajectory.step_rewards else {}
        for reward, result in results:
            weight = reward.table.weight
            if isinstance(result, ScoredSample):
                for name, part in result.parts.items():
                    parts[f"{reward.name}/{name}"] = part
                if result.steps:
                    steps = tuple(a + weight * b for a, b in zip_longest(steps, result.steps, fillvalue=0.0))
                result = result.value
            value += weight * result
            parts[reward.name] = result
        if not abs(value) <= LARGEST_REWARD or (steps and not all(abs(step) <= LARGEST_REWARD for step in steps)):
            largest = max((value, *steps), key=abs)
            error = f"the weighted sum of {parts} is {largest}; want at most 1e9 for a sample and each turn: lower the weights"
            return ScoredSample(math.nan, parts, (), Outcome.REWARD_INVALID, error)
        return ScoredSample(value, parts, steps, trajectory.outcome)


class RewardPool:
    """One reward and its processes.

    Invariants:
    - A unit is scored in one call: a sample, a group, or all samples of a `score` call. A failed batch is halved, so
    that only the samples that made the batch fail get a failure.
    - Only a unit that ends its process, or is late, gets a failure; further units in this process are scored again.
    - Once the circuit breaker is open, every waiting and later call raises its error.
    """

    def __init__(
        self, table: RewardChoice, component: Chosen, starter: ProcessStarter, num_workers: int,
        models: Mapping[str, ModelClient], sandboxes: SandboxPool | None, only_of_all: Sequence[str],
        failure_limit: float,
    ) -> None:  # fmt: skip
        self.table, self.name, self._models = table, table.known_as, models
        self._only_of_all = tuple(only_of_all)
        self._sandboxes = sandboxes or SandboxPool(None, starter)
        self.num_unanswered = 0
        """Number of samples without a result."""
        self.facts = RewardFacts("sample", "", (), None, False)
        """Facts about the reward; known after `start`."""
        self._breaker = CircuitBreaker(limit=failure_limit)
        self._num_groups = 0
        """Number of groups of all calls of `score`."""
        self._pool = IsolatedPool(
            [f"reward-{self.name}-{number}" for number in range(num_workers)],
            untrusted(
                component, "relax_core.rewards.host:RewardHost", memory_mb=table.memory_mb,
                inherit_env=table.inherit_env, writable=tuple(map(str, table.writable)),
            ),
            starter,
            PoolSettings(timeout_s=table.timeout_s, opened=self._opened, pack=pack_units, check=check_results),
        )  # fmt: skip

    async def start(self) -> None:
        await self._pool.start()

    async def score(self, groups: Sequence[Group], counts: bool = True) -> list[list[Result | None]]:
        """Score the judged samples of the tasks that the reward applies to; return None for all remaining samples.

        `counts`: count failures for the circuit breaker.
        """
        found: list[list[Result | None]] = [[None] * len(trajectories) for _, trajectories in groups]
        members = [
            [(at, place) for place, trajectory in enumerate(trajectories) if trajectory.outcome.judged]
            for at, (task, trajectories) in enumerate(groups) if applies(self.table.only, task, self._only_of_all)
        ]  # fmt: skip
        if self.facts.form != "group":
            together = [member for own in members for member in own]
            members = [together] if self.facts.form == "batch" else [[member] for member in together]
        units = [own for own in members if own]
        first: int | None = None
        if counts:
            first, self._num_groups = self._num_groups, self._num_groups + len(groups)
        self.num_unanswered += sum(map(len, units))
        try:
            await self._score(units, groups, found, first)
        finally:
            self.num_unanswered -= sum(found[at][place] is None for unit in units for at, place in unit)
        return found

    async def stop(self) -> None:
        await self._pool.stop(RelaxError(f"reward {self.name} was stopped"))

    async def golds(self, tasks: Sequence[Task]) -> list[GoldResult | None]:
        """Score each task's own gold answer; None for a task without a gold answer of this reward."""
        if not self.facts.reads_golds:
            return [None] * len(tasks)
        asked = [applies(self.table.only, task, self._only_of_all) for task in tasks]
        answers = [self._pool.submit([(task, None)]) for task, wanted in zip(tasks, asked, strict=True) if wanted]
        ended = iter(await asyncio.gather(*answers, return_exceptions=True))
        found: list[GoldResult | None] = []
        for wanted in asked:
            answer = next(ended) if wanted else [GoldResult()]
            if isinstance(answer, ItemTimeout):
                late = f"its gold was not scored within timeout_s = {self.table.timeout_s:g} ({self.facts.place})"
                answer = [GoldResult(error=late)]
            elif isinstance(answer, ItemCrash):
                where = f"the process ended twice while it scored its gold ({self.facts.place})"
                answer = [GoldResult(error=f"{where}: {answer}")]
            elif isinstance(answer, BaseException):
                raise answer
            (gold,) = answer
            found.append(gold if gold.read or gold.responses or gold.error else None)
        return found

    def _opened(self, opened: Any) -> Mapping[str, Handler]:
        self.facts = facts = checked(opened, RewardFacts, "start")
        handlers = model_handlers(self._models, f"reward {self.name}", facts.needs_engines)
        return {**handlers, **self._sandboxes.handlers(facts.needs_sandbox)}

    async def _score(
        self,
        units: Sequence[list[tuple[int, int]]],
        groups: Sequence[Group],
        found: list[list[Result | None]],
        first: int | None,
    ) -> None:
        """Score units into `found`. `first`: number of the first of the groups, counted over all calls.

        Without `first`, failures do not count for the circuit breaker.
        """
        answered, arrived, fields = deque[Item](), asyncio.Event(), bound_fields()
        waiting: dict[Item, list[tuple[int, int]]] = {}

        def arrive(item: Item) -> None:
            answered.append(item)
            arrived.set()

        def submit(units: Sequence[list[tuple[int, int]]]) -> None:
            items = []
            for members in units:
                at, place = members[0]
                unit: Unit = [(groups[at][0], groups[at][1][place]) for at, place in members]
                own = {**fields, "task": unit[0][0].id, "sample": place}
                if len(members) > 1:
                    own = {**fields, "task": unit[0][0].id} if members[-1][0] == at else fields
                items.append(Item(unit, arrive, own))
            waiting.update(zip(items, units, strict=True))
            self._pool.add(items)

        try:
            submit(units)
            while waiting:
                while not answered:
                    arrived.clear()
                    await arrived.wait()
                item = answered.popleft()
                members, unit = waiting.pop(item), item.value
                results = self._results(item, len(unit))
                failures = [_failed(result) for result in results]
                may_split = self.facts.form == "batch" and len(unit) > 1  # one sample may have failed all of them
                if may_split and any(
                    failed.kind[:7] != "invalid" and failed.outcome not in ENGINE_OUTCOMES
                    for failed in failures
                    if failed
                ):
                    middle = len(unit) // 2
                    submit([members[:middle], members[middle:]])
                    continue
                for (at, place), (task, trajectory), result, failed in zip(
                    members, unit, results, failures, strict=True
                ):
                    if first is not None:
                        self._count(failed, task, trajectory, first + at)
                    found[at][place] = result
                    self.num_unanswered -= 1
        finally:
            for item in waiting:
                item.drop()

    def _results(self, item: Item, count: int) -> Sequence[Result]:
        """Return the results of a unit of `count` samples. Raises the error that made the processes unusable."""
        error, place = item.error, self.facts.place
        if error is None:
            results: Sequence[Result] = item.result
            return results
        if isinstance(error, ItemTimeout):
            late = f"did not answer within timeout_s = {self.table.timeout_s:g} ({place})"
            return [ScoredSample(outcome=Outcome.REWARD_TIMEOUT, error=late, kind="timeout", place=place)] * count
        if isinstance(error, ItemCrash):
            ended = f"its process ended twice on this sample ({place}): {error}"
            return [ScoredSample(outcome=Outcome.REWARD_ERROR, error=ended, kind="process ended", place=place)] * count
        raise error

    def _count(self, failed: ScoredSample | None, task: Task, trajectory: Trajectory | None, group: int) -> None:
        """Count a sample of a group for the circuit breaker; fail the pool and raise its error if the breaker opens.

        `failed`: the failure of the reward, or None for a score.
        """
        seen = self._breaker.record(None if failed is None else (failed.kind, failed.place), group)
        if not seen or failed is None:
            return
        opened: Exception
        if failed.outcome in ENGINE_OUTCOMES:
            where = seen.removeprefix("alike ")
            opened = InfrastructureError(f"reward {self.name} got no answer {where}: {failed.error}")
        else:
            assert trajectory is not None, "golds are scored by `golds`"
            name = self.table.name  # the name for `relax try`
            sample = failing_sample({"reward": name}, task, trajectory, failed)
            opened = CircuitOpen(name, failed, seen, sample)
        self._pool.fail(opened)
        raise opened


def _failed(result: Result) -> ScoredSample | None:
    """Return the result of a reward that failed; None for a score."""
    return result if isinstance(result, ScoredSample) and not result.outcome.judged else None


class CircuitOpen(PluginError):
    """The error for code that fails alike on most samples; `sample` is the document to save for `relax try`."""

    def __init__(self, reward: str, result: ScoredSample, seen: str, sample: dict[str, Any]) -> None:
        message = (
            f"failed {seen}: {result.error}; fix {result.place}, then try it on the sample that failed: "
            f"`relax try reward {reward} --data failing-sample.json` in the run's folder"
        )
        super().__init__(f"reward {reward}", message, result.frames)
        self.sample = sample


def failing_sample(
    component: Mapping[str, str], task: Task, trajectory: Trajectory, result: ScoredSample
) -> dict[str, object]:
    """Return a JSON document of one sample: the task's row, the policy's response, and the failure.

    `component`: kind and name of the component that failed, such as {"reward": "exact"}.
    """
    prompt = task.prompt if isinstance(task.prompt, str) else [asdict(message) for message in task.prompt]
    return {
        "schema": SCHEMA,
        **component,
        "outcome": result.outcome.value,
        "error": result.error,
        "frames": result.frames,
        "task": {**task.metadata, "id": task.id, "prompt": prompt, "answer": task.answer},
        "response": trajectory.response,
        "messages": [asdict(message) for message in trajectory.messages],
    }
