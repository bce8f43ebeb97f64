# SPDX-License-Identifier: Apache-2.0
"""The publisher of a trainer: sends each version by the weight transport, announces it, and releases old versions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import numpy as np

from relax_core.api.batch import Ragged, RowBatch, RowId
from relax_core.api.weights import Canary, Manifest, Payload, Version, WeightTransport
from relax_core.config.run_config import RunContext
from relax_core.roles.rank_group import RankGroup
from relax_core.tensor_files.mapped_files import WEIGHTS, claim, memory_directory, sweep_abandoned
from relax_core.weights.registry import prove_successor

CANARY_TOKENS = 48
CANARY_SEED = 0xCA9A27
GATHER_S = 2.0
"""Seconds that a live transfer waits for its receivers. Later receivers are served while the actor waits for rows."""


class Publisher:
    """The publisher of one trainer's weights.

    A version: `sent -> proved to follow the last -> announced -> (live: transferred) -> released when no route needs
    it`.

    Invariants:
    - A delta is made against an announced version. After a failed publish, or with new ranks, a full version comes
      next.
    - Live weights are transferred only while the trainer's weights equal the announced version: between a publish and
      the next update. That includes the actor's wait for rows, since the rows may depend on an engine that waits for
      weights.
    """

    def __init__(self, context: RunContext, trainer: RankGroup) -> None:
        self._context, self._trainer = context, trainer
        self._transport = context.build(context.config.weights.chosen, WeightTransport)
        self._newest: Manifest | None = None
        self._deltas: int | None = None
        """Number of deltas since the last full version; None if a full version must come next."""
        self._kept: list[Manifest] = []
        self._location = weights_directory(context, self._transport.same_host)
        self.live: bool = self._transport.live
        """True if weights go from the trainer's memory to the engines' memory without a stored copy."""
        self._missed: Version | None = None
        """The last live version if some receiver missed its transfer, else None."""

    def follow(self, trainer: RankGroup) -> None:
        """Publish for new ranks from now on. Their first version is full: they lack the base for a delta."""
        self._trainer, self._newest, self._deltas, self._missed = trainer, None, None, None

    async def restart(self, model: str) -> None:
        """Release the versions that the role's previous process published, each once no receiver needs it."""
        self._kept = [manifest for manifest, _ in await self._context.weights.route(model, None, 0.0, within_s=0.0)]

    async def publish(self, version: Version, applied: bool = False) -> Manifest:
        """Send a version, prove that it follows the last one, and announce it.

        The payload is the adapters, a delta against the last version, or the full weights. `applied`: True if an update
        has changed the weights since the last version; then a version with equal bytes raises InfrastructureError.
        """
        context, settings = self._context, self._context.config.weights
        payload: Payload = "full"
        base, deltas = "", self._deltas
        self._deltas = None  # after a failure below, no delta can be made on the half-sent version
        if context.plan.adapters_alone:
            payload, base = "lora", str(self._trainer.facts["base"])
        elif settings.payload == "delta" and self._newest is not None and deltas is not None:
            whole = deltas + 1 >= settings.full_every
            payload, base = ("full", "") if whole else ("delta", str(self._newest.version))
        manifest = await self._trainer.publish(version, settings.chosen, self._location, payload, base)
        prove_successor(self._newest, manifest, applied=applied)
        if settings.proof == "behaviour":
            manifest = replace(manifest, canary=await self._canary())
        await context.weights.announce(manifest, settings.chosen)
        if self.live:
            await self._hand_out(manifest)
        self._newest, self._deltas = manifest, 0 if payload == "full" else (deltas or 0) + 1
        self._kept.append(manifest)
        needed = await context.weights.needed(version.model)
        for kept in self._kept:
            if kept.version not in needed:  # no route contains it, and no receiver may still be reading it
                await asyncio.to_thread(self._transport.release, kept)  # may wait for a disk or for a sender
        self._kept = [kept for kept in self._kept if kept.version in needed]
        return manifest

    async def serve(self) -> None:
        """Transfer the newest live version to receivers that want it. The trainer must still hold these weights."""
        if not self.live or self._newest is None:
            return
        if receivers := len(await self._context.weights.wanted(self._newest.version.model)):
            transport = self._context.config.weights.chosen
            if self._newest.payload == "delta":  # these receivers lack the delta's base
                whole = await self._trainer.publish(self._newest.version, transport, self._location)
                self._newest = replace(whole, canary=self._newest.canary)
            await self._context.weights.announce(self._newest, transport)
            await self._transfer(self._newest, receivers)

    async def _hand_out(self, manifest: Manifest) -> None:
        """Transfer a live version to every receiver that has loaded a version before, or at first to every engine.

        Do not wait for a receiver that missed the last live version, until it proves that version or a later one.
        """
        known = await self._context.weights.receivers(manifest.version.model)
        groups = self._context.plan.groups
        engines = groups["rollout"].size if "rollout" in groups else 0
        there = [name for name, have in known.items() if self._missed is None or have[1:] >= self._missed[1:]]
        took = await self._transfer(manifest, max(1, len(there)) if known else engines)
        self._missed = None if took >= (len(known) or engines) else manifest.version

    async def _transfer(self, manifest: Manifest, receivers: int) -> int:
        """Transfer a live version; return the number of receivers that took it completely."""
        self._context.doing(f"handing out {manifest.version}", receivers=receivers)
        try:
            transport = self._context.config.weights.chosen
            took: list[int] = await self._trainer.call("transfer", manifest, transport, receivers, GATHER_S)
            return max(took)
        finally:
            await self._context.weights.handed_out(manifest.version)

    async def _canary(self) -> Canary:
        """Draw tokens from a fixed seed, and compute their log-probs under the trainer's present weights.

        The log-probs are of logits / temperature. They can't be converted to another temperature, so the canary
        contains the temperature.
        """
        random, facts = Random(CANARY_SEED), self._trainer.facts
        length = min(CANARY_TOKENS, int(facts.get("max_context") or CANARY_TOKENS))
        tokens = [random.randrange(int(facts["vocab_size"])) for _ in range(length)]
        count = self._trainer.size  # the same row for every rank, so that each has work
        columns = {
            "tokens": Ragged.of([np.array(tokens, np.int32)] * count),
            "loss_mask": Ragged.of([np.array([0] + [1] * (length - 1), np.uint8)] * count),
        }
        rows = RowBatch(tuple(RowId(-1 - number, 0, 0, 0) for number in range(count)), columns)
        log_probs = next(iter((await self._trainer.forward(rows, ("log_probs",)))["log_probs"].rows()))
        temperature = self._context.config.rollout.temperature
        return Canary(tuple(tokens), (0.0, *(float(value) for value in log_probs[1:])), temperature)


def weights_directory(context: RunContext, same_host: bool) -> str:
    """Return the run's own directory of weights: memory-backed if `same_host`, else under the run directory.

    Memory-backed directories of killed runs are removed. Files that an earlier process of this role left are kept.
    """
    in_memory = memory_directory(context.run_id) if same_host else None
    if in_memory is not None:
        claim(in_memory)
        sweep_abandoned()
    return str(in_memory or f"{context.run_dir}/{WEIGHTS}")
