# SPDX-License-Identifier: Apache-2.0
"""The teacher role: what other, fixed models think of the rows that the policy sampled. Stateless.

Each row has one teacher, which a trainer runs forward or an engine pool scores. Where there are several, the rollout wrote
down which; those of trainers live on the same devices in turns. Their log-probs are of logits / `rollout.temperature`, as
the policy's own are.

A teacher behind an engine pool: the log-probs of the rows' own tokens, of logits / `rollout.temperature`.

It gives nothing else: the planner refuses an algorithm that asks engines for likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from relax_core.api.algorithm import log_probs_at, top_k
from relax_core.api.batch import TEACHER_INDEX, Ragged, RowBatch, student_top_k_ids
from relax_core.api.events import RoleFailed, RoleRecovered
from relax_core.api.plan import Operation, Reads
from relax_core.api.role import Role
from relax_core.config.run_config import RunContext
from relax_core.config.tables import TeacherTable
from relax_core.engines.auxiliary_pools import GROUP, AuxiliaryPools, auxiliary_pool_names
from relax_core.engines.model_client import PoolModelClient
from relax_core.roles.device_lease import forwarding
from relax_core.roles.forward import INPUTS, Filled, Filling, ForwardLoop, width_of
from relax_core.roles.rank_group import RankGroup


class TeacherBackend(Protocol):
    """What a teacher is asked through."""

    async def forward(self, rows: RowBatch, columns: Sequence[str]) -> Mapping[str, Ragged]: ...


class PoolTeacher:
    """Scores rows with the engines of a pool."""

    def __init__(self, context: RunContext, hand: PoolModelClient) -> None:
        self._hand, self._temperature = hand, float(context.config.rollout.temperature)

    async def forward(self, rows: RowBatch, columns: Sequence[str]) -> dict[str, Ragged]:
        """`log_probs`, in the order of the rows."""
        tokens = rows.columns["tokens"]
        scores = await self._hand.score_rows([row.tolist() for row in tokens.rows()], self._temperature)
        values = np.concatenate([np.asarray(one, np.float32) for one in scores])
        return {"log_probs": Ragged(values, tokens.lengths)}


def context_tells(context: RunContext) -> Callable[[str, str, float], Awaitable[None]]:
    """Engines that failed and came back, told to the board."""

    async def tell(what: str, detail: str, seconds: float) -> None:
        if what == "failed":
            await context.board.emit(RoleFailed("engine", detail, 4, fatal=False))
        else:
            await context.board.emit(RoleRecovered("engine", seconds, detail))

    return tell


INDEX = TEACHER_INDEX.name


class Teacher(Role):
    """What fixed models think of the policy's rows."""

    name = "teacher"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        rows, ids = frozenset({"tokens", "loss_mask"}), frozenset({"student_top_k_ids"})
        top = frozenset({"teacher_top_k_ids", "teacher_top_k_log_probs"})
        return (
            Operation("teacher.log_probs", cls.name, rows, frozenset({"teacher_log_probs"}), Reads.FIXED),
            Operation("teacher.top_k", cls.name, rows, top, Reads.FIXED),
            Operation("teacher.log_probs_at", cls.name, rows | ids, frozenset({"teacher_log_probs_at"}), Reads.FIXED),
        )

    async def run(self, context: RunContext) -> None:
        groups = groups_of(context)
        trainers: list[RankGroup] = []
        pools = AuxiliaryPools.of(context, auxiliary_pool_names(context, teaching=True), context_tells(context))
        try:
            await pools.start()
            tutors: list[TeacherBackend] = []
            for group, teacher in zip(groups, context.config.teachers, strict=True):
                if teacher.engine:
                    tutors.append(PoolTeacher(context, pools.hands[teacher.engine]))
                    continue
                trainers.append(await RankGroup.start(context, group, self.name, _model(context, teacher)))
                tutors.append(trainers[-1])
            context.doing("ready", pools=pools.facts)
            await TeacherLoop(context, groups, tutors).run()
        finally:
            for trainer in trainers:
                await trainer.stop()
            await pools.close()


def groups_of(context: RunContext) -> tuple[str, ...]:
    """The worker groups of the teachers, in the order of the configuration."""
    several = len(context.config.teachers) > 1
    return tuple(
        GROUP + teacher.engine if teacher.engine else f"{Teacher.name}-{number}" if several else Teacher.name
        for number, teacher in enumerate(context.config.teachers)
    )


def _model(context: RunContext, teacher: TeacherTable) -> dict[str, str]:
    """As a `[model]` table: nothing of it is trained, so there are no adapters."""
    return {"path": str(teacher.path), "dtype": teacher.dtype or context.config.model.dtype}


def _filling(context: RunContext, several: bool) -> Filling:
    """What the algorithm needs of a teacher, in one pass."""
    columns: dict[str, str] = {}
    asks: list[str] = []
    inputs = [*INPUTS, *([INDEX] if several else [])]
    needed = {column for operation in context.plan.operations if operation.role == Teacher.name
              for column in operation.produces}  # fmt: skip
    if "teacher_log_probs" in needed:
        columns["teacher_log_probs"] = "log_probs"
        asks.append("log_probs")
    if "teacher_top_k_ids" in needed:
        columns |= {"teacher_top_k_ids": "top_k_ids", "teacher_top_k_log_probs": "top_k_log_probs"}
        asks.append(top_k(width_of(context, "teacher_top_k_ids")).key)
    if "teacher_log_probs_at" in needed:
        wanted = log_probs_at(student_top_k_ids(width_of(context, "student_top_k_ids"))).key
        columns["teacher_log_probs_at"] = wanted
        asks.append(wanted)
        inputs.append("student_top_k_ids")
    return Filling(columns, tuple(asks), tuple(inputs))


class TeacherLoop(ForwardLoop):
    """Rows go to their teachers, one after another; then all of their columns are written at once."""

    def __init__(self, context: RunContext, groups: Sequence[str], tutors: Sequence[TeacherBackend]) -> None:
        self._groups, self._tutors = tuple(groups), tuple(tutors)
        filling = _filling(context, len(groups) > 1)
        first = "actor-fwd" if "student_top_k_ids" in filling.inputs else ""
        super().__init__(context, Teacher.name, filling, first)

    def lives(self) -> tuple[str, ...]:
        return self._groups

    async def fill(self, rows: RowBatch) -> Filled:
        pupils = _pupils(rows, len(self._tutors))
        parts = [await self._taught(number, rows.take(own)) for number, own in enumerate(pupils) if own]
        order = [index for own in pupils for index in own]
        if len(parts) == 1:
            return parts[0], None
        back = sorted(range(len(order)), key=order.__getitem__)
        return {name: Ragged.concatenate([part[name] for part in parts]).take(back) for name in parts[0]}, None

    async def _taught(self, number: int, rows: RowBatch) -> dict[str, Ragged]:
        group = self._groups[number]
        async with forwarding(self.context, group):
            self.context.doing(f"scoring with {group}", rows=len(rows))
            return self.filling.of(await self._tutors[number].forward(rows, self.filling.asks))


def _pupils(rows: RowBatch, teachers: int) -> list[list[int]]:
    """Indices of the rows of each teacher."""
    if teachers == 1:
        return [list(range(len(rows)))]
    who = rows.columns[INDEX].values.tolist()
    return [[index for index, own in enumerate(who) if own == teacher] for teacher in range(teachers)]
