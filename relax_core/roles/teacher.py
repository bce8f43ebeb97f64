# SPDX-License-Identifier: Apache-2.0
"""The teacher role: fixed models score the rows that the policy sampled. Stateless.

Each row has one teacher, which a trainer runs forward or an engine pool scores. Where there are several, the rollout wrote
down which; those of trainers live on the same devices one after another. Log-probs are of logits / `rollout.temperature`,
as the policy's own are. An engine pool gives those of the rows' own tokens and nothing else; the planner refuses more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_core.api.algorithm import log_probs_at, top_k
from relax_core.api.batch import TEACHER_INDEX, Ragged, RowBatch, student_top_k_ids
from relax_core.api.plan import Operation, Reads
from relax_core.api.role import Role
from relax_core.config.run_config import RunContext
from relax_core.config.tables import TeacherTable
from relax_core.engines.factories import AUXILIARY_GROUP, AuxiliaryPools, engine_events
from relax_core.engines.model_client import PoolModelClient
from relax_core.roles.forward import INPUTS, Filled, ForwardColumns, ForwardLoop, ForwardModel, forward_lease, width_of
from relax_core.roles.rank_group import RankGroup


class PoolTeacher:
    """Scores rows with the engines of a pool."""

    def __init__(self, context: RunContext, client: PoolModelClient) -> None:
        self._client, self._temperature = client, float(context.config.rollout.temperature)

    async def forward(self, rows: RowBatch, columns: Sequence[str]) -> dict[str, Ragged]:
        """Return `log_probs`, in the order of the rows."""
        tokens = rows.columns["tokens"]
        scores = await self._client.score_rows([row.tolist() for row in tokens.rows()], self._temperature)
        values = np.concatenate([np.asarray(one, np.float32) for one in scores])
        return {"log_probs": Ragged(values, tokens.lengths)}


INDEX = TEACHER_INDEX.name


class Teacher(Role):
    """Scores of fixed models for the policy's rows."""

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
        pools = AuxiliaryPools.from_context(context, engine_events(context), teaching=True)
        try:
            await pools.start()
            models: list[ForwardModel] = []
            for group, teacher in zip(groups, context.config.teachers, strict=True):
                if teacher.engine:
                    models.append(PoolTeacher(context, pools.clients[teacher.engine]))
                    continue
                trainers.append(await RankGroup.start(context, group, self.name, _model(context, teacher)))
                models.append(trainers[-1])
            context.doing("ready", pools=pools.facts)
            await _TeacherLoop(context, groups, models).run()
        finally:
            for trainer in trainers:
                await trainer.stop()
            await pools.close()


def groups_of(context: RunContext) -> tuple[str, ...]:
    """Name the worker groups of the teachers, in the order of the configuration."""
    several = len(context.config.teachers) > 1
    return tuple(
        AUXILIARY_GROUP + teacher.engine if teacher.engine else f"{Teacher.name}-{number}" if several else Teacher.name
        for number, teacher in enumerate(context.config.teachers)
    )


def _model(context: RunContext, teacher: TeacherTable) -> dict[str, str]:
    """Return a teacher as a `[model]` table: nothing of it is trained, so there are no adapters."""
    return {"path": str(teacher.path), "dtype": teacher.dtype or context.config.model.dtype}


def _columns(context: RunContext, several: bool) -> ForwardColumns:
    """Collect what the algorithm needs of a teacher, in one pass."""
    columns: dict[str, str] = {}
    outputs: list[str] = []
    inputs = [*INPUTS, *([INDEX] if several else [])]
    needed = {column for operation in context.plan.operations if operation.role == Teacher.name
              for column in operation.produces}  # fmt: skip
    if "teacher_log_probs" in needed:
        columns["teacher_log_probs"] = "log_probs"
        outputs.append("log_probs")
    if "teacher_top_k_ids" in needed:
        columns |= {"teacher_top_k_ids": "top_k_ids", "teacher_top_k_log_probs": "top_k_log_probs"}
        outputs.append(top_k(width_of(context, "teacher_top_k_ids")).key)
    if "teacher_log_probs_at" in needed:
        wanted = log_probs_at(student_top_k_ids(width_of(context, "student_top_k_ids"))).key
        columns["teacher_log_probs_at"] = wanted
        outputs.append(wanted)
        inputs.append("student_top_k_ids")
    return ForwardColumns(columns, tuple(outputs), tuple(inputs))


class _TeacherLoop(ForwardLoop):
    """Sends rows to their teachers, one after another; then all of their columns are written at once."""

    def __init__(self, context: RunContext, groups: Sequence[str], models: Sequence[ForwardModel]) -> None:
        self._groups, self._models = tuple(groups), tuple(models)
        columns = _columns(context, len(groups) > 1)
        first = "actor-fwd" if "student_top_k_ids" in columns.inputs else ""
        super().__init__(context, Teacher.name, columns, owed_by=first, groups=self._groups)

    async def fill(self, rows: RowBatch) -> Filled:
        if len(self._models) == 1:
            shares = [list(range(len(rows)))]
        else:
            teacher_of = rows.columns[INDEX].values.tolist()
            shares = [
                [index for index, own in enumerate(teacher_of) if own == number] for number in range(len(self._models))
            ]
        parts = []
        for group, model, own in zip(self._groups, self._models, shares, strict=True):
            if own:
                async with forward_lease(self.context, group):
                    self.context.doing(f"scoring with {group}", rows=len(own))
                    parts.append(self.columns.of(await model.forward(rows.take(own), self.columns.outputs)))
        if len(parts) == 1:
            return parts[0], None
        order = [index for own in shares for index in own]
        back = sorted(range(len(order)), key=order.__getitem__)
        return {name: Ragged.concatenate([part[name] for part in parts]).take(back) for name in parts[0]}, None
