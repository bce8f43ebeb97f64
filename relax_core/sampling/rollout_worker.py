# SPDX-License-Identifier: Apache-2.0
"""The rollout worker: turns an issued group into scored trajectories, and owns the engines, environments and rewards.

The rollout role decides when a group starts, and sends the group's rows to the bus; the worker sends no rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from relax_core.api.bus import Issue
from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.events import Logged, WorkRetried
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.model_folder import routing
from relax_core.api.source import Filter
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.data.media import make_media_pipeline
from relax_core.data.overlap import EvalRows, kept_apart
from relax_core.engines.factories import AuxiliaryPools, make_pool
from relax_core.engines.requests import SamplingParams
from relax_core.engines.supervisor import Report
from relax_core.media.placeholders import MediaRefused, PromptTooLong, media_of
from relax_core.observe.console import waiting_for
from relax_core.observe.process_log import bound
from relax_core.rewards.golds import check_golds
from relax_core.rewards.scorer import CircuitOpen, RewardScorer
from relax_core.rpc.isolated_pool import ProcessStarter, replaced_events
from relax_core.rpc.waiting import start_all
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.episode import EnvironmentHandle, run_answers, run_episode
from relax_core.sampling.evaluation import SHOWN, Evaluation, open_tasks
from relax_core.sampling.failures import keep_sample
from relax_core.sampling.first_samples import answer_facts, own_tokenizer, stops, task_facts, tokenizer_facts
from relax_core.sampling.groups import InflightGroup, Selection, Turns, make_sampler
from relax_core.sampling.prelaunch import PrelaunchedGroup
from relax_core.sampling.session import Limits, sample_seeds
from relax_core.sampling.tools import found_tools, keep_tools
from relax_core.sandboxes.pool import SandboxPool

STEPS_AHEAD = 2
"""Without `placement.rollout.sessions`, at least so many steps' worth of groups may be in flight."""


