# SPDX-License-Identifier: Apache-2.0
"""The publishing end of a trainer: hands a version to the transport, announces it, frees versions nobody can need."""

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
"""Wait of receivers that are there for the others; one that comes later is served while the actor waits for rows."""


class Publisher:
    """One trainer's publishing end.

    A version: `sent -> proved to follow the last -> announced -> (live: handed out) -> released when no route needs it`.

    Invariants:
    - A delta follows a version that was announced: after a failure, or for other ranks, a full version comes next.
    - Live weights are handed out only while the trainer's weights are what was announced: between a publish and the next
      update. Nobody waits for ever: the actor serves also while it waits for rows, since those may wait for an engine.
    """

    def __init__(self, context: RunContext, trainer: RankGroup) -> None:
        self._context, self._trainer = context, trainer
        self._transport = context.build(context.config.weights.chosen, WeightTransport)
        self._newest: Manifest | None = None
        self._deltas: int | None = None
        """Sent since the last full version; None where only a full one can follow."""
        self._kept: list[Manifest] = []
        self._location = weights_directory(context, self._transport.same_host)
        self.live: bool = self._transport.live
        """Weights go from the trainer's memory to the engines', without a copy between."""
        self._missed: Version | None = None
        """The live version that was handed out last, where some receiver did not come for it."""

    def follow(self, trainer: RankGroup) -> None:
        """Publish for ranks that took the place of others: nothing they send is on top of what those sent."""
        self._trainer, self._newest, self._deltas, self._missed = trainer, None, None, None

    async def restart(self, model: str) -> None:
        """Own what the role's last process published, to delete each version when no receiver needs it any more."""
        self._kept = [manifest for manifest, _ in await self._context.weights.route(model, None, 0.0, within_s=0.0)]

    async def publish(self, version: Version, applied: bool = False) -> Manifest:
        """Send a version, prove that it follows the last one, and announce it.

        Adapters go on top of their base; deltas on top of what was sent last, with a full version now and then. `applied`:
        an update with a gradient lies behind the last version, so that some bytes must have changed.
        """
        context, settings = self._context, self._context.config.weights
        payload: Payload = "full"
        base, deltas = "", self._deltas
        self._deltas = None  # until it is out: what fails half way is nobody's base
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
            if kept.version not in needed:  # no route leads over it, and no receiver may still be reading it
                await asyncio.to_thread(self._transport.release, kept)  # a disk or a sender may be slow to answer
        self._kept = [kept for kept in self._kept if kept.version in needed]
        return manifest

    async def serve(self) -> None:
        """Hand the newest live version to receivers that want it. Only while the trainer's weights are that version."""
        if not self.live or self._newest is None:
            return
        if receivers := len(await self._context.weights.wanted(self._newest.version.model)):
            transport = self._context.config.weights.chosen
            if self._newest.payload == "delta":  # those receivers have not its base
                whole = await self._trainer.publish(self._newest.version, transport, self._location)
                self._newest = replace(whole, canary=self._newest.canary)
            await self._context.weights.announce(self._newest, transport)
            await self._transfer(self._newest, receivers)

    async def _hand_out(self, manifest: Manifest) -> None:
        """Hand a live version to everyone who has proved one before, or to every engine where nobody has.

        A receiver that missed the last one hangs or is late: it is not waited for before it has proved to be there again.
        """
        known = await self._context.weights.receivers(manifest.version.model)
        groups = self._context.plan.groups
        engines = groups["rollout"].size if "rollout" in groups else 0
        there = [name for name, have in known.items() if self._missed is None or have[1:] >= self._missed[1:]]
        took = await self._transfer(manifest, max(1, len(there)) if known else engines)
        self._missed = None if took >= (len(known) or engines) else manifest.version

    async def _transfer(self, manifest: Manifest, receivers: int) -> int:
        """Hand a live version out; return how many receivers took all of it."""
        self._context.doing(f"handing out {manifest.version}", receivers=receivers)
        try:
            transport = self._context.config.weights.chosen
            took: list[int] = await self._trainer.call("transfer", manifest, transport, receivers, GATHER_S)
            return max(took)
        finally:
            await self._context.weights.handed_out(manifest.version)

    async def _canary(self) -> Canary:
        """Sample tokens from a fixed seed, with the log-probs that the trainer's weights of this moment give them.

        Log-probs of trainers are of logits / temperature, and can't be turned back; so the temperature travels with them.
        """
        random, facts = Random(CANARY_SEED), self._trainer.facts
        length = min(CANARY_TOKENS, int(facts.get("max_context") or CANARY_TOKENS))
        tokens = [random.randrange(int(facts["vocab_size"])) for _ in range(length)]
        count = self._trainer.size  # a row for each rank, so that each has work; all alike
        columns = {
            "tokens": Ragged.of([np.array(tokens, np.int32)] * count),
            "loss_mask": Ragged.of([np.array([0] + [1] * (length - 1), np.uint8)] * count),
        }
        rows = RowBatch(tuple(RowId(-1 - number, 0, 0, 0) for number in range(count)), columns)
        log_probs = next(iter((await self._trainer.forward(rows, ("log_probs",)))["log_probs"].rows()))
        temperature = self._context.config.rollout.temperature
        return Canary(tuple(tokens), (0.0, *(float(value) for value in log_probs[1:])), temperature)


def weights_directory(context: RunContext, same_host: bool) -> str:
    """Choose the directory of weights: memory-backed on one host, else under the run directory. Two runs never share one.

    Files that killed runs left there are removed, and none of this run that a dead process of the role left.
    """
    in_memory = memory_directory(context.run_id) if same_host else None
    if in_memory is not None:
        claim(in_memory)
        sweep_abandoned()
    return str(in_memory or f"{context.run_dir}/{WEIGHTS}")
