# SPDX-License-Identifier: Apache-2.0
"""Leads engines to the newest weights: asks the weight service for the way, loads along it, hands in the proofs.

An engine has arrived only when every proof that the run asks for was accepted; whatever goes wrong on the way is an
`InfrastructureError` about that engine alone, and nothing takes longer than the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from relax_core.api.clock import Clock
from relax_core.api.engine import Health
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, WorkerDied
from relax_core.api.role import WeightService
from relax_core.api.trainer import Chosen
from relax_core.api.weights import Canary, Manifest, Receipt, ReceiptLevel, Version
from relax_core.engines.slot import EngineSlot

DOOR_S = 5.0
"""Between two knocks of a receiver that nothing leads to the newest version."""
HEALTH_S = 30.0
LEVELS: tuple[ReceiptLevel, ...] = ("wire", "resident", "behaviour")


class WeightUpdates(Protocol):
    """Where a pool's engines get their weights from."""

    async def bring(self, slot: EngineSlot, manifest: Manifest, transport: Chosen) -> Receipt:
        """Bring an engine to this version or a later one, proved; the last receipt. Raises InfrastructureError."""
        ...

    async def forget(self, slot: EngineSlot) -> None:
        """The engine died or is not to be trusted."""
        ...


class WeightUpdater:
    """From the weight service of a run."""

    def __init__(self, weights: WeightService, clock: Clock, proof: str, tolerance: float, timeout_s: float) -> None:
        self._weights, self._clock = weights, clock
        self._proof, self._tolerance, self._timeout_s = proof, tolerance, timeout_s

    async def bring(self, slot: EngineSlot, manifest: Manifest, transport: Chosen) -> Receipt:
        """Along whatever way the service names; a live version whose door is shut is wanted until it opens again."""
        target, deadline = manifest.version, self._clock.now() + self._timeout_s
        while True:
            for link, chosen in await self._route(slot, target.model, deadline):
                receipt = await self._load(slot, link, chosen, deadline)
                if receipt is None:
                    break
                if receipt.version[1:] >= target[1:]:
                    return receipt

    async def _route(self, slot: EngineSlot, model: str, deadline: float) -> Sequence[tuple[Manifest, Chosen]]:
        left = self._left(slot, model, deadline)
        route = await self._weights.route(model, slot.version, 0.0, None, slot.name, left)
        if not route:
            await self._weights.want(slot.name, model)
            route = await self._weights.route(model, slot.version, min(left, DOOR_S), None, slot.name, left)
        return route

    async def _load(self, slot: EngineSlot, manifest: Manifest, transport: Chosen, deadline: float) -> Receipt | None:
        """One version; None where a live one was missed and the engine is as it was."""
        left = self._left(slot, str(manifest.version), deadline)
        try:
            receipt = await slot.update(manifest, transport, left)
        except (ValueError, InfrastructureError) as error:
            if manifest.live and not isinstance(error, (WorkerDied, DeadlineExceeded)) and await _whole(slot):
                return None
            raise InfrastructureError(f"{slot.name}: {manifest.version} was not loaded: {error}") from error
        receipt = await self._proved(slot, manifest, receipt, deadline)
        await self._weights.receipt(receipt)
        slot.version = manifest.version
        return receipt

    async def _proved(self, slot: EngineSlot, manifest: Manifest, receipt: Receipt, deadline: float) -> Receipt:
        wanted = slot.capabilities.receipts if self._proof == "auto" else self._proof
        if wanted == "behaviour":
            receipt = await self._ask_canary(slot, manifest, receipt, deadline)
        if (receipt.receiver, receipt.version) != (slot.name, manifest.version):
            raise InfrastructureError(
                f"{slot.name}: its receipt is of {receipt.receiver} for {receipt.version}, want {manifest.version}"
            )
        if LEVELS.index(receipt.level) < LEVELS.index(wanted):
            raise InfrastructureError(f"{slot.name}: {manifest.version} proved at level {receipt.level}, want {wanted}")
        return receipt

    async def _ask_canary(self, slot: EngineSlot, manifest: Manifest, receipt: Receipt, deadline: float) -> Receipt:
        if manifest.canary is None:
            raise InfrastructureError(f"{manifest.version}: published without a canary; weights.proof asks for one")
        began = self._clock.now()
        left = self._left(slot, f"the canary of {manifest.version}", deadline)
        worst = difference(manifest.canary, await slot.ask(manifest.canary, left))
        if not worst <= self._tolerance:
            raise InfrastructureError(
                f"{slot.name}: {manifest.version}: a canary's log-prob differs from the trainer's by {worst:.4g}, at most "
                f"{self._tolerance:g} is allowed (weights.tolerance)"
            )
        seconds = self._clock.now() - began
        times = {**receipt.times, "proof": receipt.times.get("proof", 0.0) + seconds}
        return replace(receipt, level="behaviour", times=times, seconds=receipt.seconds + seconds)

    def _left(self, slot: EngineSlot, what: str, deadline: float) -> float:
        left = deadline - self._clock.now()
        if left <= 0:
            raise DeadlineExceeded(slot.name, f"weights: {what}", self._timeout_s)
        return left

    async def forget(self, slot: EngineSlot) -> None:
        await self._weights.forget(slot.name, slot.version.model)


def difference(canary: Canary, log_probs: Sequence[float]) -> float:
    """The largest one; NaN or a missing token counts as infinite."""
    if len(log_probs) != len(canary.log_probs):
        return float("inf")
    found = [abs(a - b) for a, b in zip(canary.log_probs[1:], log_probs[1:], strict=True)]
    return max((float("inf") if value != value else value for value in found), default=0.0)


async def _whole(slot: EngineSlot) -> bool:
    """Whether the engine still has the version that it proved last."""
    health: Health = await slot.health(HEALTH_S)
    version: Version = health.version
    return health.ok and version == slot.version
