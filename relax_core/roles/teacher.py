# SPDX-License-Identifier: Apache-2.0
"""The teacher role: fixed models score the rows that the policy sampled. The role is stateless.

Each row has one teacher: a model that a trainer runs forward, or an engine pool. With several teachers, the rollout
writes the index of each row's teacher into a column. Teachers that trainers run take turns on the same devices.
Log-probs are of logits / `rollout.temperature`, like the policy's. An engine pool returns only log-probs of the rows'
own tokens; the planner refuses algorithms that need more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_core.api.algorithm import log_probs_at, top_k
from relax_core.api.batch import TEACHER_INDEX, Ragged, RowBatch, student_top_k_ids
from relax_core.api.plan import Operation, Reads
from relax_core.api.role import Role
from relax_core.config.run_config import RunContext
from relax_core.engines.factories import AUXILIARY_GROUP, AuxiliaryPools, engine_events
from relax_core.engines.model_client import PoolModelClient
from relax_core.engines.scaler import Scaler, scaled_pools
from relax_core.roles.forward import INPUTS, Filled, ForwardColumns, ForwardLoop, ForwardModel, forward_lease, width_of
from relax_core.roles.rank_group import RankGroup
from relax_core.rpc.waiting import attended


class PoolTeacher:
    """A teacher that scores rows with an engine pool."""

    def __init__(self, context: RunContext, client: PoolModelClient) -> None:
        self._client, self._temperature = client, float(context.config.rollout.temperature)

    async def forward(self, rows: RowBatch, columns: Sequence[str]) -> dict[str, Ragged]:
        """Return `log_probs` in the order of the rows. A paused pool is resumed for this call only."""
        tokens, asleep = rows.columns["tokens"], self._client.paused
        if asleep:
            await self._client.resume()
        try:
            scores = await self._client.score_rows([row.tolist() for row in tokens.rows()], self._temperature)
        finally:
            if asleep:
                await self._client.pause()
        values = np.concatenate([np.asarray(one, np.float32) for one in scores])
        return {"log_probs": Ragged(values, tokens.lengths)}


class Teacher(Role):
    """The role that fills columns with scores of fixed models."""

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
        teachers, own = context.config.teachers, context.config.model
        models: list[tuple[str, ForwardModel]] = []
        trainers: list[RankGroup] = []
        pools = AuxiliaryPools.from_context(context, engine_events(context), teaching=True)
        try:
            await pools.start_in_turns()
            for number, teacher in enumerate(teachers):
                if teacher.engine:
                    pool = PoolTeacher(context, pools.clients[teacher.engine])
                    models.append((AUXILIARY_GROUP + teacher.engine, pool))
                    continue
                group = f"{self.name}-{number}" if len(teachers) > 1 else self.name
                # A teacher is not trained, so its `[model]` table has no adapters.
                table = {"path": str(teacher.path), "dtype": teacher.dtype or own.dtype, "head_dtype": own.head_dtype}
                trainers.append(await RankGroup.start(context, group, self.name, table))
                models.append((group, trainers[-1]))
            scaler = Scaler(scaled_pools(context, pools), self.name, context)
            context.doing("ready", pools=pools.facts, scaling=scaler.facts)
            async with attended(scaler.run()):
                await _TeacherLoop(context, models).run()
        finally:
            for trainer in trainers:
                await trainer.stop()
            await pools.close()


class _TeacherLoop(ForwardLoop):
    """A loop that sends rows to their teachers, one teacher after another, and then writes all columns at once."""

    def __init__(self, context: RunContext, models: Sequence[tuple[str, ForwardModel]]) -> None:
        """`models`: (worker group, model) of each teacher, in the order of the configuration."""
        self._models = models
        columns: dict[str, str] = {}
        outputs: list[str] = []
        inputs = [*INPUTS, *([TEACHER_INDEX.name] if len(models) > 1 else [])]
        operations = [operation for operation in context.plan.operations if operation.role == Teacher.name]
        needed = {column for operation in operations for column in operation.produces}
        if "teacher_log_probs" in needed:
            columns["teacher_log_probs"] = "log_probs"
            outputs.append("log_probs")
        if "teacher_top_k_ids" in needed:
            columns |= {"teacher_top_k_ids": "top_k_ids", "teacher_top_k_log_probs": "top_k_log_probs"}
            outputs.append(top_k(width_of(context, "teacher_top_k_ids")).key)
        first = ""
        if "teacher_log_probs_at" in needed:
            wanted = log_probs_at(student_top_k_ids(width_of(context, "student_top_k_ids"))).key
            columns["teacher_log_probs_at"] = wanted
            outputs.append(wanted)
            inputs.append("student_top_k_ids")
            first = "actor-fwd"
        forward = ForwardColumns(columns, tuple(outputs), tuple(inputs))
        super().__init__(context, Teacher.name, forward, blocked_by=first, groups=[group for group, _ in models])

    async def fill(self, rows: RowBatch) -> Filled:
        """Let each teacher score its own rows, and return the columns in the order of `rows`."""
        teacher_of = rows.columns[TEACHER_INDEX.name].values.tolist() if len(self._models) > 1 else [0] * len(rows)
        parts: list[dict[str, Ragged]] = []
        order: list[int] = []
        for number, (group, model) in enumerate(self._models):
            own = [index for index, teacher in enumerate(teacher_of) if teacher == number]
            if own:
                async with forward_lease(self.context, group):
                    self.context.doing(f"scoring with {group}", rows=len(own))
                    parts.append(self.columns.of(await model.forward(rows.take(own), self.columns.outputs)))
                order += own
        if len(parts) == 1:
            return parts[0], None
        back = sorted(range(len(order)), key=order.__getitem__)
        return {name: Ragged.concatenate([part[name] for part in parts]).take(back) for name in parts[0]}, None
