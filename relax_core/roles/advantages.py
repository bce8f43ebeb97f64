# SPDX-License-Identifier: Apache-2.0
"""The advantages role: credits the samples of whole groups and writes the column the actor trains on. Stateless."""

from __future__ import annotations

import asyncio
import importlib

from relax_core.api.bus import Claim, ClaimRequest
from relax_core.api.errors import StaleFence
from relax_core.api.plan import Operation
from relax_core.api.role import Role
from relax_core.config.run_config import RunContext

POLL_S = 1.0


class AdvantagesRole(Role):
    """Credits samples within their groups."""

    name = "advantages"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        consumes = frozenset({"tokens", "loss_mask", "rewards"})
        return (
            Operation("advantages.compute", cls.name, consumes, frozenset({"advantages", "returns"}), scope="group"),
        )

    async def run(self, context: RunContext) -> None:
        # Torch takes seconds to import: do it beside the other roles' start, not on the loop at the first step.
        self._credited = (await asyncio.to_thread(importlib.import_module, "relax_core.learn.groups")).credited
        self._algorithm = context.build(context.config.learner)
        groups = context.config.rollout.prompts_per_step
        request = ClaimRequest(
            self.name, context.plan.advantage_columns, groups, groups if context.plan.batch_statistics else 1
        )
        while not context.stopping:
            await context.pause_point()
            with context.waiting("finished groups", "rollout", POLL_S):
                claim = await context.bus.claim(request, POLL_S)
            if claim is not None:
                context.doing("crediting", groups=len(claim.groups))
                await self._credit(context, claim)
            elif (await context.bus.version()).step >= context.config.steps:
                return

    async def _credit(self, context: RunContext, claim: Claim) -> None:
        try:
            rows = await context.bus.read(claim, context.plan.advantage_columns)
            columns = self._credited(self._algorithm, rows, claim.samples, context.plan.advantage_columns)
            await context.bus.write(claim, columns)
            await context.bus.acknowledge(claim)
        except StaleFence:
            return  # another incarnation has these rows now and will credit them
