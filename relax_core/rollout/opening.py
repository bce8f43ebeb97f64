# SPDX-License-Identifier: Apache-2.0
"""Builds the tasks of a rollout from its configuration: training tasks, the hold-out, evaluation sets, sampler and filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_core.api.family import ModelFamily
from relax_core.api.role import Context
from relax_core.rollout.evaluation import EvalSet
from relax_core.rollout.opening_data import HOLD_OUT, task_set
from relax_core.rollout.pool import Sampling
from relax_core.rollout.selection import Selection
from relax_core.rollout.shuffle import Shuffle, ShuffleOptions
from relax_core.rollout.tasks import TaskSet
from relax_core.rollout.teaching import check_taught


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


def make_selection(context: Context, tasks: TaskSet, train: Sequence[int]) -> Selection:
    """The sampler and the filters of a run."""
    run = context.run
    sampler = context.build(run.sampler.chosen) if run.data.shuffle else Shuffle(ShuffleOptions(shuffle=False))
    filters = {choice.name: context.build(choice.chosen) for choice in run.filters}
    limit = run.rollout.refill_limit * run.rollout.prompts_per_step
    return Selection(sampler, filters, tasks, train, run.seed, limit)
