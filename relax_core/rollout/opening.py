# SPDX-License-Identifier: Apache-2.0
"""Opens what a rollout reads and runs on, from the configuration: task sets with their hold-out, and the engine pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_core.api.engine import EngineSpec
from relax_core.api.environment import Environment
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily
from relax_core.api.role import Context
from relax_core.api.routing import Routing
from relax_core.api.version import Version
from relax_core.api.worker import WorkerSpec
from relax_core.options.choice import BackendChoice
from relax_core.options.model_folder import model_context, routing
from relax_core.rollout.engine_slot import EngineSlot
from relax_core.rollout.evaluation import EvalSet
from relax_core.rollout.judge import applies
from relax_core.rollout.media import MediaDesk
from relax_core.rollout.pool import EnginePool, Sampling
from relax_core.rollout.router import Bounds
from relax_core.rollout.selection import Selection
from relax_core.rollout.shuffle import Shuffle, ShuffleOptions
from relax_core.rollout.tasks import Need, TaskSet
from relax_core.rollout.teaching import check_taught
from relax_core.rollout.upkeep import Tell
from relax_core.rollout.weight_feed import WeightFeed

HOLD_OUT = "held-out"
NO_BOUND = 1 << 30


def open_tasks(context: Context, family: ModelFamily) -> tuple[TaskSet, Sequence[int], list[EvalSet]]:
    """The training tasks, which of them may be issued, and the evaluation sets."""
    run = context.run
    tasks = task_set(context, family, "data.train", str(run.data.train), run.data.columns)
    if "teacher" in context.plan.roles:
        check_taught(tasks, range(len(tasks)), run.teachers)
    if not run.eval.every:
        return tasks, range(len(tasks)), []
    if run.eval.sets:
        sets = [_eval_set(context, family, at, table) for at, table in enumerate(run.eval.sets)]
        return tasks, range(len(tasks)), sets
    train, held = tasks.hold_out(run.eval.size, run.seed)
    return tasks, train, [EvalSet(HOLD_OUT, tasks, held, run.eval.samples, eval_sampling(run, None))]


def remarks(tasks: TaskSet, train: Sequence[int]) -> list[str]:
    """What a person should know of how the tasks were used."""
    said = [f"{tasks.num_skipped} tasks are skipped: their prompts are too long"] if tasks.num_skipped else []
    if held := len(tasks) - len(train):
        said.append(f"{held} of {len(tasks)} tasks are held out for evaluation; name [[eval.sets]] to use others")
    return said


def task_set(context: Context, family: ModelFamily, key: str, path: str, columns: Any) -> TaskSet:
    """The task file of a key, under the settings of `[data]`, checked for what rewards and environment read."""
    run = context.run
    needs = [_need(context, choice) for choice in run.rewards]
    environments: dict[str, type[Environment]] = {
        choice.name: type(context.build(choice.chosen)) for choice in (run.environment, *run.environments)
    }
    alone = not run.environments
    needs += [_played(name, environment, run.environment.name, alone) for name, environment in environments.items()]
    source = context.build(run.source.chosen)
    try:
        source.open(path, columns)
    except ConfigError as error:
        raise ConfigError(key, error.got, error.fix) from error  # a source does not know which key names its file
    limit = run.data.max_prompt_tokens or context_of(run) - run.rollout.max_new_tokens
    tasks = TaskSet(
        source, family, system_prompt=run.data.system_prompt, max_prompt_tokens=limit, too_long=run.data.too_long,
        needs=needs, tools=environments[run.environment.name].tools,
        tools_of={name: environment.tools for name, environment in environments.items()},
        media=[type(context.build(each.chosen)).medium for each in run.media],
    )  # fmt: skip
    if run.environments:
        check_known(tasks, list(environments))
    return tasks


def check_known(tasks: TaskSet, names: Sequence[str]) -> None:
    """Raises ConfigError for the first task whose environment the run does not have. A run of one environment plays all."""
    for index in range(len(tasks)):
        if (name := tasks[index].environment) and name not in names:
            fix = f"this run has {', '.join(names)}: add it as [[environments]], or leave such tasks out of data.train"
            raise ConfigError("environments", f"{tasks.where(index)}, which names {name!r}", fix)


def _played(name: str, environment: type[Environment], default: str, alone: bool) -> Need:
    """What an environment reads of the tasks that it plays: the run's those of all names, where there is no other."""
    return Need(name, environment.needs_columns, lambda task: alone or (task.environment or default) == name)


def _need(context: Context, choice: Any) -> Need:
    """What a reward reads of the tasks that it judges."""
    columns = type(context.build(choice.chosen)).needs_columns
    return Need(choice.name, columns, lambda task: applies(choice.only, task))


