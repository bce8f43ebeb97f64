# SPDX-License-Identifier: Apache-2.0
"""Training of one step: claim, read, train, verify the row leases, update. Commit and publish are left to the caller.

`StepTrainer` serves the actor, and roles of plugins that train a model of their own.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from functools import partial
from math import ceil

from relax_core.api.algorithm import Algorithm
from relax_core.api.batch import RowBatch
from relax_core.api.bus import Claim, ClaimRequest
from relax_core.api.errors import RelaxError, StaleFence
from relax_core.api.events import Logged, WorkRetried
from relax_core.api.trainer import UpdateOutcome, UpdateResult
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.observe.process_log import bound
from relax_core.roles.rank_group import RankGroup, TrainerDeviceLease
from relax_core.roles.row_leases import renewed
from relax_core.roles.step import ClaimedRows, StepPart, StepTimes, TrainingStep
from relax_core.rpc.waiting import RestartBudget

POLL_S = 1.0
MAX_CHUNKS = 8
"""Most chunks of a streamed step. Each chunk costs a call of every rank and a partly filled micro-batch."""
MAX_LOST = 3
"""Times that a step is restarted after a lost row lease."""
LAST_CALL_S = 3.0
"""Seconds that the first claim past the deadline waits. That claim makes the bus give all ready groups to the roles
that fill columns for the actor, and these roles need this time.
"""
MAX_EMPTY = 5
"""Consecutive deadlines without a ready group before the step fails. Each earlier deadline replaces the late groups."""
LATE = "raise rollout.step_timeout_s: the groups that replaced late groups were too late, too"


class StepTrainer:
    """The trainer of a role's steps, one step at a time.

    A step: `waiting for rows -> training its parts -> rows verified -> updated`, once or several times. If a row lease
    is lost before the first update, the step is restarted; if later, the caller must return to the last checkpoint.

    Invariants:
    - Rows are trained as they are claimed. `Plan.streams` decides only whether a claim has the whole step or the groups
      that are ready first.
    - All row leases of the step are renewed during the step, and verified right before weights change.
    - Devices are leased once the step's first rows are claimed, never before.
    """

    def __init__(
        self, context: RunContext, trainer: RankGroup, task: str, lease: TrainerDeviceLease,
        non_finite: NonFinitePolicy | None = None, meanwhile: Callable[[], Awaitable[None]] | None = None,
        begun: Callable[[RowBatch], Awaitable[None]] | None = None,
    ) -> None:  # fmt: skip
        """`meanwhile` is called repeatedly while the step waits for rows before its first update.

        `begun` is called with the first rows of the run's first step, before any update.
        """
        self._context, self._trainer, self._task, self._meanwhile = context, trainer, task, meanwhile
        self._begun = begun
        self._algorithm = context.build(context.config.learner, Algorithm)
        self._lease = lease
        self._claimed: Claim | None = None
        """A claim that is not part of the step yet: its rows wait for the devices or for recomputed log-probs."""
        self._non_finite = non_finite or NonFinitePolicy(context, task)
        self._deadline = 0.0
        """Time at which the step stops waiting for more groups."""
        self._groups_per_step = self._min_groups = context.config.rollout.groups_per_step
        if context.plan.streams:
            ranks = context.plan.groups[task].size
            self._min_groups = max(ceil(self._groups_per_step / MAX_CHUNKS), ceil(ranks / context.plan.group_size))

    async def step(self, version: Version, times: StepTimes) -> TrainingStep | None:
        """Train one step under row leases that are valid until its last update; return None if the run is stopped.

        If a row lease is lost before the first update, restart the step. If it is lost later, raise RollbackRequired,
        since the rows that have already changed the weights may be trained again.
        """
        context, lost = self._context, 0
        self._deadline = context.clock.now() + context.config.rollout.step_timeout_s
        while True:
            step = TrainingStep(
                version, self._groups_per_step, context.config.batch.updates_per_step, context.plan.streams,
                context.config.batch.passes,
            )  # fmt: skip
            try:
                async with renewed(context, self._task, partial(self._held, step)):
                    with bound(step=version.step + 1):
                        if await self._train(step, times):
                            return step
            except StaleFence as error:
                lost += 1
                if step.results:
                    what = f"{self._task}: a row lease of step {version.step + 1} was lost after one of its updates"
                    raise RollbackRequired(f"{what}: {error}") from error
                if lost > MAX_LOST:
                    raise
                await context.run_status.emit(WorkRetried(self._task, "steps", 1, str(error)))
            if step.claims:  # none of their rows has changed the weights
                await self._trainer.call("abort_update")
            for claim in step.claims:
                await context.bus.release(claim)
            await self._lease.release()
            if context.stopping:
                return None

    async def _train(self, step: TrainingStep, times: StepTimes) -> bool:
        """Train all groups of the step as they become ready; return False if the run is stopped first."""
        context, number = self._context, step.version.step + 1
        profiled = context.profiles_left > 0 or number in context.config.profile.steps
        while step.left:
            claim = await self._claim(step)
            times.mark("wait_rows")
            if claim is None and (context.stopping or not step.claims):
                return False
            self._claimed = claim  # renew its row lease while its rows wait for the devices and are prepared
            try:
                await self._lease.train()
                if self._lease.shared:
                    times.mark("wait_turn")
                context.doing(f"training step {step.version.step}", step=step.version.step)
                if not step.claims:
                    await self._trainer.call("begin_step", step.version)
                    if profiled:
                        await self._trainer.call("start_profile", context.config.profile.ranks)
                rows = None if claim is None else await self._read(claim, step.version)
                if self._begun is not None and rows is not None and not (step.version.step or step.claims):
                    await self._begun(rows.rows)
                parts = step.close() if rows is None else step.add(rows)
            finally:
                self._claimed = None
            for part in parts:
                await self._train_part(step, part)
            times.mark("train")
        if profiled:
            await self._write_profile(number)
        return True

    async def _write_profile(self, number: int) -> None:
        """Write the profile of step `number`, and say where it is."""
        context, table = self._context, self._context.config.profile
        path = f"{context.run_dir}/profile/step-{number:06d}-{self._task}"
        limit = table.max_mb * 1_000_000
        largest = max(await self._trainer.call("stop_profile", path, limit))
        context.profiles_left = max(context.profiles_left - 1, 0)  # before the event, after which a user may ask again
        what = f"{self._task}: the profile of step {number} is in the run's folder profile/"
        facts = {"step": number, "trace_bytes": largest}
        if largest > limit:
            what = f"{what}, without a trace of {largest / 1e6:.0f} MB: raise profile.max_mb, or use a smaller step"
        await context.run_status.emit(Logged("warning" if largest > limit else "info", self._task, what, facts))

    async def _claim(self, step: TrainingStep) -> Claim | None:
        """Claim groups once enough are ready; past the deadline, claim all ready groups.

        If no group is ready then, return None: the step ends with its earlier groups. If it has no earlier groups, end
        the late groups on the bus instead, and wait until a new deadline for their replacements.
        """
        context, reason, empty = self._context, f"{step.left} groups for step {step.version.step}", 0
        while True:
            with context.waiting(reason, context.plan.row_producers, self._deadline - context.clock.now()) as wait:
                claim, late = None, False
                while claim is None and not late and not context.stopping:
                    if not step.results and self._meanwhile is not None:
                        await self._meanwhile()
                    late = context.clock.now() > self._deadline
                    request = ClaimRequest(
                        self._task, context.plan.trained_columns, step.left, min_groups=1 if late else self._min_groups,
                        trains=True, step=step.version.step, overdue=late,
                    )  # fmt: skip
                    wait_s = POLL_S if not late else 0.0 if step.claims else LAST_CALL_S
                    claim = await context.bus.claim(request, wait_s)
                if claim is not None or step.claims or context.stopping:
                    return claim
                empty += 1
                if empty == MAX_EMPTY or not await context.bus.end_awaited(step.version.step):
                    context.check(wait, LATE)
            self._deadline = context.clock.now() + context.config.rollout.step_timeout_s

    async def _read(self, claim: Claim, version: Version) -> ClaimedRows:
        """Read the rows of a claim. If the plan needs them, add log-probs of the policy at the step's start.

        Log-probs that another role computed under different weights are recomputed.
        """
        context, algorithm = self._context, self._algorithm
        columns = await context.bus.read(claim, context.plan.trained_columns)
        rows = ClaimedRows(claim, columns, algorithm.zero_advantage_skips)
        if context.plan.needs_old_log_probs and (outdated := rows.outdated("old_log_probs", version)):
            context.doing(f"log-probs at the start of step {version.step}", rows=len(outdated))
            again = context.config.model.routing_replay == "recompute"
            asks = ("log_probs", "routed_experts") if again else ("log_probs",)
            filled = await self._trainer.forward(rows.take(outdated), asks)
            rows.fill("old_log_probs", outdated, filled["log_probs"])
            if again:  # the updates route tokens to the same experts as this forward pass
                rows.fill("routed_experts", outdated, filled["routed_experts"])
        if algorithm.prepared():
            learn = await asyncio.to_thread(importlib.import_module, "relax_core.learn.packed")  # imports torch
            rows.rows = rows.rows.with_columns(learn.prepared_columns(algorithm, rows.rows))
        return rows

    async def _train_part(self, step: TrainingStep, part: StepPart) -> None:
        """Train a part of an update. At the update's end, verify all row leases and change the weights.

        In the warm-up steps, only roles that follow the actor learn: the policy is unchanged, and its rows count as
        trained.
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

    def _held(self, step: TrainingStep) -> list[Claim]:
        return [*step.claims, *([self._claimed] if self._claimed is not None else [])]

    async def _verify(self, step: TrainingStep) -> None:
        for claim in step.claims:
            await self._context.bus.verify(claim)


