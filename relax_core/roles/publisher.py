# SPDX-License-Identifier: Apache-2.0
"""Publishes the trainer's weights: hands a version to the transport, announces it, frees versions nobody can need.

A canary: a few tokens made from a fixed seed, with the log-probs that the trainer gives them now.

Log-probs of trainers are of logits / temperature, and can't be turned back; so the temperature travels with them.

Hands live versions out: to all right after they are announced, later to whoever stands at the door.

It works only while the trainer's weights are what was announced: between a publish and the next update. Nobody waits
for ever: the actor looks at the door also while it waits for rows, since those rows may wait for an engine there.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import numpy as np

from relax_core.api.batch import Ragged, RowBatch, RowId
from relax_core.api.trainer import Chosen
from relax_core.api.weights import Canary, Manifest, Payload, Version
from relax_core.config.run_config import RunContext
from relax_core.roles.rank_group import RankGroup
from relax_core.tensor_files.mapped_files import claim, memory_directory, sweep_abandoned
from relax_core.weights.registry import prove_successor

_TOKENS = 48
_SEED = 0xCA9A27


async def make_canary(trainer: RankGroup, temperature: float) -> Canary:
    """Between two updates: what the trainer's weights of this moment say."""
    random, vocabulary = Random(_SEED), int(trainer.facts["vocab_size"])
    tokens = [random.randrange(vocabulary) for _ in range(_length(trainer))]
    columns = await trainer.forward(_rows(tokens, trainer.size), ("log_probs",))
    log_probs = next(iter(columns["log_probs"].rows()))
    return Canary(tuple(tokens), (0.0, *(float(value) for value in log_probs[1:])), temperature)


def _length(trainer: RankGroup) -> int:
    return min(_TOKENS, int(trainer.facts.get("max_context") or _TOKENS))


def _rows(tokens: list[int], count: int) -> RowBatch:
    """A row a rank, so that each has work; all alike."""
    mask = [0] + [1] * (len(tokens) - 1)
    return RowBatch(
        tuple(RowId(-1 - number, 0, 0, 0) for number in range(count)),
        {
            "tokens": Ragged.of([np.array(tokens, np.int32)] * count),
            "loss_mask": Ragged.of([np.array(mask, np.uint8)] * count),
        },
    )


GATHER_S = 2.0
"""How long those who are there wait for the others; who comes later is served while the actor waits for rows."""


class LiveWeightServer:
    """Of one model's trainer."""

    def __init__(self, context: RunContext, trainer: RankGroup, transport: Chosen) -> None:
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


class Publisher:
    """One trainer's publishing end."""

    def __init__(self, context: RunContext, trainer: RankGroup) -> None:
        self._context, self._trainer = context, trainer
        self._transport = context.build(context.config.weights.chosen)
        self._newest: Manifest | None = None
        self._deltas: int | None = None
        """Sent since the last full version; None where only a full one can follow."""
        self._kept: list[Manifest] = []
        self._location = weights_directory(context, self._transport.same_host)
        live = self._transport.live
        self._door = LiveWeightServer(context, trainer, context.config.weights.chosen) if live else None

    def follow(self, trainer: RankGroup) -> None:
        """Publish for ranks that took the place of others: nothing they send is on top of what those sent."""
        self._trainer, self._newest, self._deltas = trainer, None, None
        if self._door is not None:
            self._door = LiveWeightServer(self._context, trainer, self._context.config.weights.chosen)

    @property
    def live(self) -> bool:
        """Weights go from the trainer's memory to the engines', without a copy between."""
        return self._door is not None

    async def publish(self, version: Version, applied: bool = False) -> Manifest:
        """`applied`: an update with a gradient lies behind the last version, so that some bytes must have changed."""
        settings = self._context.config.weights
        payload, base = self._payload()
        deltas, self._deltas = self._deltas, None  # until it is out: what fails half way is nobody's base
        manifest = await self._trainer.publish(version, settings.chosen, self._location, payload, base)
        prove_successor(self._newest, manifest, applied=applied)
        if settings.proof == "behaviour":
            canary = await make_canary(self._trainer, self._context.config.rollout.temperature)
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
        settings = self._context.config.weights
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
                whole = await self._trainer.publish(newest.version, self._context.config.weights.chosen, self._location)
                newest = self._newest = replace(whole, canary=newest.canary)
            await self._door.serve(newest, receivers)


def weights_directory(context: RunContext, same_host: bool) -> str:
    """Memory-backed on one host, else under the run directory; named by the run, so that two never meet.

    What killed runs left there goes now.
    """
    in_memory = memory_directory(context.run_id) if same_host else None
    if in_memory is not None:
        sweep_abandoned()
        claim(in_memory)
    return str(in_memory or f"{context.run_dir}/weights")
