# SPDX-License-Identifier: Apache-2.0
"""The source role: puts rows of a dataset on the bus, a step or two ahead of the actor. Stateless.

The place in the data is the number of the group, which the ledger keeps: a resumed run goes on with the same rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Issue, Sealed
from relax_core.api.events import Logged
from relax_core.api.outcome import Outcome
from relax_core.api.role import Context, Operation, Role
from relax_core.api.source import Sampler
from relax_core.rollout.dataset_files import open_training, remarks, row_batch
from relax_core.rollout.example import Example

POLL_S = 1.0


class RowSource(Role):
    """Hands out rows that were written beforehand."""

    name = "source"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        produced = frozenset({"tokens", "loss_mask", "margins"})
        return (Operation("source.rows", cls.name, frozenset(), produced, trigger="admission"),)

    async def run(self, context: Context) -> None:
        self._context, self._admitted = context, 0
        self._sampler: Sampler = context.build(context.run.sampler.chosen)
        opened = await asyncio.to_thread(open_training, context.run, context.build, context.plan.source)
        self._dataset, self._train = opened
        for remark in remarks(*opened):
            await context.board.emit(Logged("info", self.name, remark))
        context.doing("ready", rows=len(self._train))
        while not context.stopping:
            await context.pause_point()
            if issues := await self._admit():
                await self._put(issues)
            elif (await context.bus.version()).step >= context.run.steps:
                return

    async def _admit(self) -> tuple[Issue, ...]:
        """Groups that a step will have a place for. Rows are as new as any version: none of them sampled anything."""
        context = self._context
        newest = (await context.bus.version())._replace(step=context.run.steps)
        with context.waiting("leave to hand out rows", "actor (a step makes room)", POLL_S):
            issues = await context.bus.admit(self.name, newest, context.run.rollout.prompts_per_step, POLL_S)
        self._admitted += sum(len(issue.attempts) for issue in issues)
        return issues

    async def _put(self, issues: Sequence[Issue]) -> None:
        context = self._context
        held = frozenset(attempt for issue in issues for attempt in issue.attempts)
        await context.bus.report_held(self.name, held, self._admitted)
        context.doing("handing out rows", groups=len(issues))
        examples = await asyncio.to_thread(
            lambda: {attempt: found for issue in issues for attempt, found in self._examples(issue)}
        )
        version = await context.bus.version()
        sealed = [
            # No weights are in them, so that no rollback makes them worthless.
            Sealed(attempt, 1, Outcome.FINISHED, 0.0, version.step, found.num_trained, newest=0)
            for attempt, found in examples.items()
        ]
        batch = row_batch(examples, self._margins(issues) if "margins" in context.plan.trained_columns else None)
        room = context.waiting("room on the bus", "actor (a step frees it)", context.run.rollout.step_timeout_s)
        with room as wait:
            while not await context.bus.put(batch, sealed, POLL_S):
                context.check(wait)
                await context.pause_point()
        await context.bus.report_held(self.name, frozenset(), self._admitted)

    def _examples(self, issue: Issue) -> list[tuple[AttemptId, Example]]:
        """One, or the two of a pair, in the order of the attempts."""
        return list(zip(issue.attempts, self._dataset.examples(self._index(issue)), strict=True))

    def _margins(self, issues: Sequence[Issue]) -> list[float]:
        """Of each row."""
        return [self._dataset.margin(self._index(issue)) for issue in issues for _ in issue.attempts]

    def _index(self, issue: Issue) -> int:
        """The row of the data that a group is."""
        run, count = self._context.run, len(self._train)
        return self._train[
            self._sampler.pick(issue.group, count, run.seed) if run.data.shuffle else issue.group % count
        ]