def _eval_set(context: Context, family: ModelFamily, at: int, table: Any) -> EvalSet:
    key = f"eval.sets.{at}.path"
    tasks = task_set(context, family, key, str(table.path), table.columns or context.run.data.columns)
    size = min(table.size or len(tasks), len(tasks))
    samples = table.samples or context.run.eval.samples
    return EvalSet(table.name, tasks, range(size), samples, eval_sampling(context.run, table.temperature))


def eval_sampling(run: Any, own: float | None) -> Sampling:
    """As in training unless the set or `[eval]` says otherwise; greedy needs no nucleus."""
    chosen = own if own is not None else run.eval.temperature
    temperature = run.rollout.temperature if chosen is None else chosen
    return Sampling(temperature, run.rollout.top_p if temperature else 1.0)


def replayed_routing(run: Any) -> Routing | None:
    """How the model routes, where samples must say which experts they visited."""
    return routing(run.model.path) if run.model.routing_replay == "rollout" else None


def make_selection(context: Context, tasks: TaskSet, train: Sequence[int]) -> Selection:
    """The sampler and the filters of a run."""
    run = context.run
    sampler = context.build(run.sampler.chosen) if run.data.shuffle else Shuffle(ShuffleOptions(shuffle=False))
    filters = {choice.name: context.build(choice.chosen) for choice in run.filters}
    limit = run.rollout.refill_limit * run.rollout.prompts_per_step
    return Selection(sampler, filters, tasks, train, run.seed, limit)


def media_store(context: Context) -> str:
    """The directory of the run's processed media."""
    return str(Path(context.run_dir).absolute() / "media")


def context_of(run: Any) -> int:
    """The model's context in tokens; one that does not say has no bound of its own."""
    return model_context(run.model.path) or NO_BOUND


def engine_spec(run: Any, version: Version) -> EngineSpec:
    """What each engine of a run is started with; its pool names it."""
    model = {**run.model.model_dump(mode="json"), "dtype": run.engine_dtype}
    return EngineSpec(
        model, context_of(run), run.seed, run.deterministic, version,
        kv_across_versions=run.rollout.kv_across_versions,
    )  # fmt: skip


def make_desk(context: Context, family: ModelFamily, limit: int | None = None) -> MediaDesk:
    """The processors of the run's media, and where what they make is kept, within a limit of bytes where one is given."""
    run = context.run
    return MediaDesk(
        run.media, context.children, media_store(context), run.model.model_dump(mode="json"), family, limit
    )


@asynccontextmanager
async def opened_desk(context: Context, family: ModelFamily) -> AsyncIterator[MediaDesk]:
    """A desk of one's own, for rows that nobody samples."""
    desk = make_desk(context, family)
    try:
        await desk.start()
        yield desk
    finally:
        await desk.stop()


def make_pool(context: Context, now: Version, tell: Tell, suppress: tuple[int, ...] = ()) -> EnginePool:
    """Engines for the run at version `now`; they start with the model folder, and serve as they are only at step 0."""
    run, group = context.run, context.plan.groups["rollout"]
    spec = replace(engine_spec(run, now._replace(step=0)), media=media_store(context) if run.media else "")
    slots = engine_slots(context, group, "engine", run.engine, spec, run.placement.rollout.silence_s)
    weights = run.weights
    feed = WeightFeed(context.weights, context.clock, weights.proof, weights.tolerance, weights.timeout_s)
    bounds = pool_bounds(run)
    return EnginePool(
        slots, context.clock, feed, tell, now.step == 0, run.deterministic, group.sleeps, suppress, bounds
    )


def engine_slots(
    context: Context, group: Any, prefix: str, choice: BackendChoice, spec: EngineSpec, silence_s: float
) -> list[EngineSlot]:
    """The places of a worker group's engines, on its devices; none is started."""
    can = type(context.build(choice.chosen)).capabilities
    slots = []
    for number in range(group.size):
        name = f"{prefix}-{number}"
        worker = WorkerSpec(
            name, choice.chosen, str(choice.python or ""), {"OMP_NUM_THREADS": str(group.threads or 1)},
            devices=group.seat(number), num_gpus=context.plan.num_gpus(group.seat(number)),
        )  # fmt: skip
        lane = context.lane(name, group.devices_of(number))
        slots.append(EngineSlot(name, choice.chosen, spec, worker, context.workers, can, lane, silence_s))
    return slots


def pool_bounds(run: Any) -> Bounds:
    """Where all must come out the same bit for bit, what is asked together stays together: nothing waits for room."""
    placement, turn_s = run.placement.rollout, run.rollout.turn_timeout_s
    return Bounds(turn_s) if run.deterministic else Bounds(turn_s, placement.requests_per_engine, placement.backlog)