class RolloutWorker:
    """The engines, tasks, environments and rewards of one run: `made -> open -> closed`.

    Invariants:
    - A group is in `inflight` from the start of its generation until it is scored or its generation fails.
    - A group's media stay in the store until the bus no longer needs the group.
    - The groups in `_prelaunched` are expected next. Their environments have started, but they have no engine requests.
    """

    def __init__(
        self, context: RunContext, report: Report, version: Version, tools: Mapping[str, tuple[Tool, ...]],
        trains: bool = True,
    ) -> None:  # fmt: skip
        """Make all parts without starting them. `version`: the run's weights now. `tools`: result of `found_tools`."""
        run, build, children = context.config, context.build, context.children
        self._context, self.family = context, build(run.family.chosen, ModelFamily)
        self.family.open(run.model.model_dump(mode="json"))
        self._tasks, self._train, self._sets = open_tasks(context, self.family, tools, trains)
        self._trains = trains
        if trains:
            self._remarks = [("info", remark) for remark in self._tasks.remarks(self._train)]
            held = {one.name: EvalRows(one.tasks, one.indices) for one in self._sets}
            self._train, compared = kept_apart(run, self._tasks, self._train, held)
            self._remarks += compared
        else:
            remarks = [remark for one in self._sets for remark in one.tasks.remarks(range(len(one.tasks)))]
            self._remarks = [("warning", remark) for remark in remarks]
        self.auxiliary_pools = pools = AuxiliaryPools.from_context(context, report, teaching=False)
        starter = ProcessStarter(children, replaced_events(context.run_status))

        async def retried(name: str, why: str) -> None:
            await context.run_status.emit(WorkRetried(name, "samples", 1, why))

        self._sandboxes = sandboxes = SandboxPool(run.sandbox, ProcessStarter(children))
        self.scorer = RewardScorer(
            run.rewards, starter, context.clock, models=pools.clients, sandboxes=sandboxes,
            failure_limit=run.rollout.failure_limit, functions=context.functions,
        )  # fmt: skip
        self._environments = {
            choice.known_as: EnvironmentPool(
                choice,
                starter,
                build=build,
                models=pools.clients,
                retried=retried,
                sandboxes=sandboxes,
                tools=tools.get(choice.known_as),
            )
            for choice in (run.environment, *run.environments)
        }
        self._default_environments = self._environments[run.environment.known_as]
        self.pool = make_pool(context, version, report, tuple(self.family.placeholders.values()))
        self.engines = self.pool.supervisor
        self.media = make_media_pipeline(context, self.family, run.rollout.media_store_mb << 20)
        sampler = make_sampler(run, build, context.plan.source)
        filters = {choice.name: build(choice.chosen, Filter) for choice in run.filters}
        refill_limit = run.rollout.refill_limit * run.rollout.groups_per_step
        self.selection = Selection(sampler, filters, self._tasks, self._train, run.seed, refill_limit)
        self.routing = routing(run.model.path) if run.model.routing_replay == "rollout" else None
        """The model's expert routing if the trainer replays the experts that the rollout visited; else None."""
        rollout = run.rollout
        self._sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, self.routing)
        self._greedy = SamplingParams(0.0, 1.0)
        self._limits = Limits(0)  # replaced by `open`, once the engine has reported its context length
        self.inflight: dict[Issue, InflightGroup] = {}
        """Groups that have started and are not yet scored."""
        self._prelaunched: dict[int, PrelaunchedGroup] = {}
        """Prelaunched groups by group number."""
        self._next_group = 0
        """Lowest group number that was never issued; an earlier group may still be issued again."""
        self._num_scored = 0
        """Groups that were scored so far."""
        self._held_by = ""
        """Name of the bound that the last call of `room` found exhausted, or empty."""
        self._cancelling: set[asyncio.Task[None]] = set()
        shown = SHOWN if trains else None
        self.evaluation = Evaluation(self._sets, run, self.samples, self.scorer, self.pool, shown)

    @classmethod
    async def open(cls, context: RunContext, report: Report, *, in_turns: bool = False, trains: bool = True) -> Self:
        """Make and start all parts; if a part fails to start, close all.

        `in_turns`: pools on shared devices start paused, and the caller schedules their turns; else they stay loaded.
        `trains`: False for a worker that only evaluates, which needs no task file but those of the evaluation sets, and
        records all samples. Such a worker makes no groups.
        """
        run, tools = context.config, await found_tools(context.config, context.build, context.children)
        await keep_tools(context.bus, tools)
        made = cls(context, report, await context.bus.version(), tools, trains)
        for level, remark in made._remarks:
            await context.run_status.emit(Logged(level, "rollout", remark))
        try:
            asks = run.media or run.placement.rollout.prelaunch
            issued: int = (await context.bus.statistics())["next_group"] if asks else 0
            made._next_group = issued
            starts = (one.start() for one in made._environments.values())
            pool, scorer, media, pools = made.pool, made.scorer, made.media, made.auxiliary_pools
            facts: Any
            if in_turns:
                await pools.start_in_turns()
            others = () if in_turns else (pools.start(),)
            facts, *_ = await start_all(pool.start(), scorer.start(), *starts, media.start(issued), *others)
            await made._sandboxes.start()  # after environments and rewards have declared whether they need a sandbox
            with waiting_for("checking the gold answers"):
                await made._check_golds()
            check_vocabulary(made.family, facts)
            if "max_context" not in facts:
                raise PluginError(f"engine {run.engine.name}", "start() returned facts without max_context")
            max_context, rollout = int(facts["max_context"]), run.rollout
            fix = f"choose less than the model's context of {max_context} tokens"
            if rollout.max_new_tokens >= max_context:
                raise ConfigError("rollout.max_new_tokens", f"{rollout.max_new_tokens}", fix)
            for at, one in enumerate(made._sets):
                if (one.max_new_tokens or 0) >= max_context:
                    raise ConfigError(f"eval.sets.{at}.max_new_tokens", f"{one.max_new_tokens}", fix)
            made._limits = Limits(
                rollout.max_new_tokens, rollout.max_turns, rollout.token_budget or 0, max_context, tuple(rollout.stop)
            )
        except BaseException:
            await made.close()
            raise
        return made

    async def _check_golds(self) -> None:
        """Score the gold answers of all task files, log the result, and raise ConfigError if too many are bad."""
        if not self.scorer.reads_golds:
            return
        run = self._context.config
        files = [("data.train", self._tasks, self._train)] if self._trains else []
        files += [
            (f"eval.sets.{at}.path" if run.eval.sets else "data.train", one.tasks, one.indices)
            for at, one in enumerate(self._sets)
            if one.tasks is not self._tasks or not self._trains
        ]
        for key, tasks, indices in files:
            report = await check_golds(self.scorer, tasks, indices)
            await self._context.run_status.emit(
                Logged("warning" if report.bad else "info", "rollout", f"{key}: {report}")
            )
            report.refuse(key, run.data.max_bad_golds)

    async def close(self) -> None:
        launched = (one.cancel() for one in self._prelaunched.values())
        await asyncio.gather(*launched, *self._cancelling, return_exceptions=True)
        stops = (one.stop() for one in self._environments.values())
        await asyncio.gather(self.pool.close(), self.scorer.stop(), *stops, self.media.stop())
        await self.auxiliary_pools.close()
        await self._sandboxes.close()

    def room(self) -> int:
        """Return the number of groups that may start now, given the room of engines and `placement.rollout.sessions`.

        Samples that wait for tools take no room at the engines. At least one group may start if no sample is in play.
        """
        run, size = self._context.config, self._context.plan.group_size
        playing = [group for group in self.inflight.values() if group.num_in_play]
        in_play, starting = sum(one.num_in_play for one in playing), sum(one.num_starting for one in playing)
        free = self.pool.room(run.rollout.max_new_tokens) - starting
        bounds = {"engines": -(-free // size)}  # rounded up: a group that fits only in part keeps engines busy
        if sessions := run.placement.rollout.sessions:
            bounds["placement.rollout.sessions"] = (sessions - in_play) // size
        else:
            steps = max(STEPS_AHEAD, (self._context.plan.max_staleness or 0) + 1)
            bounds["steps ahead"] = run.rollout.groups_per_step * steps - len(playing)
        least = min(bounds, key=lambda name: bounds[name])
        groups = max(bounds[least], int(not in_play))
        self._held_by = "" if groups > 0 else least
        return groups

    def prelaunch(self) -> None:
        """Start the environments of the groups expected next, up to `placement.rollout.prelaunch` samples."""
        run, size = self._context.config, self._context.plan.group_size
        if run.deterministic:
            return
        for number in range(self._next_group, self._next_group + run.placement.rollout.prelaunch // size):
            if number not in self._prelaunched:
                task, prompt = self._tasks.rendered(self.selection.task(number))
                if not self._environments.get(task.environment, self._default_environments).answers_once:
                    seeds = sample_seeds(run.seed, number, range(size))
                    launched = self._prelaunched[number] = PrelaunchedGroup(size)
                    with bound(group=number, task=task.id):
                        launched.launch(
                            self.samples(task, prompt, seeds, self._samplings(range(size)), launched, number)
                        )

    def scheduling(self) -> dict[str, object]:
        """Describe the samples in play, the bound that holds back more groups, and the engines' queue, for the status."""
        groups = self.inflight.values()
        return {
            "in_play": sum(one.num_in_play for one in groups), "at_engines": sum(one.at_engines for one in groups),
            "prelaunched": sum(one.size for one in self._prelaunched.values()), "held_by": self._held_by,
            "scored": self._num_scored, **self.pool.queue(),
        }  # fmt: skip

    def _take_prelaunched(self, issue: Issue) -> PrelaunchedGroup | None:
        """Return the prelaunched group of an issue, or None; cancel prelaunched groups whose numbers were skipped."""
        self._next_group = max(self._next_group, issue.group + 1)
        own = self._prelaunched.pop(issue.group, None)
        missed = [number for number in self._prelaunched if number < self._next_group]
        wrong = [self._prelaunched.pop(number) for number in missed]
        if own is not None and not own.fits(issue):
            wrong, own = [*wrong, own], None
        for one in wrong:
            cancelling = asyncio.create_task(one.cancel())
            self._cancelling.add(cancelling)
            cancelling.add_done_callback(self._cancelling.discard)
        return own

    async def make(self, issue: Issue, version: Version) -> InflightGroup:
        """Generate the samples of an issue. The group is in `inflight` until it is scored, or until this call fails.

        Raises ConfigError if the prompt is too long with its media and `data.too_long` is "error".
        """
        run, clock = self._context.config, self._context.clock
        index = self.selection.task(issue.group)
        task, prompt = self._tasks.rendered(index)
        group = self.inflight[issue] = InflightGroup(issue, task, version, self.pool, clock.now())
        launched = self._take_prelaunched(issue)
        try:
            if launched is not None:
                played = await launched.go_on(group)
            else:
                samples = [attempt.sample for attempt in issue.attempts]
                seeds = sample_seeds(run.seed, issue.group, samples, issue.retry)
                samplings = self._samplings(samples)
                with bound(group=issue.group, task=task.id):
                    played = await self.samples(task, prompt, seeds, samplings, group, issue.group)
            group.trajectories = tuple(played)
        except BaseException:
            del self.inflight[issue]
            raise
        finally:
            self.pool.forget_sessions(issue.attempts)
        group.seconds = clock.now() - group.since
        if group.trajectories and all(one.outcome is Outcome.INVALID_TASK for one in group.trajectories):
            group.unfit = str(group.trajectories[0].info.get("error", ""))
        if group.unfit and run.data.too_long == "error":
            fix = 'lower the limits of its media processor, raise data.max_prompt_tokens, or set data.too_long = "skip"'
            raise ConfigError("data.train", f"{self._tasks.where(index)}: {group.unfit}", fix)
        return group

    def _samplings(self, samples: Sequence[int]) -> list[SamplingParams]:
        """Return the sampling parameters of samples by their index in the group."""
        return [self._greedy if sample == self._context.plan.greedy else self._sampling for sample in samples]

    async def samples(
        self, task: Task, prompt: Rendered, seeds: Sequence[int], samplings: Sequence[SamplingParams], turns: Turns,
        group: int | None = None, max_new_tokens: int | None = None,
    ) -> Sequence[Trajectory]:  # fmt: skip
        """Play one sample per seed and sampling parameters; `turns` samples their turns.

        Media stay in the store until the bus no longer needs `group`; without a `group`, until this call ends.
        `max_new_tokens`: most tokens of a turn; None: `rollout.max_new_tokens`.
        """
        limits = self._limits if max_new_tokens is None else replace(self._limits, max_new_tokens=max_new_tokens)
        owner = object() if group is None else group
        messages = (Message("user", task.prompt),) if isinstance(task.prompt, str) else task.prompt
        try:
            if num_media := len(media_of(messages)):
                # The headers of the media alone may show that the prompt is too long.
                self._check_room(len(prompt.tokens) - num_media + await self.media.num_features(messages), limits)
                await self.media.prepare(messages, owner)
                prompt = self.media.fill_placeholders(prompt, messages)
                self._check_room(len(prompt.tokens), limits)
            environments = self._environments.get(task.environment, self._default_environments)
            if environments.answers_once:
                return await run_answers(
                    task, prompt, seeds, samplings, self.family, turns.generate, limits, turns.sample_ended
                )

            async def episode(place: int, seed: int) -> Trajectory:
                def begin(environment: EnvironmentHandle) -> Awaitable[Trajectory]:
                    turns.sample_started(place)
                    return run_episode(
                        task, prompt, seed, environment, self.family, turns.generate, limits, self.media, owner,
                        samplings[place], place,
                    )  # fmt: skip

                with bound(sample=place):
                    trajectory = await environments.play(begin)
                turns.sample_ended()
                return trajectory

            return await asyncio.gather(*(episode(place, seed) for place, seed in enumerate(seeds)))
        except MediaRefused as refused:
            too_long = isinstance(refused, PromptTooLong)
            outcome = Outcome.INVALID_TASK if too_long else Outcome.MEDIA_ERROR
            error = str(refused) if too_long else f"task {task.id}: {refused}"
            return [Trajectory(messages, "", (), outcome, info={"error": error}) for _ in seeds]
        finally:
            if group is None:
                self.media.release(owner)

    def _check_room(self, length: int, limits: Limits) -> None:
        """Raise PromptTooLong if a prompt of `length` tokens leaves no room for a turn or is over max_prompt_tokens."""
        most = limits.max_context - limits.max_new_tokens
        asked: int | None = self._context.config.data.max_prompt_tokens
        if length > min(most, asked or most):
            bound = f"data.max_prompt_tokens is {asked}" if asked and asked < most else f"the context allows {most}"
            raise PromptTooLong(f"a prompt of {length} tokens including its media; {bound}")

    async def score(self, groups: Sequence[InflightGroup]) -> Sequence[InflightGroup]:
        """Score groups, then record rejections by filters.

        If a reward's circuit breaker trips, save a failing sample for `relax try` and raise CircuitOpen.
        """
        for group in groups:
            group.scoring = True
        began = self._context.clock.now()
        try:
            found = await self.scorer.score([(group.task, group.trajectories) for group in groups])
        except CircuitOpen as tripped:
            keep_sample(self._context.config, self._context.run_dir, tripped.sample)
            raise
        finally:
            for group in groups:
                self.inflight.pop(group.issue, None)
        for group, scores in zip(groups, found, strict=True):
            group.scores, group.reward_s = tuple(scores), self._context.clock.now() - began
        self._num_scored += len(groups)
        self.selection.take(groups)
        return groups

    async def first_step_facts(self, groups: Sequence[InflightGroup]) -> dict[str, Any]:
        """Describe the tasks of scored groups, for the checks of step 1."""
        model, played = self._context.config.model, [group for group in groups if group.scores]
        answers = await answer_facts(self.scorer, [(one.task, one.trajectories, one.scores) for one in played])
        own = own_tokenizer(self.family, model.path, model.tokenizer)
        tasks = [
            {
                "group": one.issue.group,
                **task_facts(one.task, self._tasks.tools(one.task), self.family, own),
                "answer": answer,
            }
            for one, answer in zip(played, answers, strict=True)
        ]
        return {"stops": stops(self.family), "tokenizer": tokenizer_facts(self.family), "tasks": tasks}


def check_vocabulary(family: ModelFamily, facts: Any) -> None:
    """Raise ConfigError if the engine's vocabulary is smaller than the tokenizer's.

    A larger vocabulary is padding. An engine that does not report its vocabulary is not checked. Foreign tokens may be
    missing: rows with such tokens are refused.
    """
    have = int(facts.get("vocab_size", 0))
    if have and min(family.foreign_tokens, default=family.vocab_size) > have:
        fix = "the model lacks ids that prompts may contain: set tokenizer and model path to the same model"
        raise ConfigError(
            "model.tokenizer", f"a tokenizer of {family.vocab_size} tokens for an engine whose model has {have}", fix
        )
