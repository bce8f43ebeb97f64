# SPDX-License-Identifier: Apache-2.0
"""The actor role: trains on a step's groups, commits, publishes, checkpoints. It sets the pace of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from relax_core.api.errors import (
    DeadlineExceeded,
    DiskFull,
    Diverged,
    InfrastructureError,
    RelaxError,
    StaleFence,
    WorkerDied,
)
from relax_core.api.events import GuardFired, Logged, RoleFailed, RoleRecovered, RolledBack, StepFinished
from relax_core.api.plan import Operation, Reads
from relax_core.api.role import Resume, Role
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.roles.checkpoint import Checkpoints, DamagedCheckpoint, complete, read_whole, step_of
from relax_core.roles.divergence import DivergenceGuards
from relax_core.roles.publisher import Publisher
from relax_core.roles.rank_group import RankGroup, TrainerDeviceLease
from relax_core.roles.row_leases import renewed
from relax_core.roles.source import HeldOutEval
from relax_core.roles.step import StepTimes, TrainingStep, learning_metrics, step_metrics
from relax_core.roles.step_trainer import GuardRollback, NonFinitePolicy, RollbackRequired, StepTrainer
from relax_core.rpc.waiting import RestartBudget

MAX_RETURNS = 3
"""Returns to a checkpoint without a step that had not been reached before."""


class Actor(Role):
    """Trains the policy and publishes it.

    A step: `claimed -> read -> trained -> row leases verified -> updated -> judged by the guards -> committed -> published ->
    checkpointed`, of which all up to the update is `StepTrainer`'s.

    Invariants:
    - No row is trained twice or lost: weights change only while all row leases of the step hold, and the commit follows.
    - A step that a guard undoes, or holds until a person goes on, is neither committed nor published before. No checkpoint
      is made of a step that is evidence for such a guard, so that there is one from before it to go back to.
    - Published weights are those of the newest commit, and live ones are served only before the next update.
    - When ranks or the role's process are lost, a loss says so, or a lease is lost that weights have changed under, all goes
      back to the last checkpoint; rollout goes on up to its bound. Failures on the way back, in the last save and in the
      export count too.
    """

    name = "actor"
    stateless = False

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        consumes = frozenset({"tokens", "loss_mask"})
        return (
            Operation("actor.fit", cls.name, consumes, frozenset(), Reads.STEP_START, updates="actor", scope="batch",
                      trigger="step"),
        )  # fmt: skip

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
        """Work with the ranks that were just started."""
        context = self._context
        self._step_trainer = StepTrainer(
            context, self._trainer, self.name, self._lease, self._non_finite, meanwhile=self._serve
        )
        self._checkpoints = Checkpoints(context, self._trainer, self._lease)

    async def _train(self) -> None:
        """Train to the end of the run. Each failure of the ranks, wherever it comes, goes back to the last checkpoint."""
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
                if context.stopping:  # the last checkpoint is what other ranks would have, too
                    return
                begin = partial(self._go_back, error)

    async def _may_go_back(self) -> bool:
        """Tell whether there is something to go back to, and whoever prepares rows is there for the steps after it.

        They end when the last step is committed: what was trained since the last checkpoint is trained again by a resume.
        """
        context = self._context
        found = complete(Path(context.run_dir) / "checkpoints")
        if (await context.bus.version()).step >= context.config.steps:
            return bool(found) and step_of(found[-1]) >= context.config.steps
        return bool(found) or context.resume is None

    async def _begin(self) -> Version:
        version = await self._context.bus.version()
        if self._context.resume is not None:
            # Published also where no step is left to train: rollout ends with the last version.
            await self._restore(self._context.resume, version, publish=True)
            return version
        await self._evaluate(version.step)
        return version

    async def _train_from(self, version: Version) -> None:
        """Train the steps that are left, save the last of them, and export the model where it was the run's last."""
        context, saved, due = self._context, version.step, False
        while version.step < context.config.steps and not context.stopping:
            await context.pause_point()
            trained = await self._step(version)
            if trained is None:
                break
            version = trained
            if version.step > self._furthest:  # it got further than ever before, and so has all of its returns again
                self._furthest = version.step
                self._returns.refill()
            await self._evaluate(version.step)
            await self._checkpoints.check()
            due |= context.take_checkpoint_request() or self._checkpoints.due(version.step)
            if due and not self._guards.suspects:
                await self._checkpoints.save(version)
                saved, due = version.step, False
        if saved != version.step:
            await self._checkpoints.save(version, keep_former=self._guards.suspects)
        await self._checkpoints.over()
        if version.step >= context.config.steps:
            context.doing("exporting")
            with context.changing_files():
                pass  # the export takes long: only whether the run is still this start's is asked here
            async with self._lease:
                await self._lease.train()
                await self._trainer.call("export", f"{context.run_dir}/export")

    async def _restore(self, checkpoint: Resume | None, version: Version, publish: bool) -> None:
        """Load a checkpoint, or leave the ranks as they started, and publish their weights to the engines where asked."""
        async with self._lease:
            await self._lease.train()
            if checkpoint is not None:
                await self._trainer.call("load", f"{checkpoint.directory}/trainer")
            if self._context.plan.publishes and publish:
                await self._lease.publish()
                await self._publisher.publish(version)

    async def _restart(self) -> Version:
        """Go back to the newest checkpoint, since the role's last process died; the ranks were just started."""
        error = WorkerDied(f"the process of {self.name} died")
        if not await self._may_go_back():
            raise error
        await self._publisher.restart(self.name)
        return await self._return(error)

    async def _go_back(self, error: RelaxError) -> Version:
        """Start other ranks from what was saved last, while rollout goes on up to its bound."""
        context, began = self._context, self._context.clock.now()
        context.doing("starting its ranks again")
        await context.devices.leave(self.name)
        self._trainer = await RankGroup.start(context, self.name)
        self._publisher.follow(self._trainer)
        self._take_up()
        version = await self._return(error)
        detail = f"ranks started again at step {version.step}"
        await context.run_status.emit(RoleRecovered(self.name, context.clock.now() - began, detail))
        return version

    async def _return(self, error: RelaxError) -> Version:
        """Restore the ranks from the newest checkpoint, or the starting model; later steps are undone."""
        context, saved = self._context, None
        found = complete(Path(context.run_dir) / "checkpoints")
        if found:
            try:
                saved, _ = await asyncio.to_thread(read_whole, found[-1])
            except DamagedCheckpoint as damage:  # rows up to it are freed: only a resume issues them again
                again = f"continue from the one before with `relax resume {context.run_dir}`"
                raise DamagedCheckpoint(f"{damage}; {again}") from error
        version = await context.bus.rollback(0 if saved is None else saved.step)
        self._guards.rewind(version.step)
        await self._restore(saved, version, publish=version.step < context.config.steps)
        context.doing("ready", ranks=self._trainer.pids())
        await context.run_status.emit(RolledBack(version, str(error)))
        return version

    async def _evaluate(self, step: int) -> None:
        """Evaluate on held-out rows, where that is due."""
        if self._held_out.due(step):
            async with self._lease:
                await self._lease.train()
                await self._held_out.run(self._trainer, step)

    async def _step(self, version: Version) -> Version | None:
        """Train, commit and publish; None when the run was told to stop before the rows were there."""
        context, times = self._context, StepTimes(self._context.clock)
        async with self._lease:
            step = await self._step_trainer.step(version, times)
            if step is None:
                return None
            learnt = learning_metrics(step)
            await self._judge(step, learnt)
            try:
                after = await context.bus.trained(step.claims, version.step, step.without_gradient)
            except StaleFence as error:
                what = f"{self.name}: step {version.step + 1} was trained and not committed"
                raise RollbackRequired(f"{what}: {error}") from error
            if context.plan.publishes:
                await self._lease.publish()
                await self._publisher.publish(after, applied=step.moved)
                times.mark("publish")
        account, statistics = await context.bus.account(), await context.bus.statistics()
        metrics = step_metrics(learnt, times, account, statistics)
        if self._lease.shared:
            metrics["memory/freed_bytes"] = float(self._lease.freed_bytes)
            metrics["memory/trainer_freed_bytes"] = float(self._trainer.freed_bytes)
        await context.run_status.emit(StepFinished(after.step, metrics))
        return after

    async def _judge(self, step: TrainingStep, learnt: Mapping[str, float]) -> None:
        """Let the guards judge a step that is trained, and neither committed nor published; do what the most severe one says.

        Raises GuardRollback where the step is undone, and Diverged where the run ends. While the run is paused the leases of
        the step's rows are renewed, and its devices are free for others.
        """
        context, number = self._context, step.version.step + 1
        findings = self._guards.judge(number, learnt)
        for name in self._guards.take_blind():
            what = f"guard {name} sees nothing: no step so far had {getattr(context.config.guards, name).metric}"
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
        await self._checkpoints.over()  # one that is being written is from before the evidence
        if action == "stop":
            raise Diverged(f"{what}; step {number} is undone, and its evidence is in guards/ of the run")
        if action == "roll-back":
            raise GuardRollback(what)
        await self._lease.release()
        reason = f"a look at step {number}, since {what}"
        try:
            async with renewed(context, self.name, lambda: step.claims):
                goes_on = await context.pause(reason, context.config.guards.pause_timeout_s)
        except DeadlineExceeded as error:
            raise Diverged(
                f"{what}; nobody went on within guards.pause_timeout_s, and step {number} is undone"
            ) from error
        if not goes_on:
            raise GuardRollback(f"{what}; the run was stopped while it was paused for it")
        await self._lease.train()

    async def _serve(self) -> None:
        """Hand live weights to receivers that want them; on shared devices under a lease of its own."""
        if not self._lease.shared:
            await self._publisher.serve()
        elif self._publisher.live and await self._context.weights.wanted("actor"):
            async with self._lease:
                await self._lease.train()
                await self._lease.publish()
                await self._publisher.serve()
