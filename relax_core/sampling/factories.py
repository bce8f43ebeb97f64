# SPDX-License-Identifier: Apache-2.0
"""Builds the tasks of a rollout from its configuration: training tasks, the hold-out, evaluation sets, sampler and filters.

Which of a run's teachers teaches a task: exactly one, by the tasks' own columns. Every task is looked at before start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relax_core.api.batch import TEACHER_INDEX, RowBatch
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily
from relax_core.api.task import Task
from relax_core.config.run_config import RunContext
from relax_core.config.tables import TeacherTable
from relax_core.data.factories import HOLD_OUT, task_set
from relax_core.data.tasks import TaskSet, applies
from relax_core.engines.pool import Sampling
from relax_core.sampling.evaluation import EvalSet
from relax_core.sampling.rows import with_row_column
from relax_core.sampling.selection import Selection, Shuffle, ShuffleOptions

if TYPE_CHECKING:
    from relax_core.data.tasks import TaskSet


def teachers_of(task: Task, teachers: Sequence[TeacherTable]) -> list[int]:
    """Those that teach it, by number."""
    return [number for number, teacher in enumerate(teachers) if applies(teacher.only, task)]


def check_taught(tasks: TaskSet, train: Sequence[int], teachers: Sequence[TeacherTable]) -> None:
    """Raises ConfigError for the first task that no teacher teaches, or more than one does."""
    if not any(teacher.only for teacher in teachers):
        return
    for index in train:
        found = teachers_of(tasks[index], teachers)
        if not found:
            fix = "give one of them its kind as well, or leave such tasks out of data.train"
            raise ConfigError("teachers", f"{tasks.where(index)}, which none of them teaches", fix)
        if len(found) > 1:
            which = " and ".join(f"teachers.{number} ({teachers[number].only})" for number in found)
            raise ConfigError("teachers", f"{tasks.where(index)}, which {which} teach", "give them disjoint tasks")


def with_teacher(rows: RowBatch, tasks: Mapping[int, Task], teachers: Sequence[TeacherTable]) -> RowBatch:
    """The rows with the number of their teacher; `tasks` by group."""
    of_group = {group: teachers_of(task, teachers)[0] for group, task in tasks.items()}
    return with_row_column(rows, TEACHER_INDEX, [of_group[row.group] for row in rows.ids])


def open_tasks(context: RunContext, family: ModelFamily) -> tuple[TaskSet, Sequence[int], list[EvalSet]]:
    """The training tasks, which of them may be issued, and the evaluation sets."""
    run = context.config
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


def _eval_set(context: RunContext, family: ModelFamily, at: int, table: Any) -> EvalSet:
    key = f"eval.sets.{at}.path"
    tasks = task_set(context, family, key, str(table.path), table.columns or context.config.data.columns)
    size = min(table.size or len(tasks), len(tasks))
    samples = table.samples or context.config.eval.samples
    return EvalSet(table.name, tasks, range(size), samples, eval_sampling(context.config, table.temperature))


def eval_sampling(run: Any, own: float | None) -> Sampling:
    """As in training unless the set or `[eval]` says otherwise; greedy needs no nucleus."""
    chosen = own if own is not None else run.eval.temperature
    temperature = run.rollout.temperature if chosen is None else chosen
    return Sampling(temperature, run.rollout.top_p if temperature else 1.0)


def make_selection(context: RunContext, tasks: TaskSet, train: Sequence[int]) -> Selection:
    """The sampler and the filters of a run."""
    run = context.config
    sampler = context.build(run.sampler.chosen) if run.data.shuffle else Shuffle(ShuffleOptions(shuffle=False))
    filters = {choice.name: context.build(choice.chosen) for choice in run.filters}
    limit = run.rollout.refill_limit * run.rollout.prompts_per_step
    return Selection(sampler, filters, tasks, train, run.seed, limit)
