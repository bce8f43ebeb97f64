# SPDX-License-Identifier: Apache-2.0
"""The teachers of a plan: one set of operations each, for disjoint rows. Which rows these are, tasks say later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from relax_core.api.column import TEACHER_INDEX
from relax_core.api.errors import ConfigError
from relax_core.api.role import Operation
from relax_core.control.pools import check_asked
from relax_core.options.run_config import RunConfig
from relax_core.roles.plan import WorkerGroup

ROLE = "teacher"


def taught(operations: Sequence[Operation], config: RunConfig) -> tuple[Operation, ...]:
    """The operations, those of the teacher once for each that there is. Raises ConfigError where none is, or two overlap."""
    if not any(operation.role == ROLE for operation in operations):
        return tuple(operations)
    if not config.teachers:
        fix = 'it learns from a teacher: write teachers = "FOLDER", or [[teachers]] with path and only'
        raise ConfigError("teachers", f"nothing, with algorithm {config.algorithm.name}", fix)
    _check_filters(config)
    check_asked(config, {column for operation in operations if operation.role == ROLE for column in operation.produces})
    if len(config.teachers) == 1:
        return tuple(operations)
    return tuple(each for operation in operations for each in _of_each(operation, config))


def teacher_groups(group: WorkerGroup, config: RunConfig) -> dict[str, WorkerGroup]:
    """One worker group a teacher with a folder; several live on the same devices, in turns. Others are engine pools."""
    if len(config.teachers) < 2:
        return {ROLE: group}
    names = [f"{ROLE}-{number}" for number, teacher in enumerate(config.teachers) if teacher.path]
    return {name: replace(group, name=name) for name in names}


def _check_filters(config: RunConfig) -> None:
    """Filters that are alike overlap for sure; whether others do, the tasks show."""
    seen: dict[str, int] = {}
    for number, teacher in enumerate(config.teachers):
        only = "=".join(part.strip() for part in teacher.only.split("=", 1))
        if only in seen:
            got = f"{teacher.only or 'nothing'}, as teachers.{seen[only]} has"
            raise ConfigError(f"teachers.{number}.only", got, 'give each its own tasks: only = "domain=maths"')
        seen[only] = number
    if "" in seen and len(config.teachers) > 1:
        fix = 'the others teach some of them: name its own, such as only = "domain=code"'
        raise ConfigError(f"teachers.{seen['']}.only", "nothing, which is every task", fix)


def _of_each(operation: Operation, config: RunConfig) -> Iterator[Operation]:
    if operation.role != ROLE:
        yield operation
        return
    consumes = operation.consumes | {TEACHER_INDEX.name}
    for number, teacher in enumerate(config.teachers):
        name = f"{ROLE}-{number}.{operation.name.partition('.')[2]}"
        yield replace(operation, name=name, consumes=consumes, row_filter=teacher.only)
