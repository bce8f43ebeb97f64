# SPDX-License-Identifier: Apache-2.0
"""The actor role: trains the policy step by step, commits each step, publishes its weights, and saves checkpoints.

The actor sets the pace of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from relax_core.api.batch import RowBatch
from relax_core.api.errors import (
    DeadlineExceeded,
    DiskFull,
    Diverged,
    InfrastructureError,
    RelaxError,
    StaleFence,
    WorkerDied,
)
from relax_core.api.events import (
    ExportSaved,
    FirstStepSeen,
    GuardFired,
    Logged,
    RoleFailed,
    RoleRecovered,
    RolledBack,
    StepFinished,
)
from relax_core.api.plan import Operation, Reads
from relax_core.api.role import Resume, Role
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.roles.checkpoint import Checkpoints, DamagedCheckpoint, complete, read_whole, step_of
from relax_core.roles.divergence import DivergenceGuards
from relax_core.roles.exports import Exports
from relax_core.roles.first_rows import compared_rows, log_prob_facts, row_facts
from relax_core.roles.publisher import Publisher
from relax_core.roles.rank_group import RankGroup, TrainerDeviceLease
from relax_core.roles.row_leases import renewed
from relax_core.roles.source import HeldOutEval
from relax_core.roles.step import StepTimes, TrainingStep, learning_metrics, step_metrics, work_metrics
from relax_core.roles.step_trainer import GuardRollback, NonFinitePolicy, RollbackRequired, StepTrainer
from relax_core.rpc.waiting import RestartBudget

MAX_RETURNS = 3
"""Rollbacks to a checkpoint that are allowed until the run fails. The count resets at each step of new progress."""


class Actor(Role):
    """The role that trains and publishes the policy.

    A step: `claimed -> read -> trained -> row leases verified -> updated -> judged by the guards -> committed ->
    published -> checkpointed`. `StepTrainer` does everything up to the update.

    Invariants:
    - No row is trained twice or lost: weights change only while all row leases of the step are valid, and a commit
      follows.
    - A step is committed and published only after the guards have judged it, and after any pause that a guard asks for.
    - While a guard suspects the newest step, only the final checkpoint is saved, and saving it deletes no earlier
      checkpoint. So a checkpoint from before the suspect steps remains. Nothing but the final model is exported.
    - Published weights belong to the newest commit. Live weights, which are copied from memory to memory, are sent only
      before the next update.
    - The actor returns to the last checkpoint when its ranks or its process die, when `optimizer.not_finite` or a guard
      requires a rollback, and when a row lease is lost after weights changed. Meanwhile the rollout continues up to the
      staleness bound.
    - Failures of the training, of that return, of the final save and of the export count towards `MAX_RETURNS`.
      Rollbacks by guards are counted separately.
    """

    name = "actor"
    stateless = False

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        consumes = frozenset({"tokens", "loss_mask"})
        return (Operation("actor.fit", cls.name, consumes, frozenset(), Reads.STEP_START, updates="actor"),)

    async def run(self, context: RunContext) -> None:
        self._context, self._non_finite = context, NonFinitePolicy(context, self.name)
        self._guards = DivergenceGuards(context.config.guards)
        self._trainer = await RankGroup.start(context, self.name)
        self._publisher = Publisher(context, self._trainer)
        self._lease = TrainerDeviceLease(context, self.name, self._publisher.live)
        self._take_up()
        if not context.restarted:
            context.doing("ready", ranks=self._trainer.pids())
        self._held_out = await HeldOutEval.open(context)
        try:
            await self._train()
        finally:
            await self._checkpoints.give_up()
            await self._trainer.stop()

    def _take_up(self) -> None:
        """Make the step trainer and the checkpoint writer for the ranks that were just started."""
        context = self._context
        self._step_trainer = StepTrainer(
            context, self._trainer, self.name, self._lease, self._non_finite, meanwhile=self._serve, begun=self._compare
        )
        self._checkpoints = Checkpoints(context, self._trainer, self._lease)
        self._exports = Exports(context, self._trainer)

    async def _train(self) -> None:
        """Train to the end of the run; return to the last checkpoint after each failure of the ranks."""
        context = self._context
        self._furthest, self._returns = (await context.bus.version()).step, RestartBudget(MAX_RETURNS)
        begin = self._restart if context.restarted else self._begin
        while True:
            try:
                await self._train_from(await begin())
                return
            except (RollbackRequired, InfrastructureError) as error:
                if isinstance(error, DamagedCheckpoint | DiskFull) or not (
                    isinstance(error, RollbackRequired) or self._trainer.lost
                ):
                    raise
                await self._trainer.give_up()
                await self._checkpoints.give_up()
                guarded = isinstance(error, GuardRollback)
                if not await self._may_go_back() or not (guarded or self._returns.spend()):
                    raise
                if not guarded:
                    code = error.exit_code if isinstance(error, InfrastructureError) else 1
                    await context.run_status.emit(RoleFailed(self.name, str(error), code, fatal=False))
                if context.stopping:  # new ranks would only load the last checkpoint
                    return
                begin = partial(self._go_back, error)

    async def _may_go_back(self) -> bool:
        """Return True if there are weights to return to, and roles still prepare rows for the later steps.

        The roles that prepare rows end when the last step is committed. From then on only a checkpoint of the last step
        can be used; without it, the user must resume the run, which trains the missing steps again.
        """
        context = self._context
        found = complete(Path(context.run_dir) / "checkpoints")
        if (await context.bus.version()).step >= context.config.steps:
            return bool(found) and step_of(found[-1]) >= context.config.steps
        return bool(found) or context.resume is None

    async def _begin(self) -> Version:
        version = await self._context.bus.version()
        self._exports.undo(version.step)
        if self._context.resume is not None:
            # Publish even if no step is left to train: the rollout ends once it has the last version.
            await self._restore(self._context.resume, version, publish=True)
            return version
        await self._evaluate(version.step)
        return version

    async def _train_from(self, version: Version) -> None:
        """Train the remaining steps and save a checkpoint at their end; export the model after the run's last step."""
        context, saved, due, export_due = self._context, version.step, False, False
        while version.step < context.config.steps and not context.stopping:
            await context.pause_point()
            trained = await self._step(version)
            if trained is None:
                break
            version = trained
            if version.step > self._furthest:  # new progress restores the budget of rollbacks
                self._furthest = version.step
                self._returns.refill()
            await self._evaluate(version.step)
            await self._checkpoints.check()
            export_due |= self._exports.due(version.step)
            if export_due and not self._guards.suspects:  # before the checkpoint, so that no resume passes over it
                async with self._lease:
                    await self._lease.train()
                    await self._exports.write(version.step)
                export_due = False
            due |= context.take_checkpoint_request() or self._checkpoints.due(version.step)
            if due and not self._guards.suspects:
                await self._checkpoints.save(version)
                saved, due = version.step, False
        if saved != version.step:
            await self._checkpoints.save(version, keep_former=self._guards.suspects)
        await self._checkpoints.over()
        if version.step >= context.config.steps:
            context.doing("exporting")
            start, folder = context.clock.now(), f"{context.run_dir}/export"
            with context.changing_files():
                pass  # raise if the run was started again; the export itself is too long for this block
            async with self._lease:
                await self._lease.train()
                await self._trainer.call("export", folder)
            seconds = round(context.clock.now() - start, 3)
            await context.run_status.emit(ExportSaved(version.step, folder, final=True, seconds=seconds))

    async def _restore(self, checkpoint: Resume | None, version: Version, publish: bool) -> None:
        """Load a checkpoint into the ranks, or keep their starting weights for None. `publish`: publish the weights."""
        async with self._lease:
            await self._lease.train()
            if checkpoint is not None:
                await self._trainer.call("load", f"{checkpoint.directory}/trainer")
            if self._context.plan.publishes and publish:
                await self._lease.publish()
                await self._publisher.publish(version)

    async def _restart(self) -> Version:
        """Return to the newest checkpoint after the role's process died. This process and its ranks are new."""
        error = WorkerDied(f"the process of {self.name} died")
        if not await self._may_go_back():
            raise error
        await self._publisher.restart(self.name)
        return await self._return(error)

    async def _go_back(self, error: RelaxError) -> Version:
        """Start new ranks from the newest checkpoint. Meanwhile the rollout continues up to the staleness bound."""
        context, began = self._context, self._context.clock.now()
        context.doing("restarting its ranks")
        await context.devices.leave(self.name)
        self._trainer = await RankGroup.start(context, self.name)
        self._publisher.follow(self._trainer)
        self._take_up()
        version = await self._return(error)
        detail = f"ranks restarted at step {version.step}"
        await context.run_status.emit(RoleRecovered(self.name, context.clock.now() - began, detail))
        return version

    async def _return(self, error: RelaxError) -> Version:
        """Restore the ranks from the newest checkpoint, if there is one, and roll the bus back to its step."""
        context, saved = self._context, None
        found = complete(Path(context.run_dir) / "checkpoints")
        if found:
            try:
                saved, _ = await asyncio.to_thread(read_whole, found[-1])
            except DamagedCheckpoint as damage:  # rows of earlier steps are freed; only a resume issues them again
                again = f"resume from the checkpoint before it with `relax resume {context.run_dir}`"
                raise DamagedCheckpoint(f"{damage}; {again}") from error
        version = await context.bus.rollback(0 if saved is None else saved.step)
        self._guards.rewind(version.step)
        self._exports.undo(version.step)
        await self._restore(saved, version, publish=version.step < context.config.steps)
        context.doing("ready", ranks=self._trainer.pids())
        await context.run_status.emit(RolledBack(version.step, version, str(error)))
        return version

    async def _evaluate(self, step: int) -> None:
        """Evaluate on held-out rows if an evaluation is due at this step or was requested."""
        requested = self._context.take_evaluation_request()
        if self._held_out.due(step, requested):
            async with self._lease:
                await self._lease.train()
                await self._held_out.run(self._trainer, step, requested)

    async def _step(self, version: Version) -> Version | None:
        """Train, commit and publish one step; return None if the run is stopped before its rows are ready."""
        context, times = self._context, StepTimes(self._context.clock)
        async with self._lease:
            step = await self._step_trainer.step(version, times)
            if step is None:
                return None
            learnt = learning_metrics(step)
            worked = work_metrics(await self._trainer.work(), times.seconds()["time/train_s"], self._trainer.size)
            if not version.step and context.config.guards.first_step != "off":
                updates = context.plan.warm_up_steps == 0
                await context.run_status.emit(
                    FirstStepSeen(self.name, {"rows": row_facts(step.rows), "updates": updates})
                )
            await self._judge(step, learnt)
            try:
                after = await context.bus.trained(step.claims, version.step, step.without_gradient)
            except StaleFence as error:
                what = f"{self.name}: step {version.step + 1} was trained but not committed"
                raise RollbackRequired(f"{what}: {error}") from error
            if context.plan.publishes:
                await self._lease.publish()
                await self._publisher.publish(after, applied=step.moved)
                times.mark("publish")
        account, statistics = await context.bus.account(), await context.bus.statistics()
        metrics = step_metrics(learnt, times, account, statistics) | worked
        if self._lease.shared:
            metrics["memory/freed_bytes"] = float(self._lease.freed_bytes)
            metrics["memory/trainer_freed_bytes"] = float(self._trainer.freed_bytes)
        await context.run_status.emit(StepFinished(after.step, metrics))
        return after

    async def _compare(self, rows: RowBatch) -> None:
        """Compare log-probs of a few rows of the first step before its update, for the checks of that step."""
        wanted = self._context.config.guards.first_step != "off" and "rollout_log_probs" in rows.columns
        if not wanted or not (chosen := compared_rows(rows)):
            return
        few = rows.take(chosen)
        log_probs = few.columns.get("old_log_probs")
        if log_probs is None:
            log_probs = (await self._trainer.forward(few, ("log_probs",)))["log_probs"]
        await self._context.run_status.emit(FirstStepSeen(self.name, {"log_probs": log_prob_facts(few, log_probs)}))

    async def _judge(self, step: TrainingStep, learnt: Mapping[str, float]) -> None:
        """Let the guards judge a trained step before its commit, and take the action of the most severe finding.

        Raises GuardRollback to undo the step, and Diverged to end the run. During a pause the device lease is released,
        and the step's row leases are renewed.
        """
        context, number = self._context, step.version.step + 1
        findings = self._guards.judge(number, learnt)
        for name in self._guards.take_blind():
            what = f"guard {name} can't judge: no step so far reported {getattr(context.config.guards, name).metric}"
            await context.run_status.emit(Logged("warning", self.name, what))
        groups = tuple(sorted({group for claim in step.claims for group in claim.groups}))
        window = tuple({"step": at, **metrics} for at, metrics in self._guards.window) if findings else ()
        for found in findings:
            evidence = {
                "metric": found.metric, "value": found.value, "bound": found.bound, "since": found.since,
                "window": window, "groups": groups,
            }  # fmt: skip
            await context.run_status.emit(GuardFired(number, found.guard, found.action, found.reason, evidence))
        if not findings or findings[0].action == "warn":
            return
        action, what = findings[0].action, f"guard {findings[0].guard}: {findings[0].reason}"
        await self._checkpoints.over()  # a checkpoint in progress is from before the evidence
        if action == "stop":
            raise Diverged(f"{what}; step {number} is undone, and the evidence is in the run's guards/ folder")
        if action == "roll-back":
            raise GuardRollback(what)
        await self._lease.release()
        reason = f"a review of step {number}, since {what}"
        try:
            async with renewed(context, self.name, lambda: step.claims):
                goes_on = await context.pause(reason, context.config.guards.pause_timeout_s)
        except DeadlineExceeded as error:
            raise Diverged(
                f"{what}; the run was not continued within guards.pause_timeout_s, and step {number} is undone"
            ) from error
        if not goes_on:
            raise GuardRollback(f"{what}; the run was stopped during the pause for this guard")
        await self._lease.train()

    async def _serve(self) -> None:
        """Send live weights to receivers that want them; if the devices are shared, lease them during this call."""
        if not self._lease.shared:
            await self._publisher.serve()
        elif self._publisher.live and await self._context.weights.wanted("actor"):
            async with self._lease:
                await self._lease.train()
                await self._lease.publish()
                await self._publisher.serve()
