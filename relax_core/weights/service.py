# SPDX-License-Identifier: Apache-2.0
"""The weight service of one process: a `WeightRegistry` behind the `WeightService` protocol, with waiting.

It moves no bytes: transports do, between trainer and receivers. Time is the clock's that was passed in.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.api.component import Chosen
from relax_core.api.role import Clock
from relax_core.api.weights import Manifest, Receipt, Version
from relax_core.rpc.waiting import TimedCondition
from relax_core.weights.registry import Route, WeightRegistry


class LocalWeightService:
    """Implements `relax_core.api.role.WeightService`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._registry = WeightRegistry()
        self._changes = TimedCondition(clock)

    async def announce(self, manifest: Manifest, transport: Chosen) -> None:
        self._registry.announce(manifest, transport)
        self._changes.notify()

    async def handed_out(self, version: Version) -> None:
        """A live version's transfer is over."""
        self._registry.handed_out(version)

    async def wanted(self, model: str) -> tuple[str, ...]:
        """Receivers that want the newest version since the last announcement."""
        return self._registry.wanted(model)

    async def needed(self, model: str) -> frozenset[Version]:
        """Versions whose bytes must stay."""
        return self._registry.needed(model, self._clock.now())

    async def newest(self, model: str, after: Version | None, wait_s: float) -> tuple[Manifest, Chosen] | None:
        """The newest version later than `after`; None after `wait_s`."""
        return await self._changes.wait_for(lambda now: self._registry.newest(model, after), wait_s)

    async def route(
        self,
        model: str,
        have: Version | None,
        wait_s: float,
        after: Version | None = None,
        receiver: str = "",
        within_s: float = 300.0,
    ) -> Route:
        """Versions that lead from `have` to the newest; empty where there are none within `wait_s`."""

        def look(now: float) -> Route | None:
            if self._registry.newest(model, after) is None:
                return None
            return self._registry.route(model, have, receiver, now + within_s) or None

        return await self._changes.wait_for(look, wait_s) or ()

    async def want(self, receiver: str, model: str) -> None:
        """Note a receiver that nothing leads to the newest version."""
        self._registry.want(receiver, model)

    async def receipt(self, receipt: Receipt) -> None:
        """Take a receiver's proof. Raises InfrastructureError where its fingerprint is not the manifest's."""
        self._registry.receipt(receipt)

    async def receivers(self, model: str) -> Mapping[str, Version]:
        """The version that each receiver last proved."""
        return self._registry.receivers(model)

    async def forget(self, receiver: str, model: str) -> None:
        """Drop a receiver that left or is quarantined: its proof no longer counts."""
        self._registry.forget(receiver, model)
