# SPDX-License-Identifier: Apache-2.0
"""The actor role: claims a step's groups, trains on them, commits, publishes, checkpoints. The run's pace-maker.

Order within a step, so that nothing is trained twice or lost: claim, read, update, verify the leases, apply, commit.
"""

from __future__ import annotations

from relax_core.api.bus import Claim, ClaimRequest
from relax_core.api.errors import RelaxError
from relax_core.api.events import CheckpointSaved, StepFinished
from relax_core.api.role import Context, Operation, Reads, Role
from relax_core.api.trainer import UpdateOutcome, UpdateResult
from relax_core.api.version import Version
from relax_core.roles.checkpoint import Checkpoints
from relax_core.roles.publisher import Publisher
from relax_core.roles.step import StepRows, StepTimes, masked, moved, step_metrics
from relax_core.roles.trainer_group import TrainerGroup

POLL_S = 1.0
MAX_NOT_FINITE = 5
"""Updates in a row that may be skipped for NaN or infinity before the run stops."""


class Actor(Role):
    """Trains the policy and publishes it."""

    name = "actor"
    stateless = False

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        consumes = frozenset({"tokens", "loss_mask", "weight_versions", "advantages"})
        return (
            Operation("actor.fit", cls.name, consumes, frozenset(), Reads.STEP_START, updates="actor", scope="batch",
                      trigger="step"),
        )  # fmt: skip

    async def run(self, context: Context) -> None:
        self._context, self._skipped = context, 0
        self._trainer = await TrainerGroup.start(context, self.name)
        context.doing("ready", ranks=self._trainer.pids())
        self._publisher = Publisher(context, self._trainer)
        self._checkpoints = Checkpoints(context, self._trainer)
        try:
            await self._train()
        finally:
            await self._trainer.stop()

    async def _train(self) -> None:
        context = self._context
        version = await context.bus.version()
        if context.resume is not None:
            await self._trainer.call("load", f"{context.resume.directory}/trainer")
            await self._publisher.publish(version)
        saved = version.step
        while version.step < context.run.steps and not context.stopping:
            await context.pause_point()
            trained = await self._step(version)
            if trained is None:
                break
            version = trained
            if self._checkpoints.due(version.step):
                await self._save(version)
                saved = version.step
        if saved != version.step:
            await self._save(version)
        if version.step >= context.run.steps:
            context.doing("exporting")
            await self._trainer.call("export", f"{context.run_dir}/export")

    async def _save(self, version: Version) -> None:
        start = self._context.clock.now()
        path = await self._checkpoints.save(version)
        await self._context.board.emit(CheckpointSaved(version.step, path, self._context.clock.now() - start))

    # -- one step -----------------------------------------------------------------------------------------------

    async def _step(self, version: Version) -> Version | None:
        """Claim, train, commit and publish; None when the run was told to stop before the rows were there."""
        times = StepTimes(self._context.clock)
        claim = await self._claim(version)
        if claim is None:
            return None
        times.mark("wait_rows")
        rows = masked(await self._context.bus.read(claim, self._context.plan.trained_columns), claim.mask_before)
        algorithm = self._context.build(self._context.run.algorithm.chosen)
        step = StepRows(rows, claim, self._context.run.batch.updates_per_step, algorithm.zero_advantage_skips)
        results = await self._update(step, version)
        times.mark("train")
        after = await self._context.bus.trained([claim], version.step, step.without_gradient)
        await self._publisher.publish(after, applied=any(moved(result) for result in results))
        times.mark("publish")
        account = await self._context.bus.account()
        statistics = await self._context.bus.statistics()
        metrics = step_metrics(step, version, results, times, account, statistics)
        await self._context.board.emit(StepFinished(after.step, metrics))
        return after

    async def _claim(self, version: Version) -> Claim | None:
        """All groups of this step; past its deadline those that are ready, and an error where none is."""
        context, wanted = self._context, self._context.run.rollout.prompts_per_step
        reason = f"{wanted} groups for step {version.step}"
        with context.waiting(reason, "rollout, then advantages", context.run.rollout.step_timeout_s) as wait:
            while not context.stopping:
                late = context.clock.now() > wait.deadline
                request = ClaimRequest(
                    self.name, context.plan.trained_columns, wanted, min_groups=1 if late else wanted, trains=True,
                    step=version.step, overdue=late,
                )  # fmt: skip
                claim = await context.bus.claim(request, POLL_S)
                if claim is not None:
                    return claim
                if late:
                    context.check(wait)
        return None

    async def _update(self, step: StepRows, version: Version) -> list[UpdateResult]:
        self._context.doing(f"training step {version.step}", step=version.step)
        await self._trainer.call("begin_step", version)
        await self._old_log_probs(step, version)
        results = []
        for part in step.parts():
            await self._trainer.call("begin_update", part.denominators)
            if len(part.rows):
                await self._trainer.call("accumulate", self._trainer.chunk(part.rows, part.skipped), True)
            await self._context.bus.verify(step.claim)
            results.append(self._guard(await self._trainer.finish_update(part.denominators)))
        return results

    async def _old_log_probs(self, step: StepRows, version: Version) -> None:
        """With several updates a step, the starting policy's log-probs of all rows come before the first update.

        What another role computed under other weights is computed anew.
        """
        if not self._context.plan.needs_old_log_probs:
            return
        outdated = step.outdated("old_log_probs", version)
        if outdated:
            self._context.doing(f"log-probs at the start of step {version.step}", rows=len(outdated))
            columns = await self._trainer.forward(step.take(outdated), ("log_probs",))
            step.fill("old_log_probs", outdated, columns["log_probs"])

    def _guard(self, result: UpdateResult) -> UpdateResult:
        """A skipped update is counted; several in a row stop the run before more rows are spent."""
        self._skipped = 0 if result.outcome is UpdateOutcome.APPLIED else self._skipped + 1
        if self._skipped > MAX_NOT_FINITE:
            raise RelaxError(
                f"actor: {self._skipped} updates in a row had a NaN or infinite gradient; lower optimizer.lr or look at the "
                f"rewards of the last steps in samples/"
            )
        return result
