# SPDX-License-Identifier: Apache-2.0
"""Which of a run's teachers teaches a task: exactly one, by the tasks' own columns. Every task is looked at before start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from relax_core.api.batch import RowBatch
from relax_core.api.column import TEACHER_INDEX
from relax_core.api.errors import ConfigError
from relax_core.api.task import Task
from relax_core.options.teachers import TeacherTable
from relax_core.rollout.rows import with_row_column
from relax_core.rollout.tasks import applies

if TYPE_CHECKING:
    from relax_core.rollout.tasks import TaskSet


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
