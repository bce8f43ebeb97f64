# SPDX-License-Identifier: Apache-2.0
"""The weight service of one process: `Versions` behind the `WeightService` protocol, with waiting.

It moves no bytes: transports do, between trainer and receivers. Time is the clock's that was passed in.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.api.clock import Clock
from relax_core.api.trainer import Chosen
from relax_core.api.weights import Manifest, Receipt, Version
from relax_core.rpc.waiting import TimedCondition
from relax_core.weights.registry import Route, Versions


class LocalWeightService:
    """Implements `relax_core.api.role.WeightService`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._versions = Versions()
        self._changes = TimedCondition(clock)

    async def announce(self, manifest: Manifest, transport: Chosen) -> None:
        self._versions.announce(manifest, transport)
        self._changes.notify()

    async def handed_out(self, version: Version) -> None:
        """A live version's transfer is over."""
        self._versions.handed_out(version)

    async def wanted(self, model: str) -> tuple[str, ...]:
        """Receivers at the door since the last announcement."""
        return self._versions.wanted(model)

    async def needed(self, model: str) -> frozenset[Version]:
        """Versions whose bytes must stay."""
        return self._versions.needed(model, self._clock.now())

    async def newest(self, model: str, after: Version | None, wait_s: float) -> tuple[Manifest, Chosen] | None:
        """The newest version later than `after`; None after `wait_s`."""
        return await self._changes.wait_for(lambda now: self._versions.newest(model, after), wait_s)

    async def route(
        self,
        model: str,
        have: Version | None,
        wait_s: float,
        after: Version | None = None,
        receiver: str = "",
        within_s: float = 300.0,
    ) -> Route:
        """What leads from `have` to the newest version; empty where there is none within `wait_s`."""

        def look(now: float) -> Route | None:
            if self._versions.newest(model, after) is None:
                return None
            return self._versions.route(model, have, receiver, now + within_s) or None

        return await self._changes.wait_for(look, wait_s) or ()

    async def want(self, receiver: str, model: str) -> None:
        """A receiver that nothing leads to the newest version."""
        self._versions.want(receiver, model)

    async def receipt(self, receipt: Receipt) -> None:
        """A receiver's proof. Raises InfrastructureError where its fingerprint is not the manifest's."""
        self._versions.receipt(receipt)

    async def receivers(self, model: str) -> Mapping[str, Version]:
        """What each receiver last proved."""
        return self._versions.receivers(model)

    async def forget(self, receiver: str, model: str) -> None:
        """A receiver left or is quarantined: its proof no longer counts."""
        self._versions.forget(receiver, model)
