# SPDX-License-Identifier: Apache-2.0
"""Publishes the trainer's weights: hands a version to the transport, announces it, frees versions nobody can need."""

from __future__ import annotations

from relax_core.api.role import Context
from relax_core.api.version import Version
from relax_core.api.weights import Manifest
from relax_core.roles.doorkeeper import Doorkeeper
from relax_core.roles.trainer_group import TrainerGroup
from relax_core.weights.location import claim, memory_directory, sweep_abandoned
from relax_core.weights.prove import prove_successor

KEPT = 2
"""The newest, and the one that a receiver may still be reading."""


class Publisher:
    """One trainer's publishing end."""

    def __init__(self, context: Context, trainer: TrainerGroup) -> None:
        self._context, self._trainer = context, trainer
        self._transport = context.build(context.run.weights.chosen)
        self._live: list[Manifest] = []
        self._location = weights_directory(context, self._transport.same_host)
        live = self._transport.live
        self._door = Doorkeeper(context, trainer, context.run.weights.chosen) if live else None

    async def publish(self, version: Version, applied: bool = False) -> Manifest:
        """`applied`: an update with a gradient lies behind the last version, so that some bytes must have changed."""
        manifest = await self._trainer.publish(version, self._context.run.weights.chosen, self._location)
        prove_successor(self._live[-1] if self._live else None, manifest, applied=applied)
        await self._context.weights.announce(manifest, self._context.run.weights.chosen)
        if self._door is not None:
            await self._door.hand_out(manifest)
        self._live.append(manifest)
        for old in self._live[:-KEPT]:
            self._transport.release(old)
        del self._live[:-KEPT]
        return manifest

    async def serve(self) -> None:
        """Live: hand the newest version to receivers at the door. Only while the trainer's weights are that version."""
        if self._door is None or not self._live:
            return
        newest = self._live[-1]
        if receivers := await self._door.wanted(newest):
            if newest.payload == "delta":  # who stands there has not its base
                newest = await self._trainer.publish(newest.version, self._context.run.weights.chosen, self._location)
            await self._door.serve(newest, receivers)


def weights_directory(context: Context, same_host: bool) -> str:
    """Memory-backed on one host, else under the run directory; named by the run, so that two never meet.

    What killed runs left there goes now.
    """
    in_memory = memory_directory(context.run_id) if same_host else None
    if in_memory is not None:
        sweep_abandoned()
        claim(in_memory)
    return str(in_memory or f"{context.run_dir}/weights")