MAX_SKIPPED = 5
"""Updates in a row that may be skipped before the run stops, since more would only use up rows."""
ADVICE = "lower optimizer.lr or look at the rewards of the last steps in samples/"


class RollbackRequired(RelaxError):
    """A trainer with weights that can't be used any more; restart it from its last checkpoint."""


class GuardRollback(RollbackRequired):
    """A rollback that a guard requires because training diverged; it does not count towards the actor's MAX_RETURNS."""


class NonFinitePolicy:
    """The rule of one trained role for updates with a NaN or infinite loss or gradient (`optimizer.not_finite`).

    The trainer has not applied such an update. A rollback to the last checkpoint trains the same rows again; if the
    step fails a second time, its update is skipped.
    """

    def __init__(self, context: RunContext, role: str) -> None:
        self._context, self._role = context, role
        self._skipped = RestartBudget(MAX_SKIPPED)
        self._rolled_back: set[int] = set()

    async def check(self, result: UpdateResult, version: Version) -> UpdateResult:
        """Return the result of an applied or skipped update. Raises RollbackRequired, or RelaxError to stop the run."""
        if result.outcome is UpdateOutcome.APPLIED:
            self._skipped.refill()
            return result
        rule = self._context.config.optimizer.not_finite
        what = f"{self._role}: an update of step {version.step + 1} had a NaN or infinite loss or gradient"
        if rule == "stop":
            raise RelaxError(f"{what}, and optimizer.not_finite is stop; {ADVICE}")
        if rule == "roll-back" and version.step not in self._rolled_back:
            self._rolled_back.add(version.step)
            raise RollbackRequired(what)
        if not self._skipped.spend():
            raise RelaxError(f"{what}, as did the {MAX_SKIPPED} updates before it; {ADVICE}")
        facts = {"step": version.step + 1, "grad_norm": result.grad_norm, "in_a_row": self._skipped.spent}
        await self._context.run_status.emit(Logged("warning", self._role, f"{what}; the update is skipped", facts))
        return result
