# SPDX-License-Identifier: Apache-2.0
"""Hands live versions out: to all right after they are announced, later to whoever stands at the door.

It works only while the trainer's weights are what was announced: between a publish and the next update. Nobody waits
for ever: the actor looks at the door also while it waits for rows, since those rows may wait for an engine there.
"""

from __future__ import annotations

from relax_core.api.role import Context
from relax_core.api.trainer import Chosen
from relax_core.api.version import Version
from relax_core.api.weights import Manifest
from relax_core.roles.trainer_group import TrainerGroup

GATHER_S = 2.0
"""How long those who are there wait for the others; who comes later is served while the actor waits for rows."""


class Doorkeeper:
    """Of one model's trainer."""

    def __init__(self, context: Context, trainer: TrainerGroup, transport: Chosen) -> None:
        self._context, self._trainer, self._transport = context, trainer, transport
        self._engines = context.plan.groups["rollout"].size if "rollout" in context.plan.groups else 0
        self._last: Version | None = None
        """What was handed out last, where somebody did not come for it."""

    async def hand_out(self, manifest: Manifest) -> None:
        """To everyone who has proved a version before, or to every engine where nobody has.

        Who missed the last one hangs or is late: it is not waited for before it has proved that it is there again.
        """
        known = await self._context.weights.receivers(manifest.version.model)
        there = [name for name, have in known.items() if self._last is None or have[1:] >= self._last[1:]]
        took = await self._transfer(manifest, max(1, len(there)) if known else self._engines)
        self._last = None if took >= (len(known) or self._engines) else manifest.version

    async def wanted(self, manifest: Manifest) -> int:
        """How many stand at the door."""
        return len(await self._context.weights.wanted(manifest.version.model))

    async def serve(self, manifest: Manifest, receivers: int) -> None:
        """Open the door again for those who stand there."""
        await self._context.weights.announce(manifest, self._transport)
        await self._transfer(manifest, receivers)

    async def _transfer(self, manifest: Manifest, receivers: int) -> int:
        self._context.doing(f"handing out {manifest.version}", receivers=receivers)
        try:
            return await self._trainer.transfer(manifest, self._transport, receivers, GATHER_S)
        finally:
            await self._context.weights.handed_out(manifest.version)
