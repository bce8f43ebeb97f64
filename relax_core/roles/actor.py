# SPDX-License-Identifier: Apache-2.0
"""The actor role: trains on a step's groups, commits, publishes, checkpoints. The run's pace-maker.

Order within a step, so that nothing is trained twice or lost: claim, read, train, verify the leases, update, commit.
All before the commit is in `fit`.
"""

from __future__ import annotations

from relax_core.api.errors import InfrastructureError, RelaxError
from relax_core.api.events import StepFinished
from relax_core.api.plan import Operation, Reads
from relax_core.api.role import Resume, Role
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.roles.checkpoint import Checkpoints
from relax_core.roles.device_lease import TrainerDeviceLease
from relax_core.roles.held_out_eval import HeldOutEval
from relax_core.roles.publisher import Publisher
from relax_core.roles.rank_group import RankGroup
from relax_core.roles.recovery import NonFinitePolicy, Recovery, RollbackRequired
from relax_core.roles.step import moved
from relax_core.roles.step_metrics import StepTimes, step_metrics
from relax_core.roles.step_trainer import StepTrainer


class Actor(Role):
    """Trains the policy and publishes it."""

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
        self._context, self._guard = context, NonFinitePolicy(context, self.name)
        self._trainer = await RankGroup.start(context, self.name)
        self._publisher = Publisher(context, self._trainer)
        self._devices = TrainerDeviceLease(context, self.name, self._publisher.live)
        self._equip()
        self._assessment = await HeldOutEval.open(context)
        try:
            await self._train()
        finally:
            await self._checkpoints.give_up()
            await self._trainer.stop()

    def _equip(self) -> None:
        """With ranks that were just started."""
        context = self._context
        context.doing("ready", ranks=self._trainer.pids())
        self._fit = StepTrainer(context, self._trainer, self.name, self._serve, self._devices, self._guard)
        self._checkpoints = Checkpoints(context, self._trainer, self._devices)

    async def _train(self) -> None:
        context = self._context
        version = await context.bus.version()
        self._recovery = Recovery(context, self.name, version)
        if context.resume is not None:
            await self._restore(context.resume, version)
        else:
            await self._assess(version.step)
        saved = version.step
        while version.step < context.config.steps and not context.stopping:
            await context.pause_point()
            try:
                trained = await self._step(version)
                if trained is None:
                    break
                version = trained
                self._recovery.reached(version.step)
                await self._assess(version.step)
                await self._checkpoints.check()
                if self._checkpoints.due(version.step):
                    await self._checkpoints.save(version)
                    saved = version.step
            except (RollbackRequired, InfrastructureError) as error:
                if not isinstance(error, RollbackRequired) and not self._trainer.lost:
                    raise
                version = await self._go_back(error)
                saved = version.step
        if saved != version.step:
            await self._checkpoints.save(version)
        await self._checkpoints.over()
        if version.step >= context.config.steps:
            context.doing("exporting")
            async with self._devices:
                await self._devices.train()
                await self._trainer.call("export", f"{context.run_dir}/export")

    async def _restore(self, checkpoint: Resume | None, version: Version) -> None:
        """The ranks take up a checkpoint, or are as they started, and the engines get what they are."""
        async with self._devices:
            await self._devices.train()
            if checkpoint is not None:
                await self._trainer.call("load", f"{checkpoint.directory}/trainer")
            if self._context.plan.publishes:
                await self._devices.publish()
                await self._publisher.publish(version)

    async def _go_back(self, error: RelaxError) -> Version:
        """Other ranks from the last checkpoint, while rollout goes on up to its bound. What came after it is undone."""
        await self._trainer.give_up()
        await self._checkpoints.give_up()
        checkpoint = await self._recovery.begin(error)
        await self._context.turns.leave(self.name)
        self._trainer = await RankGroup.start(self._context, self.name)
        self._publisher.follow(self._trainer)
        self._equip()
        version = await self._context.bus.rollback(0 if checkpoint is None else checkpoint.step)
        await self._restore(checkpoint, version)
        await self._recovery.end(version, error)
        return version

    async def _assess(self, step: int) -> None:
        """Held-out rows, where they are due."""
        if self._assessment.due(step):
            async with self._devices:
                await self._devices.train()
                await self._assessment.run(self._trainer, step)

    async def _step(self, version: Version) -> Version | None:
        """Train, commit and publish; None when the run was told to stop before the rows were there."""
        times = StepTimes(self._context.clock)
        async with self._devices:
            step = await self._fit.step(version, times)
            if step is None:
                return None
            after = await self._context.bus.trained(step.claims, version.step, step.without_gradient)
            if self._context.plan.publishes:
                await self._devices.publish()
                await self._publisher.publish(after, applied=any(moved(result) for result in step.results))
                times.mark("publish")
        account = await self._context.bus.account()
        statistics = await self._context.bus.statistics()
        metrics = step_metrics(step, times, account, statistics)
        if self._devices.shared:
            metrics["memory/freed_bytes"] = float(self._devices.freed_bytes)
            metrics["memory/trainer_freed_bytes"] = float(self._trainer.freed_bytes)
        await self._context.board.emit(StepFinished(after.step, metrics))
        return after

    async def _serve(self) -> None:
        """Whoever stands at the door gets the newest weights; on shared devices in a turn of its own."""
        if not self._devices.shared:
            await self._publisher.serve()
        elif self._publisher.live and await self._context.weights.wanted("actor"):
            async with self._devices:
                await self._devices.train()
                await self._devices.publish()
                await self._publisher.serve()
