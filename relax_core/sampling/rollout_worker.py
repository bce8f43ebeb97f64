# SPDX-License-Identifier: Apache-2.0
"""Makes samples: from an issued group to judged trajectories. Everything a rollout needs, opened and closed together.

It never talks to the bus; the rollout role decides when to start a group and what becomes of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Issue
from relax_core.api.errors import ConfigError
from relax_core.api.events import EvalFinished, Logged
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.task import Message, Task
from relax_core.api.trainer import Chosen
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.api.weights import Manifest, Version
from relax_core.config.run_config import RunContext
from relax_core.data.factories import make_media_pipeline
from relax_core.data.media_pipeline import MediaFor, MediaPipeline, media_of
from relax_core.data.placeholders import MediaRefused, PromptTooLong
from relax_core.data.tasks import TaskSet
from relax_core.engines.auxiliary_pools import AuxiliaryPools, auxiliary_pool_names
from relax_core.engines.factories import make_pool, replayed_routing
from relax_core.engines.pool import EnginePool, Sampling
from relax_core.engines.requests import GenerateAll, singly
from relax_core.engines.supervisor import Arrived, Tell
from relax_core.rewards.circuit_breaker import CircuitOpen
from relax_core.rewards.scorer import RewardScorer, RewardSettings
from relax_core.rpc.waiting import start_all
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.episode import Limits, run_answers, run_episode
from relax_core.sampling.evaluation import EvalSet, Evaluation
from relax_core.sampling.factories import make_selection, open_tasks, remarks
from relax_core.sampling.inflight import FinishedGroup, InflightGroup, JudgedGroup, Progress
from relax_core.sampling.selection import Selection
from relax_core.sampling.session import sample_seed

Generator = Callable[[Sequence[int]], GenerateAll]
"""Gives a `generate` for the samples at these places of a group."""
STEPS_AHEAD = 2
"""Groups under way at once, in steps: what keeps engines full; the staleness gate is the real bound."""


class RolloutWorker:
    """Engines, tasks, environments and rewards of one run."""

    def __init__(
        self, context: RunContext, family: ModelFamily, pool: EnginePool, environments: Mapping[str, EnvironmentPool],
        scorer: RewardScorer, tasks: TaskSet, selection: Selection, sets: Sequence[EvalSet], media: MediaPipeline,
        pools: AuxiliaryPools,
    ) -> None:  # fmt: skip
        run = context.config
        self._limits = Limits(0)  # of the engine, once it has started
        self._context, self._family, self._pool = context, family, pool
        self._played_by_default = environments[run.environment.name]
        self._environments, self._scorer, self._tasks, self.selection = environments, scorer, tasks, selection
        self._media, self._pools = media, pools
        self.routing = replayed_routing(run)
        """How the model routes, where the trainer replays what the rollout visited."""
        self._sampling = Sampling(run.rollout.temperature, run.rollout.top_p, routing=self.routing)
        self._greedy = Sampling(0.0, 1.0)
        self._under_way: dict[Issue, InflightGroup] = {}
        self._progress = Progress(context.clock)
        self._evaluation = Evaluation(sets, run, self.samples, scorer, pool)

    @classmethod
    async def open(cls, context: RunContext, tell: Tell) -> Self:
        """Open everything; what was opened is closed again when a later part fails."""
        run = context.config
        family: ModelFamily = context.build(run.family.chosen)
        family.open(run.model.model_dump(mode="json"))
        tasks, train, sets = open_tasks(context, family)
        for remark in remarks(tasks, train):
            await context.board.emit(Logged("info", "rollout", remark))
        rewards = [
            RewardSettings(r.chosen, r.weight, r.timeout_s, r.memory_mb, r.only, context.functions.get(r.name))
            for r in run.rewards
        ]
        pools = AuxiliaryPools.of(context, auxiliary_pool_names(context, teaching=False), tell)
        scorer = RewardScorer(rewards, context.children, context.clock, models=pools.hands)
        environments = {
            choice.name: EnvironmentPool(choice.chosen, context.children, build=context.build, models=pools.hands)
            for choice in (run.environment, *run.environments)
        }
        pool = make_pool(context, await context.bus.version(), tell, tuple(family.placeholders.values()))
        media = make_media_pipeline(context, family, run.rollout.media_store_mb << 20)
        selection = make_selection(context, tasks, train)
        made = cls(context, family, pool, environments, scorer, tasks, selection, sets, media, pools)
        try:
            starts = (one.start() for one in environments.values())
            issued: int = (await context.bus.statistics())["next_group"] if run.media else 0
            facts, *_ = await start_all(pool.start(), scorer.start(), *starts, media.start(issued), pools.start())
            check_vocabulary(family, facts)
            made._limits = _limits(run, facts)
        except BaseException:
            await made.close()
            raise
        return made

    async def close(self) -> None:
        stops = (one.stop() for one in self._environments.values())
        await asyncio.gather(self._pool.close(), self._scorer.stop(), *stops, self._media.stop())
        await self._pools.close()

    # -- training samples ---------------------------------------------------------------------------------------

    @property
    def engines(self) -> EnginePool:
        return self._pool

    def version(self) -> Version:
        return self._pool.newest()

    @property
    def serves(self) -> bool:
        """Whether some engine has weights that may be sampled; not before the first publish of a resumed run."""
        return self._pool.serves

    def room(self, under_way: int) -> int:
        """Groups that may be started now: none while the engines have more than they can take."""
        if self._pool.full:
            return 0
        staleness: int = self._context.plan.max_staleness or 0
        wanted: int = self._context.config.rollout.prompts_per_step * max(STEPS_AHEAD, staleness + 1)
        return wanted - under_way

    async def make(self, issue: Issue, version: Version) -> FinishedGroup:
        start = self._context.clock.now()
        run_seed: int = self._context.config.seed
        index = self.selection.task(issue.group)
        task, prompt = self._tasks.rendered(index)
        group = self._under_way[issue] = InflightGroup(version.step, issue.group)

        seeds = [sample_seed(run_seed, attempt.group, attempt.sample, issue.retry) for attempt in issue.attempts]

        def generator(places: Sequence[int]) -> GenerateAll:
            attempts = [issue.attempts[place] for place in places]
            return progress.generator(group.generator(attempts, self._pool.generator(self._samplings(attempts))))

        try:
            with self._progress.making(issue.group, len(issue.attempts)) as progress:
                trajectories = await self.samples(task, prompt, seeds, generator, progress.made, issue.group)
        finally:
            del self._under_way[issue]
        unfit = _unfit(trajectories)
        if unfit and self._context.config.data.too_long == "error":
            fix = 'lower the bounds of its processor, raise data.max_prompt_tokens, or data.too_long = "skip"'
            raise ConfigError("data.train", f"{self._tasks.where(index)}: {unfit}", fix)
        return FinishedGroup(issue, task, tuple(trajectories), version, self._context.clock.now() - start, unfit)

    def covered(self, oldest_group: int) -> None:
        """Groups below this number need nothing any more."""
        self._media.release_below(oldest_group)

    def lengths(self, issue: Issue) -> Mapping[AttemptId, int]:
        """Tokens sampled so far for the attempts of a group that is being made."""
        group = self._under_way.get(issue)
        return group.lengths if group else {}

    def _samplings(self, attempts: Sequence[AttemptId]) -> list[Sampling]:
        greedy: int | None = self._context.plan.greedy
        return [self._greedy if attempt.sample == greedy else self._sampling for attempt in attempts]

    async def samples(
        self, task: Task, prompt: Rendered, seeds: Sequence[int], generator: Generator, made: Callable[[], None],
        group: int | None = None,
    ) -> Sequence[Trajectory]:  # fmt: skip
        """A sample a seed. `made` is called for each as it ends. What a `group` sees is kept until the bus needs it no more,
        what others see until they end."""
        owner = object() if group is None else group
        try:
            return await self._samples(task, prompt, seeds, generator, made, MediaFor(self._media, owner))
        except PromptTooLong as refused:
            return [_unseen(task, str(refused), Outcome.INVALID_TASK) for _ in seeds]
        except MediaRefused as refused:
            return [_unseen(task, str(refused), Outcome.MEDIA_ERROR) for _ in seeds]
        finally:
            if group is None:
                self._media.release(owner)

    async def _samples(
        self, task: Task, prompt: Rendered, seeds: Sequence[int], generator: Generator, made: Callable[[], None],
        media: MediaFor,
    ) -> Sequence[Trajectory]:  # fmt: skip
        family, limits = self._family, self._limits
        prompt = await self._seen(task, prompt, media)
        environments = self._environments.get(task.environment, self._played_by_default)
        if environments.answers_once:
            return await run_answers(task, prompt, seeds, family, generator(range(len(seeds))), limits, made)

        async def episode(place: int, seed: int) -> Trajectory:
            generate = singly(generator([place]))
            async with environments.instance() as environment:
                trajectory = await run_episode(task, prompt, seed, environment, family, generate, limits, media)
            made()
            return trajectory

        return await asyncio.gather(*(episode(place, seed) for place, seed in enumerate(seeds)))

    async def _seen(self, task: Task, prompt: Rendered, media: MediaFor) -> Rendered:
        """The prompt with the tokens that its media take, processed once for all samples, and not at all where their headers
        say that it is too long. Raises MediaRefused."""
        messages = () if isinstance(task.prompt, str) else task.prompt
        shown = len(media_of(messages))
        if shown:
            self._check_room(len(prompt.tokens) - shown + await self._media.num_features(messages))
        await media.prepare(messages)
        whole = media.fill_placeholders(prompt, messages)
        if shown:
            self._check_room(len(whole.tokens))
        return whole

    def _check_room(self, length: int) -> None:
        """Raises PromptTooLong."""
        most = self._limits.max_context - self._limits.max_new_tokens
        asked: int | None = self._context.config.data.max_prompt_tokens
        if length > min(most, asked or most):
            bound = f"data.max_prompt_tokens is {asked}" if asked and asked < most else f"{most} are left for it"
            raise PromptTooLong(f"a prompt of {length} tokens with its media; {bound}")

    async def judge(self, groups: Sequence[FinishedGroup]) -> list[JudgedGroup]:
        """Judge and filter. Raises CircuitOpen after saving one failing sample for `relax try`."""
        try:
            with self._progress.judging([group.issue.group for group in groups]):
                found = await self._scorer.score([(group.task, group.trajectories) for group in groups])
        except CircuitOpen as tripped:
            path = Path(self._context.run_dir) / "failing-sample.json"
            path.write_text(json.dumps(tripped.sample, indent=1, default=str))
            raise
        judged = [JudgedGroup(group, tuple(js)) for group, js in zip(groups, found, strict=True)]
        for one in judged:
            self.selection.learned(one)
        return [self.selection.filtered(one) for one in judged]

    # -- weights and evaluation -----------------------------------------------------------------------------------

    async def update(self, manifest: Manifest, transport: Chosen, arrived: Arrived) -> tuple[str, ...]:
        """Bring every engine to a version; `arrived` is told of each at once."""
        return await self._pool.update(manifest, transport, arrived)

    async def evaluate(self, step: int) -> list[EvalFinished]:
        """Results of every set that is due at this step."""
        return await self._evaluation.run(step)

    def facts(self) -> dict[str, Any]:
        return self._pool.facts()

    def pools(self) -> dict[str, Any]:
        """Engine pools beside the policy's."""
        return self._pools.facts()

    def oldest(self) -> list[dict[str, Any]]:
        """The groups that have been under way for longest."""
        return self._progress.oldest()

    def judging(self) -> dict[str, Any]:
        """Rewards that owe verdicts."""
        return self._scorer.owing()


