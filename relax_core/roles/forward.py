# SPDX-License-Identifier: Apache-2.0
"""What reference and actor_fwd share: claim rows, run them forward without gradient, write one column."""

from __future__ import annotations

from relax_core.api.bus import Claim, ClaimRequest
from relax_core.api.errors import StaleFence
from relax_core.api.role import Context
from relax_core.api.version import Version
from relax_core.roles.trainer_group import TrainerGroup
from relax_core.roles.turn import forwarding

POLL_S = 1.0
INPUTS = ("tokens", "loss_mask")


class ForwardLoop:
    """Fills `column` with the log-probs of one model."""

    def __init__(self, context: Context, role: str, column: str) -> None:
        self._context, self._role, self._column = context, role, column
        self._most = context.run.rollout.prompts_per_step
        self._least = self._most if "rollout" in context.plan.neighbours(role) else 1
        """On the engines' devices only whole steps are worth an interruption."""
        self._patience_s = context.run.rollout.step_timeout_s / 2

    async def run(self, trainer: TrainerGroup) -> None:
        context, last = self._context, self._context.clock.now()
        while not context.stopping:
            await context.pause_point()
            late = context.clock.now() - last > self._patience_s  # the actor closes its step short at its deadline
            request = ClaimRequest(self._role, INPUTS, self._most, 1 if late else self._least)
            with context.waiting(f"rows that lack {self._column}", "rollout", POLL_S):
                claim = await context.bus.claim(request, POLL_S)
            if claim is not None:
                async with forwarding(context, self._role):
                    context.doing(f"filling {self._column}", groups=len(claim.groups))
                    await self._fill(trainer, claim, await self.version(trainer))
                last = context.clock.now()
            elif (await context.bus.version()).step >= context.run.steps:
                return

    async def version(self, trainer: TrainerGroup) -> Version | None:
        """The weights that fill the column; None for fixed ones."""
        return None

    async def _fill(self, trainer: TrainerGroup, claim: Claim, version: Version | None) -> None:
        try:
            rows = await self._context.bus.read(claim, INPUTS)
            columns = await trainer.forward(rows, ("log_probs",))
            await self._context.bus.write(claim, {self._column: columns["log_probs"]}, version)
            await self._context.bus.acknowledge(claim)
        except StaleFence:
            return  # another incarnation has these rows now and will fill them
