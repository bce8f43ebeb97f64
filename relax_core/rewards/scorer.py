# SPDX-License-Identifier: Apache-2.0
"""The judge: every reward asked of every sample it applies to, summed into one judgement a sample.

A judgement is a finite value or an outcome that says why there is none, never a zero in its place. Rewards run in
killable processes (`reward_workers`); what the environment gave is part of the value.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias

from relax_core.api.clock import Clock
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.api.worker import Workers
from relax_core.data.tasks import applies
from relax_core.engines.model_rpc_server import ModelRpcServer
from relax_core.rewards.result import RewardResult
from relax_core.rewards.workers import NO_DESK, Group, RewardSettings, RewardWorkers

__all__ = ["RewardScorer", "ScoredSample", "RewardSettings"]

Weighed: TypeAlias = tuple[RewardWorkers, RewardResult]
Found: TypeAlias = list[list[dict[str, RewardResult]]]
"""By group, member and reward."""
ENVIRONMENT = "environment"
"""The part under which the environment's own reward is logged."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """What one sample is worth."""

    value: float
    """Environment reward and weighted rewards; NaN unless the outcome is judged."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Each reward's own value by name, before its weight, and what their scores name themselves."""
    steps: tuple[float, ...] = ()
    """[turns, as far as any was given] credit of single turns, where environment or rewards give it."""
    outcome: Outcome = Outcome.FINISHED
    error: str = ""
    frames: str = ""
    """Of the author's code, where it raised."""


class RewardScorer:
    """All rewards of a run."""

    def __init__(
        self, rewards: Sequence[RewardSettings], children: Workers, clock: Clock, num_workers: int = 1,
        desk: ModelRpcServer = NO_DESK,
    ) -> None:  # fmt: skip
        self._clock = clock
        self.seconds = 0.0
        """Spent in `judge` so far."""
        self._asked: list[float] = []
        """When the calls under way began."""
        self._rewards = [RewardWorkers(choice, name, children, num_workers, desk) for name, choice in _named(rewards)]

    async def start(self) -> None:
        await asyncio.gather(*(reward.start() for reward in self._rewards))

    async def judge(self, groups: Sequence[Group]) -> list[list[ScoredSample]]:
        """One judgement a trajectory, in order. Calls may overlap; their samples travel together."""
        start = self._clock.now()
        found: Found = [[{} for _ in members] for _, members in groups]
        self._asked.append(start)
        try:
            await _all([_ask(reward, groups, found) for reward in self._rewards])
        finally:
            self._asked.remove(start)
        self.seconds += self._clock.now() - start
        return [
            [self._judgement(member, verdicts) for member, verdicts in zip(members, answers, strict=True)]
            for (_, members), answers in zip(groups, found, strict=True)
        ]

    async def stop(self) -> None:
        await asyncio.gather(*(reward.stop() for reward in self._rewards))

    def owing(self) -> dict[str, Any]:
        """Rewards with samples that they were asked about and did not answer, and for how long somebody has waited."""
        owed = {reward.name: reward.owed for reward in self._rewards if reward.owed}
        return (
            {"rewards": owed, "for_s": round(self._clock.now() - min(self._asked), 3)} if owed and self._asked else {}
        )

    def _judgement(self, trajectory: Trajectory, verdicts: Mapping[str, RewardResult]) -> ScoredSample:
        if not trajectory.outcome.judged:
            return ScoredSample(math.nan, outcome=trajectory.outcome, error=str(trajectory.info.get("error", "")))
        if self._rewards and not verdicts and not trajectory.step_rewards and trajectory.outcome is Outcome.FINISHED:
            error = "no reward applies to this task and its environment gave none"
            return ScoredSample(math.nan, outcome=Outcome.INVALID_TASK, error=error)
        weighed = [(reward, verdicts[reward.name]) for reward in self._rewards if reward.name in verdicts]
        return _failure(weighed) or _sum(trajectory, weighed)


def _failure(verdicts: Sequence[Weighed]) -> ScoredSample | None:
    """The first reward that failed decides; what the others said stays readable."""
    for reward, verdict in verdicts:
        if verdict.failed:
            parts = {other.name: said.value for other, said in verdicts if not said.failed}
            error = f"reward {reward.name}: {verdict.error}"
            return ScoredSample(math.nan, parts, (), verdict.outcome, error, verdict.frames)
    return None


def _sum(trajectory: Trajectory, verdicts: Sequence[Weighed]) -> ScoredSample:
    """In the order of the configuration, so that sums are the same bit for bit."""
    steps = trajectory.turn_rewards
    value, parts = trajectory.environment_reward, ({ENVIRONMENT: trajectory.environment_reward} if steps else {})
    for reward, verdict in verdicts:
        weight = reward.choice.weight
        value += weight * verdict.value
        parts = {**verdict.parts, **parts, reward.name: verdict.value}
        if verdict.steps:
            steps = tuple(a + weight * b for a, b in zip_longest(steps, verdict.steps, fillvalue=0.0))
    if not math.isfinite(value):
        return ScoredSample(math.nan, parts, (), Outcome.REWARD_INVALID, f"the weighted sum of {parts} is {value}")
    return ScoredSample(value, parts, steps, trajectory.outcome)


async def _ask(reward: RewardWorkers, groups: Sequence[Group], found: Found) -> None:
    """Put one reward's verdicts where its samples are."""
    asked = _applicable(reward.choice.only, groups)
    answers = await reward.score([(groups[at][0], members) for at, members, _ in asked])
    for (at, _, positions), verdicts in zip(asked, answers, strict=True):
        for position, verdict in zip(positions, verdicts, strict=True):
            found[at][position][reward.name] = verdict


def _applicable(only: str, groups: Sequence[Group]) -> list[tuple[int, list[Trajectory], list[int]]]:
    """Of each group the reward applies to: its place, the judged members, and their positions."""
    asked = []
    for at, (task, members) in enumerate(groups):
        positions = [position for position, member in enumerate(members) if member.outcome.judged]
        if positions and applies(only, task):
            asked.append((at, [members[position] for position in positions], positions))
    return asked


def _named(rewards: Sequence[RewardSettings]) -> Iterator[tuple[str, RewardSettings]]:
    """Unique names: the second `maths` is `maths-2`."""
    seen: Counter[str] = Counter()
    for choice in rewards:
        name = choice.chosen.name
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name}-{seen[name]}"), choice


async def _all(asks: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Every reward at once; when one can't go on, the others are not left running."""
    if len(asks) == 1:
        return await asks[0]
    tasks = [asyncio.ensure_future(ask) for ask in asks]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