def _unseen(task: Task, why: str, outcome: Outcome) -> Trajectory:
    """A sample whose prompt can't be shown to the policy."""
    messages = (Message("user", task.prompt),) if isinstance(task.prompt, str) else task.prompt
    return Trajectory(messages, "", (), outcome, info={"error": why})


def _unfit(trajectories: Sequence[Trajectory]) -> str:
    """Why none was generated, where the task is to blame."""
    invalid = bool(trajectories) and all(one.outcome is Outcome.INVALID_TASK for one in trajectories)
    return str(trajectories[0].info.get("error", "")) if invalid else ""


def check_vocabulary(family: ModelFamily, facts: Any) -> None:
    """What the tokenizer says, the engine's model must know; a model may know more (padding), an engine may not tell."""
    have = int(facts.get("vocab_size", 0))
    if have and family.vocab_size > have:
        fix = "prompts would hold ids that the model does not know: name the tokenizer and the folder of one model"
        raise ConfigError(
            "model.tokenizer", f"one of {family.vocab_size} tokens over an engine whose model has {have}", fix
        )


def _limits(run: Any, facts: Any) -> Limits:
    context = int(facts["max_context"])
    if run.rollout.max_new_tokens >= context:
        raise ConfigError(
            "rollout.max_new_tokens", f"{run.rollout.max_new_tokens}", f"the model's context is {context}"
        )
    rollout = run.rollout
    return Limits(
        rollout.max_new_tokens,
        max_turns=rollout.max_turns,
        token_budget=rollout.token_budget or 0,
        max_context=context,
        stop=tuple(rollout.stop),
    )
