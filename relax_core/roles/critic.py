# SPDX-License-Identifier: Apache-2.0
"""The critic role: values of the tokens of rows, learnt from the rows that the actor trained. The actor goes first.

Its step s trains all rows of the actor's step s, once that is committed, in one order and with the same mask, also those
without a policy gradient. It values rows after it has learnt from every committed step, so at staleness 0 the column is of
the step's start. What it knows is in checkpoints and in the rows that the bus keeps for it until it has acknowledged them
and a checkpoint holds it: it is restarted in place, loads the newest checkpoint and learns the steps since once more.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from relax_core.api.bus import Claim, ClaimRequest
from relax_core.api.errors import InfrastructureError, RelaxError, StaleFence
from relax_core.api.events import StepMeasured
from relax_core.api.plan import Operation, Reads
from relax_core.api.role import Role
from relax_core.api.trainer import UpdateOutcome
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.roles.checkpoint import CheckpointPart, complete, step_of
from relax_core.roles.device_lease import TrainerDeviceLease, forwarding
from relax_core.roles.forward import INPUTS
from relax_core.roles.rank_group import RankGroup
from relax_core.roles.step import ClaimedRows, TrainingStep
from relax_core.roles.step_metrics import critic_metrics
from relax_core.rpc.restart_budget import RestartBudget

POLL_S = 0.5
MAX_NOT_FINITE = 5
"""Steps in a row whose updates may be skipped for NaN or infinity before the run stops."""
FIT, VALUES = "critic.fit", "critic.values"


class Critic(Role):
    """Values tokens, and learns to."""

    name = "critic"
    stateless = True

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        rows = frozenset(INPUTS)
        return (
            Operation(VALUES, cls.name, rows, frozenset({"values"}), Reads.LATEST, model=cls.name),
            Operation(FIT, cls.name, rows, frozenset(), Reads.LATEST, updates=cls.name, scope="batch", trigger="step",
                      model=cls.name),
        )  # fmt: skip

    async def run(self, context: RunContext) -> None:
        self._context, self._skipped = context, RestartBudget(MAX_NOT_FINITE)
        self._columns = context.plan.fit_columns[self.name]
        self._trainer = await RankGroup.start(context, self.name)
        self._devices = TrainerDeviceLease(context, self.name, live=False)
        self._ranks = asyncio.Lock()
        """Held while ranks work: they do one thing at a time, and a turn on devices is one task's."""
        self._fitted = asyncio.Event()
        self._version, self._actor = Version(self.name, context.incarnation, 0), await context.bus.version()
        try:
            await self._restore()
            context.doing("ready", ranks=self._trainer.pids())
            await self._both()
        finally:
            await self._trainer.stop()

    async def _both(self) -> None:
        """Learn and value beside each other, until there is nothing left to learn."""
        tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._value())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- learning -----------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        context = self._context
        while True:
            actor = await context.bus.version()
            if actor.incarnation != self._actor.incarnation or actor.step < self._version.step:
                await self._go_back(actor)
            part = CheckpointPart(context.run_dir, self._version.step, self.name)
            if part.wanted:
                await self._save(part)
                continue
            with context.waiting(f"step {self._version.step} of the actor", "actor", POLL_S):
                claim = await context.bus.claim(self._request(), POLL_S)
            if claim is not None:
                await self._learn(claim)
            elif await self._over():
                return

    def _request(self) -> ClaimRequest:
        return ClaimRequest(FIT, self._columns, 0, step=self._version.step, follows=True)

    async def _learn(self, claim: Claim) -> None:
        """One step; a lease that is lost before the first update leaves everything as it was."""
        context, start = self._context, self._context.clock.now()
        try:
            rows = await context.bus.read(claim, self._columns)
            async with self._ranks, self._devices:
                await self._devices.train()
                await context.bus.verify(claim)
                context.doing(f"learning from step {self._version.step}", step=self._version.step)
                step = await self._train(ClaimedRows(claim, rows, zero_advantage_skips=False))
        except StaleFence:
            return
        await self._acknowledge(claim)
        self._version = self._version.next()
        self._fitted.set()
        metrics = critic_metrics(step, context.clock.now() - start)
        await context.board.emit(StepMeasured(self._version.step, metrics))

    async def _train(self, rows: ClaimedRows) -> TrainingStep:
        step = TrainingStep(self._version, len(rows.claim.groups), self._context.config.batch.updates_per_step)
        await self._trainer.call("begin_step", self._version)
        for part in step.add(rows):
            await self._trainer.begin_update(part.denominators)
            if len(part.rows):
                await self._trainer.accumulate(part.rows, part.skipped, True)
            step.results.append(await self._trainer.finish_update(part.denominators))
        self._guard(step)
        return step

    async def _acknowledge(self, claim: Claim) -> None:
        """Where training took longer than the lease, by another one on the same rows."""
        try:
            await self._context.bus.acknowledge(claim)
        except StaleFence:
            again = await self._context.bus.claim(self._request(), 0.0)
            if again is not None:
                await self._context.bus.acknowledge(again)

    def _guard(self, step: TrainingStep) -> None:
        if any(result.outcome is UpdateOutcome.APPLIED for result in step.results):
            self._skipped.refill()
        elif not self._skipped.spend():
            raise RelaxError(
                f"critic: {self._skipped.spent} steps in a row had a NaN or infinite gradient; lower critic.lr"
            )

    async def _over(self) -> bool:
        """Whether the actor has ended and needs no part of a checkpoint any more."""
        context = self._context
        if not context.stopping and self._version.step < context.config.steps:
            return False
        states = {beat.role: beat.state for beat in await context.board.beats()}
        return states.get("actor") in ("stopped", "failed")

    # -- valuing ------------------------------------------------------------------------------------------------

    async def _value(self) -> None:
        context, last = self._context, self._context.clock.now()
        most, patience_s = context.config.rollout.prompts_per_step, context.config.rollout.step_timeout_s / 2
        whole = context.config.deterministic or "rollout" in context.plan.neighbours(self.name)
        while True:
            await context.pause_point()
            late = context.clock.now() - last > patience_s  # the actor closes its step short at its deadline
            request = ClaimRequest(VALUES, INPUTS, most, most if whole and not late else 1)
            with context.waiting("rows that lack values", context.plan.producer, POLL_S):
                claim = await context.bus.claim(request, POLL_S)
            if claim is not None:
                await self._fill(claim)
                last = context.clock.now()

    async def _fill(self, claim: Claim) -> None:
        bus = self._context.bus
        while (await bus.version()).step > self._version.step:
            self._fitted.clear()
            with self._context.waiting("what it learns from committed steps", self.name, POLL_S):
                await self._fitted.wait()
        try:
            rows = await bus.read(claim, INPUTS)
            async with self._ranks, forwarding(self._context, self.name):
                self._context.doing("valuing rows", groups=len(claim.groups))
                columns, version = await self._trainer.forward(rows, ("values",)), self._version
            await bus.write(claim, columns, version)
            await bus.acknowledge(claim)
        except StaleFence:
            return  # another incarnation has these rows now and will fill them

    # -- checkpoints --------------------------------------------------------------------------------------------

    async def _save(self, part: CheckpointPart) -> None:
        async with self._ranks, self._devices:
            await self._devices.train()
            await self._trainer.call("save", str(part.directory))
        part.finish()

    async def _go_back(self, actor: Version) -> None:
        """The actor was restored to an earlier version: what came after it is not learnt."""
        incarnation = (await self._context.bus.register(self.name)).incarnation
        learnt, self._version = self._version.step, Version(self.name, incarnation, 0)
        self._actor = actor
        await self._restore()
        if learnt and not self._version.step:
            raise InfrastructureError("critic: the actor went back to its beginning; it starts anew as well")

    async def _restore(self) -> None:
        """Load the newest checkpoint that is not ahead of the actor; without one it is as it was created."""
        context = self._context
        root = Path(context.run_dir) / "checkpoints"
        found = [path for path in complete(root) if step_of(path) <= self._actor.step and (path / self.name).is_dir()]
        directory, step = (found[-1], step_of(found[-1])) if found else (None, 0)
        if directory is None and context.resume is not None:
            directory, step = Path(context.resume.directory), context.resume.step
        if directory is None:
            return
        async with self._ranks, self._devices:
            await self._devices.train()
            await self._trainer.call("load", str(directory / self.name))
        self._version = self._version._replace(step=step)
