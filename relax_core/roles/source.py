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
from relax_core.api.plan import Operation
from relax_core.api.role import Role
from relax_core.api.source import Sampler
from relax_core.api.trajectory import Outcome
from relax_core.config.run_config import RunContext
from relax_core.data.dataset import Example, open_training, row_batch
from relax_core.data.media_pipeline import opened_media_pipeline
from relax_core.data.placeholders import MediaRefused

POLL_S = 1.0


class RowSource(Role):
    """Hands out rows that were written beforehand."""

    name = "source"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        produced = frozenset({"tokens", "loss_mask", "margins", "media"})
        return (Operation("source.rows", cls.name, frozenset(), produced, trigger="admission"),)

    async def run(self, context: RunContext) -> None:
        self._context, self._admitted = context, 0
        self._sampler: Sampler = context.build(context.config.sampler.chosen)
        self._dataset, self._train = await asyncio.to_thread(
            open_training, context.config, context.build, context.plan.source
        )
        for remark in self._dataset.remarks(self._train):
            await context.run_status.emit(Logged("info", self.name, remark))
        async with opened_media_pipeline(context, self._dataset.family) as pipeline:  # without media it has no process
            self._media = pipeline
            await self._hand_out()

    async def _hand_out(self) -> None:
        context = self._context
        context.doing("ready", rows=len(self._train))
        while not context.stopping:
            await context.pause_point()
            if issues := await self._admit():
                await self._put(issues)
            elif (await context.bus.version()).step >= context.config.steps:
                return

    async def _admit(self) -> tuple[Issue, ...]:
        """Admit groups that a step will have a place for. Rows are as new as any version: none of them sampled anything."""
        context = self._context
        newest = (await context.bus.version())._replace(step=context.config.steps)
        with context.waiting("leave to hand out rows", "actor (a step makes room)", POLL_S):
            issues = await context.bus.admit(self.name, newest, context.config.rollout.prompts_per_step, POLL_S)
        self._admitted += sum(len(issue.attempts) for issue in issues)
        return issues

    async def _put(self, issues: Sequence[Issue]) -> None:
        context = self._context
        held = frozenset(attempt for issue in issues for attempt in issue.attempts)
        await context.bus.report_held(self.name, held, self._admitted)
        context.doing("handing out rows", groups=len(issues))
        places = {issue.group: self._index(issue.group) for issue in issues}
        examples = {attempt: found for issue in issues
                    for attempt, found in await self._examples(issue, places[issue.group])}  # fmt: skip
        version = await context.bus.version()
        sealed = [
            # No weights are in them, so that no rollback makes them worthless.
            Sealed(attempt, 1, Outcome.FINISHED, 0.0, version.step, examples[attempt].num_trained, newest=0)
            if attempt in examples else Sealed(attempt, 0, Outcome.MEDIA_ERROR)
            for issue in issues for attempt in issue.attempts
        ]  # fmt: skip
        asked = "margins" in context.plan.trained_columns
        given = [self._dataset.margin(places[attempt.group]) for attempt in examples] if asked else None
        batch = row_batch(examples, given, bool(context.config.media))
        room = context.waiting("room on the bus", "actor (a step frees it)", context.config.rollout.step_timeout_s)
        with room as wait:
            while not await context.bus.put(batch, sealed, POLL_S):
                context.check(wait)
                await context.pause_point()
        await context.bus.report_held(self.name, frozenset(), self._admitted)

    async def _examples(self, issue: Issue, index: int) -> list[tuple[AttemptId, Example]]:
        """Read one example, or the two of a pair, in the order of the attempts; none where a medium can't be read."""
        try:
            hold = None
            if self._context.config.media:
                await self._media.prepare(self._dataset.messages(index))
                hold = self._media.fill_placeholders
            found = await asyncio.to_thread(self._dataset.examples, index, hold)
        except MediaRefused as refused:
            await self._context.run_status.emit(
                Logged("warning", self.name, f"{self._dataset.where(index)}: {refused}")
            )
            return []
        return list(zip(issue.attempts, found, strict=True))

    def _index(self, group: int) -> int:
        """Return the row of the data that a group is."""
        run, count = self._context.config, len(self._train)
        return self._train[self._sampler.pick(group, count, run.seed) if run.data.shuffle else group % count]
