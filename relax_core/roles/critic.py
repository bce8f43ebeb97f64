# SPDX-License-Identifier: Apache-2.0
"""The critic role: predicts the value of each token, and learns from the rows of each step that the actor committed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from relax_core.api.batch import RowBatch
from relax_core.api.bus import Claim, ClaimRequest
from relax_core.api.errors import InfrastructureError, RelaxError, StaleFence
from relax_core.api.events import StepMeasured
from relax_core.api.plan import Operation, Reads
from relax_core.api.role import Role
from relax_core.api.trainer import UpdateOutcome
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.observe.files import disk_errors
from relax_core.roles.checkpoint import CheckpointPart, complete, step_of
from relax_core.roles.forward import INPUTS, Filled, ForwardColumns, ForwardLoop, forward_lease
from relax_core.roles.rank_group import RankGroup, TrainerDeviceLease
from relax_core.roles.row_leases import renewed
from relax_core.roles.step import ClaimedRows, TrainingStep, critic_metrics
from relax_core.rpc.waiting import RestartBudget

POLL_S = 0.5
MAX_NOT_FINITE = 5
"""Consecutive steps without an applied update, because of NaN or infinite gradients, before the run stops."""
FIT, VALUES = "critic.fit", "critic.values"


class Critic(Role):
    """The role that fills the `values` column and trains the value model.

    A step of the actor: `committed by the actor -> claimed -> learnt -> acknowledged`.

    Invariants:
    - The critic's step s trains all rows of the actor's committed step s, in a fixed order and with the same loss mask.
      Rows without a policy gradient are included.
    - The critic fills values only after it has learnt from every committed step. So at staleness 0 the values come from
      the value model at the step's start.
    - The critic's state can be rebuilt from checkpoints and rows. The bus keeps rows until the critic has acknowledged
      them and a checkpoint covers them. So a restarted critic loads the newest checkpoint and learns later steps again.
    """

    name = "critic"
    stateless = True

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        rows = frozenset(INPUTS)
        return (
            Operation(VALUES, cls.name, rows, frozenset({"values"}), Reads.LATEST, model=cls.name),
            Operation(FIT, cls.name, rows, frozenset(), Reads.LATEST, updates=cls.name, model=cls.name),
        )

    async def run(self, context: RunContext) -> None:
        self._context, self._skipped = context, RestartBudget(MAX_NOT_FINITE)
        self._columns = context.plan.fit_columns[self.name]
        self.busy = asyncio.Lock()
        """Held while the ranks work: the two tasks of this role share the ranks and one device lease."""
        self.learnt = asyncio.Event()
        self.version, self._actor = Version(self.name, context.registration, 0), await context.bus.version()
        async with await RankGroup.start(context, self.name) as self.trainer:
            self._devices = TrainerDeviceLease(context, self.name, live=False)
            await self._restore()
            context.doing("ready", ranks=self.trainer.pids())
            learning, valuing = (
                asyncio.create_task(self._follow()),
                asyncio.create_task(_ValueLoop(self, context).run()),
            )
            try:
                await asyncio.wait([learning, valuing], return_when=asyncio.FIRST_COMPLETED)
                if valuing.done():
                    valuing.result()  # raise the loop's error, if any; otherwise the run is stopping
                await learning
            finally:
                for task in (learning, valuing):
                    task.cancel()
                await asyncio.gather(learning, valuing, return_exceptions=True)

    # -- learning -----------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Learn from each committed step and write the critic's part of checkpoints, until the actor has ended."""
        context = self._context
        while True:
            actor = await context.bus.version()
            if actor.incarnation != self._actor.incarnation or actor.step < self.version.step:
                await self._go_back(actor)
            part = CheckpointPart(context, self.version.step, self.name)
            if part.wanted:
                async with self.busy, self._devices:
                    await self._devices.train()
                    with disk_errors(part.directory):
                        await self.trainer.call("save", str(part.directory))
                part.finish()
                continue
            with context.waiting(f"step {self.version.step} of the actor", "actor", POLL_S):
                claim = await context.bus.claim(self._request(), POLL_S)
            if claim is not None:
                await self._learn(claim)
            elif context.stopping or self.version.step >= context.config.steps:
                states = {heartbeat.role: heartbeat.state for heartbeat in await context.run_status.heartbeats()}
                if states.get("actor") in ("stopped", "failed"):
                    return

    def _request(self) -> ClaimRequest:
        return ClaimRequest(FIT, self._columns, 0, step=self.version.step, follows=True)

    async def _learn(self, claim: Claim) -> None:
        """Train one step. If the row lease is lost before the first update, change nothing and return."""
        context, start = self._context, self._context.clock.now()
        try:
            async with renewed(context, self.name, lambda: (claim,)), self.busy, self._devices:
                rows = await context.bus.read(claim, self._columns)
                await self._devices.train()
                await context.bus.verify(claim)
                context.doing(f"learning from step {self.version.step}", step=self.version.step)
                batch = context.config.batch
                step = TrainingStep(self.version, len(claim.groups), batch.updates_per_step, passes=batch.passes)
                await self.trainer.call("begin_step", self.version)
                for part in step.add(ClaimedRows(claim, rows, zero_advantage_skips=False)):
                    await self.trainer.begin_update(part.denominators)
                    if len(part.rows):
                        await self.trainer.accumulate(part.rows, part.skipped, True)
                    step.results.append(await self.trainer.finish_update(part.denominators))
            if any(result.outcome is UpdateOutcome.APPLIED for result in step.results):
                self._skipped.refill()
            elif not self._skipped.spend():
                times = self._skipped.spent
                raise RelaxError(f"critic: {times} steps in a row had a NaN or infinite gradient; lower critic.lr")
        except StaleFence:
            return
        try:
            await context.bus.acknowledge(claim)
        except StaleFence:  # the row lease was lost while weights changed: acknowledge under a new one on the same rows
            again = await context.bus.claim(self._request(), 0.0)
            if again is not None:
                await context.bus.acknowledge(again)
        self.version = self.version.next()
        self.learnt.set()
        metrics = critic_metrics(step, context.clock.now() - start)
        await context.run_status.emit(StepMeasured(self.version.step, metrics))

    # -- checkpoints --------------------------------------------------------------------------------------------

    async def _go_back(self, actor: Version) -> None:
        """Undo the steps that the actor has rolled back: load the newest checkpoint that is not ahead of the actor."""
        registration = await self._context.bus.register(self.name)
        learnt, self.version = self.version.step, Version(self.name, registration, 0)
        self._actor = actor
        await self._restore()
        if learnt and not self.version.step:
            raise InfrastructureError(
                "critic: the actor returned to step 0; the critic restarts with its starting weights"
            )

    async def _restore(self) -> None:
        """Load the newest checkpoint that is not ahead of the actor; if none exists, keep the starting weights."""
        context = self._context
        root = Path(context.run_dir) / "checkpoints"
        found = [path for path in complete(root) if step_of(path) <= self._actor.step and (path / self.name).is_dir()]
        directory, step = (found[-1], step_of(found[-1])) if found else (None, 0)
        if directory is None and context.resume is not None:
            directory, step = Path(context.resume.directory), context.resume.step
        if directory is None:
            return
        async with self.busy, self._devices:
            await self._devices.train()
            await self.trainer.call("load", str(directory / self.name))
        self.version = self.version._replace(step=step)


class _ValueLoop(ForwardLoop):
    """The loop that fills `values`. It runs until the critic ends, since rolled-back steps need values again."""

    def __init__(self, critic: Critic, context: RunContext) -> None:
        columns = ForwardColumns({"values": "values"}, ("values",))
        super().__init__(context, critic.name, columns, task=VALUES, whole_steps=context.config.deterministic)
        self._critic = critic

    async def ready(self) -> None:
        """Wait until the critic has learnt every committed step."""
        critic = self._critic
        while (await self.context.bus.version()).step > critic.version.step:
            critic.learnt.clear()
            with self.context.waiting("the critic to learn from committed steps", critic.name, POLL_S):
                await critic.learnt.wait()

    async def fill(self, rows: RowBatch) -> Filled:
        critic = self._critic
        async with critic.busy, forward_lease(self.context, critic.name):
            self.context.doing("valuing rows", groups=len({row.group for row in rows.ids}))
            return await critic.trainer.forward(rows, ("values",)), critic.version

    async def over(self) -> bool:
        return False
