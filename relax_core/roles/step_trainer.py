# SPDX-License-Identifier: Apache-2.0
"""The trainer's work on one step: claim, read, train, verify the row leases, update. It commits and publishes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from math import ceil

from relax_core.api.algorithm import Algorithm
from relax_core.api.bus import Claim, ClaimRequest
from relax_core.api.errors import StaleFence
from relax_core.api.trainer import UpdateOutcome, UpdateResult
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.roles.rank_group import RankGroup, TrainerDeviceLease
from relax_core.roles.recovery import NonFinitePolicy
from relax_core.roles.step import ClaimedRows, StepPart, StepTimes, TrainingStep

POLL_S = 1.0
RENEW_S = 60.0
"""Between renewals of a step's leases, far below the time after which the bus takes them back."""
MAX_CHUNKS = 8
"""Of a streamed step: each costs a call of every rank and a micro-batch that is not full."""
MAX_LOST = 3
"""Times that a step is begun anew after a lost lease."""
LAST_CALL_S = 3.0
"""Past the deadline, for those who prepare rows to hear that what is there is enough."""
MAX_EMPTY = 5
"""Deadlines in a row that may pass without one group: each time those that were waited for are let go for others."""
LATE = "raise rollout.step_timeout_s: also what was begun in place of late groups came too late"


