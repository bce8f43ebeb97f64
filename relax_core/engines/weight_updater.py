# SPDX-License-Identifier: Apache-2.0
"""Brings engines to the newest weights: asks the weight service for the route, loads along it, hands in the receipts.

An engine has a version only when every proof that the run asks for was accepted; whatever goes wrong on the way is an
`InfrastructureError` about that engine alone, and nothing takes longer than the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from relax_core.api.clock import Clock
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, WorkerDied
from relax_core.api.role import WeightService
from relax_core.api.trainer import Chosen
from relax_core.api.weights import Canary, Manifest, Receipt, ReceiptLevel
from relax_core.engines.slot import EngineSlot

RETRY_S = 5.0
"""Between two requests for a live version that no route leads to."""
HEALTH_S = 30.0
LEVELS: tuple[ReceiptLevel, ...] = ("wire", "resident", "behaviour")


class WeightUpdates(Protocol):
    """Source of the weights of a pool's engines."""

    async def update(self, slot: EngineSlot, manifest: Manifest, transport: Chosen) -> Receipt:
        """Bring an engine to this version or a later one, proved; the last receipt. Raises InfrastructureError."""
        ...

    async def forget(self, slot: EngineSlot) -> None:
        """Forget an engine that failed: what it had is lost."""
        ...


class WeightUpdater:
    """Updates from the weight service of a run. For each version: `route -> load -> prove -> receipt -> slot.version`."""

    def __init__(self, weights: WeightService, clock: Clock, proof: str, tolerance: float, timeout_s: float) -> None:
        self._weights, self._clock = weights, clock
        self._proof, self._tolerance, self._timeout_s = proof, tolerance, timeout_s

    async def update(self, slot: EngineSlot, manifest: Manifest, transport: Chosen) -> Receipt:
        """Go the route that the service names; a live version that is not sent now is wanted until it is again."""
        target, model = manifest.version, manifest.version.model
        deadline = self._clock.now() + self._timeout_s
        while True:
            left = self._time_left(slot, model, deadline)
            route = await self._weights.route(model, slot.version, 0.0, None, slot.name, left)
            if not route:
                await self._weights.want(slot.name, model)
                route = await self._weights.route(model, slot.version, min(left, RETRY_S), None, slot.name, left)
            for link, chosen in route:
                receipt = await self._load(slot, link, chosen, deadline)
                if receipt is None:
                    break
                if receipt.version[1:] >= target[1:]:
                    return receipt

    async def forget(self, slot: EngineSlot) -> None:
        await self._weights.forget(slot.name, slot.version.model)

    async def _load(self, slot: EngineSlot, manifest: Manifest, transport: Chosen, deadline: float) -> Receipt | None:
        """Load and prove one version; None where a live one was missed and the engine is as it was."""
        version = manifest.version
        left = self._time_left(slot, str(version), deadline)
        try:
            receipt = await slot.update(manifest, transport, left)
        except (ValueError, InfrastructureError) as error:
            if manifest.live and not isinstance(error, (WorkerDied, DeadlineExceeded)):
                health = await slot.health(HEALTH_S)
                if health.ok and health.version == slot.version:
                    return None
            raise InfrastructureError(f"{slot.name}: {version} was not loaded: {error}") from error
        wanted = slot.capabilities.receipts if self._proof == "auto" else self._proof
        if wanted == "behaviour":
            receipt = await self._check_canary(slot, manifest, receipt, deadline)
        if (receipt.receiver, receipt.version) != (slot.name, version):
            raise InfrastructureError(
                f"{slot.name}: its receipt is of {receipt.receiver} for {receipt.version}, want {version}"
            )
        if LEVELS.index(receipt.level) < LEVELS.index(wanted):
            raise InfrastructureError(f"{slot.name}: {version} proved at level {receipt.level}, want {wanted}")
        await self._weights.receipt(receipt)
        slot.version = version
        return receipt

    async def _check_canary(self, slot: EngineSlot, manifest: Manifest, receipt: Receipt, deadline: float) -> Receipt:
        """Compare the engine's log-probs of the canary with the trainer's; the receipt of a proved behaviour."""
        canary, began = manifest.canary, self._clock.now()
        if canary is None:
            raise InfrastructureError(f"{manifest.version}: published without a canary; weights.proof asks for one")
        left = self._time_left(slot, f"the canary of {manifest.version}", deadline)
        (log_probs,) = await slot.score([canary.tokens], canary.temperature, left)
        worst = difference(canary, log_probs)
        if not worst <= self._tolerance:
            raise InfrastructureError(
                f"{slot.name}: {manifest.version}: a canary's log-prob differs from the trainer's by {worst:.4g}, at most "
                f"{self._tolerance:g} is allowed (weights.tolerance)"
            )
        seconds = self._clock.now() - began
        times = {**receipt.times, "proof": receipt.times.get("proof", 0.0) + seconds}
        return replace(receipt, level="behaviour", times=times, seconds=receipt.seconds + seconds)

    def _time_left(self, slot: EngineSlot, what: str, deadline: float) -> float:
        left = deadline - self._clock.now()
        if left <= 0:
            raise DeadlineExceeded(slot.name, f"weights: {what}", self._timeout_s)
        return left


def difference(canary: Canary, log_probs: Sequence[float]) -> float:
    """Find the largest difference of a log-prob; NaN or a missing token counts as infinite."""
    if len(log_probs) != len(canary.log_probs):
        return float("inf")
    found = [abs(a - b) for a, b in zip(canary.log_probs[1:], log_probs[1:], strict=True)]
    return max((float("inf") if value != value else value for value in found), default=0.0)
