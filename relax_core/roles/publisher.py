# SPDX-License-Identifier: Apache-2.0
"""Publishes the trainer's weights: hands a version to the transport, announces it, frees versions nobody can need."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from relax_core.api.role import Context
from relax_core.api.version import Version
from relax_core.api.weights import Manifest, Payload
from relax_core.roles.canary import make_canary
from relax_core.roles.doorkeeper import Doorkeeper
from relax_core.roles.trainer_group import TrainerGroup
from relax_core.weights.location import claim, memory_directory, sweep_abandoned
from relax_core.weights.prove import prove_successor


class Publisher:
    """One trainer's publishing end."""

    def __init__(self, context: Context, trainer: TrainerGroup) -> None:
        self._context, self._trainer = context, trainer
        self._transport = context.build(context.run.weights.chosen)
        self._newest: Manifest | None = None
        self._deltas: int | None = None
        """Sent since the last full version; None where only a full one can follow."""
        self._kept: list[Manifest] = []
        self._location = weights_directory(context, self._transport.same_host)
        live = self._transport.live
        self._door = Doorkeeper(context, trainer, context.run.weights.chosen) if live else None

    def follow(self, trainer: TrainerGroup) -> None:
        """Publish for ranks that took the place of others: nothing they send is on top of what those sent."""
        self._trainer, self._newest, self._deltas = trainer, None, None
        if self._door is not None:
            self._door = Doorkeeper(self._context, trainer, self._context.run.weights.chosen)

    @property
    def live(self) -> bool:
        """Weights go from the trainer's memory to the engines', without a copy between."""
        return self._door is not None

    async def publish(self, version: Version, applied: bool = False) -> Manifest:
        """`applied`: an update with a gradient lies behind the last version, so that some bytes must have changed."""
        settings = self._context.run.weights
        payload, base = self._payload()
        deltas, self._deltas = self._deltas, None  # until it is out: what fails half way is nobody's base
        manifest = await self._trainer.publish(version, settings.chosen, self._location, payload, base)
        prove_successor(self._newest, manifest, applied=applied)
        if settings.proof == "behaviour":
            canary = await make_canary(self._trainer, self._context.run.rollout.temperature)
            manifest = replace(manifest, canary=canary)
        await self._context.weights.announce(manifest, settings.chosen)
        if self._door is not None:
            await self._door.hand_out(manifest)
        self._newest, self._deltas = manifest, 0 if payload == "full" else (deltas or 0) + 1
        self._kept.append(manifest)
        await self._release()
        return manifest

    def _payload(self) -> tuple[Payload, str]:
        """What to send, and on top of what: adapters on their base; deltas on what was sent last, a full version now and
        then."""
        settings = self._context.run.weights
        if self._context.plan.adapters_alone:
            return "lora", str(self._trainer.facts["base"])
        if settings.payload == "full" or self._newest is None or self._deltas is None:
            return "full", ""
        return ("full", "") if self._deltas + 1 >= settings.full_every else ("delta", str(self._newest.version))

    async def _release(self) -> None:
        """Free what no route leads over and no receiver may still be reading."""
        needed = await self._context.weights.needed(self._kept[-1].version.model)
        for manifest in self._kept:
            if manifest.version not in needed:  # a disk or a sender may be slow to answer
                await asyncio.to_thread(self._transport.release, manifest)
        self._kept = [manifest for manifest in self._kept if manifest.version in needed]

    async def serve(self) -> None:
        """Live: hand the newest version to receivers at the door. Only while the trainer's weights are that version."""
        if self._door is None or self._newest is None:
            return
        if receivers := await self._door.wanted(self._newest):
            newest = self._newest
            if newest.payload == "delta":  # who stands there has not its base
                whole = await self._trainer.publish(newest.version, self._context.run.weights.chosen, self._location)
                newest = self._newest = replace(whole, canary=newest.canary)
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