class StepTrainer:
    """Trains steps, one after another.

    A step: `waiting for rows -> training its parts -> rows verified -> updated`, once or more often; a row lease that is
    lost before the first update leads back to the beginning, one that is lost later ends the run of the ranks.

    Invariants:
    - Rows are trained as they are claimed. Whether a claim brings the whole step or the first groups that are ready is the
      plan's decision (`Plan.streams`); all else is the same.
    - The leases of all rows of the step are renewed while it lasts, and verified right before weights change.
    - Devices are leased from the first rows on, and never while none are there.
    """

    def __init__(
        self, context: RunContext, trainer: RankGroup, task: str, lease: TrainerDeviceLease,
        non_finite: NonFinitePolicy | None = None, meanwhile: Callable[[], Awaitable[None]] | None = None,
    ) -> None:  # fmt: skip
        """`meanwhile` is called again and again while rows are waited for and the weights are those of the step's start."""
        self._context, self._trainer, self._task, self._meanwhile = context, trainer, task, meanwhile
        self._algorithm: Algorithm = context.build(context.config.learner)
        self._skips = self._algorithm.zero_advantage_skips
        self._lease = lease
        self._claimed: Claim | None = None
        """Not part of the step yet: its rows wait for the devices."""
        self._non_finite = non_finite or NonFinitePolicy(context, task)
        self._deadline = 0.0
        """Of the step."""
        wanted, group_size = context.config.rollout.prompts_per_step, context.plan.group_size
        ranks = context.plan.groups[task].size
        self._wanted = wanted
        self._least = max(ceil(wanted / MAX_CHUNKS), ceil(ranks / group_size)) if context.plan.streams else wanted

    async def step(self, version: Version, times: StepTimes) -> TrainingStep | None:
        """Train a step under row leases that hold until its updates are done; None where the run was told to stop before.

        A lease that is lost before the first update costs the work on the step, which is then begun anew.
        """
        lost, self._deadline = 0, self._context.clock.now() + self._context.config.rollout.step_timeout_s
        while True:
            step = TrainingStep(
                version, self._wanted, self._context.config.batch.updates_per_step, self._context.plan.streams
            )
            try:
                async with self._renewing(step):
                    whole = await self._train(step, times)
            except StaleFence:
                lost += 1
                if step.results or lost > MAX_LOST:
                    raise
                whole = False
            if whole:
                return step
            await self._give_back(step)
            await self._lease.release()
            if self._context.stopping:
                return None

    async def _train(self, step: TrainingStep, times: StepTimes) -> bool:
        """Train all groups of the step as they come; False where the run was told to stop before they were there."""
        while step.left:
            claim = await self._claim(step)
            times.mark("wait_rows")
            if claim is None and (self._context.stopping or not step.claims):
                return False
            self._claimed = claim  # its row leases are renewed while the devices are waited for
            try:
                await self._lease.train()
            finally:
                self._claimed = None
            if self._lease.shared:
                times.mark("wait_turn")
            await self._work(step, claim)
            times.mark("train")
        return True

    async def _claim(self, step: TrainingStep) -> Claim | None:
        """Claim the next groups; past the deadline those that are ready, and none where some came before.

        Where not one is ready, the groups that keep the step waiting are let go; those begun instead have as long.
        """
        context, reason, empty = self._context, f"{step.left} groups for step {step.version.step}", 0
        while True:
            with context.waiting(reason, context.plan.owed_rows, self._deadline - context.clock.now()) as wait:
                claim = await self._claim_in_time(step)
                if claim is not None or step.claims or context.stopping:
                    return claim
                empty += 1
                if empty == MAX_EMPTY or not await context.bus.let_go(step.version.step):
                    context.check(wait, LATE)
            self._deadline = context.clock.now() + context.config.rollout.step_timeout_s

    async def _claim_in_time(self, step: TrainingStep) -> Claim | None:
        """Claim groups as soon as there are enough of them; whatever is ready once the deadline has passed."""
        context = self._context
        while not context.stopping:
            if not step.results and self._meanwhile is not None:
                await self._meanwhile()
            late = context.clock.now() > self._deadline
            request = ClaimRequest(
                self._task, context.plan.trained_columns, step.left, min_groups=1 if late else self._least, trains=True,
                step=step.version.step, overdue=late,
            )  # fmt: skip
            claim = await context.bus.claim(request, POLL_S if not late else 0.0 if step.claims else LAST_CALL_S)
            if claim is not None or late:
                return claim
        return None

    async def _work(self, step: TrainingStep, claim: Claim | None) -> None:
        """Train what these rows make possible; without a claim the step is closed short."""
        self._context.doing(f"training step {step.version.step}", step=step.version.step)
        if not step.claims:
            await self._trainer.call("begin_step", step.version)
        for part in step.close() if claim is None else step.add(await self._read(claim, step.version)):
            await self._update(step, part)

    async def _read(self, claim: Claim, version: Version) -> ClaimedRows:
        """Read rows, with the starting policy's log-probs where several updates a step need them before the first one.

        Log-probs that another role computed under other weights are computed anew.
        """
        rows = ClaimedRows(claim, await self._context.bus.read(claim, self._context.plan.trained_columns), self._skips)
        if self._context.plan.needs_old_log_probs and (outdated := rows.outdated("old_log_probs", version)):
            self._context.doing(f"log-probs at the start of step {version.step}", rows=len(outdated))
            again = self._context.config.model.routing_replay == "recompute"
            asks = ("log_probs", "routed_experts") if again else ("log_probs",)
            columns = await self._trainer.forward(rows.take(outdated), asks)
            rows.fill("old_log_probs", outdated, columns["log_probs"])
            if again:  # the updates visit the experts that the policy of the step's start visited
                rows.fill("routed_experts", outdated, columns["routed_experts"])
        if self._algorithm.prepared():
            learn = await asyncio.to_thread(importlib.import_module, "relax_core.learn.packed")  # it loads torch
            rows.rows = rows.rows.with_columns(learn.prepared_columns(self._algorithm, rows.rows))
        return rows

    async def _update(self, step: TrainingStep, part: StepPart) -> None:
        """Train this part of an update; the leases of all rows are looked at right before weights change.

        While only those who follow learn, the policy stays as it is and its rows count as trained.
        """
        if step.version.step < self._context.plan.warm_up_steps:
            if part.ends:
                await self._verify(step)
                step.results.append(UpdateResult(UpdateOutcome.APPLIED))
            return
        if part.opens:
            await self._trainer.begin_update(part.denominators)
        if len(part.rows):
            await self._trainer.accumulate(part.rows, part.skipped, part.ends)
        if part.ends:
            await self._verify(step)
            result = await self._trainer.finish_update(part.denominators, lambda: self._verify(step))
            step.results.append(await self._non_finite.check(result, step.version))

    async def _verify(self, step: TrainingStep) -> None:
        for claim in step.claims:
            await self._context.bus.verify(claim)

    @contextlib.asynccontextmanager
    async def _renewing(self, step: TrainingStep) -> AsyncIterator[None]:
        """Renew the row leases of a step, however long its rows are waited for and trained."""
        renewal = asyncio.create_task(self._renew(step))
        try:
            yield
        finally:
            renewal.cancel()
            (ended,) = await asyncio.gather(renewal, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended

    async def _renew(self, step: TrainingStep) -> None:
        with contextlib.suppress(StaleFence):  # the look before the update says so
            while True:
                await self._context.clock.sleep(RENEW_S)
                await self._verify(step)
                if self._claimed is not None:
                    await self._context.bus.verify(self._claimed)

    async def _give_back(self, step: TrainingStep) -> None:
        """Release the rows of a step of which nothing was trained."""
        if step.claims:
            await self._trainer.call("abort_update")
        for claim in step.claims:
            await self._context.bus.release(claim)
