# SPDX-License-Identifier: Apache-2.0
"""The weight service of one process: `Versions` behind the `WeightService` protocol, with waiting.

It moves no bytes: transports do, between trainer and receivers. Time is the clock's that was passed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from relax_core.api.clock import Clock
from relax_core.api.trainer import Chosen
from relax_core.api.version import Version
from relax_core.api.weights import Manifest, Receipt
from relax_core.weights.versions import Versions


class WeightBoard:
    """Implements `relax_core.api.role.WeightService`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._versions = Versions()
        self._changed = asyncio.Event()

    async def announce(self, manifest: Manifest, transport: Chosen) -> None:
        self._versions.announce(manifest, transport)
        self._changed.set()
        self._changed = asyncio.Event()

    async def newest(self, model: str, after: Version | None, wait_s: float) -> tuple[Manifest, Chosen] | None:
        """The newest version later than `after`; None after `wait_s`."""
        deadline = self._clock.now() + wait_s
        while (found := self._versions.newest(model, after)) is None:
            left = deadline - self._clock.now()
            if left <= 0:
                return None
            await self._wait_for_change(left)
        return found

    async def _wait_for_change(self, seconds: float) -> None:
        changed = asyncio.ensure_future(self._changed.wait())
        late = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({changed, late}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
            late.cancel()
            await asyncio.gather(changed, late, return_exceptions=True)

    async def receipt(self, receipt: Receipt) -> None:
        """A receiver's proof. Raises InfrastructureError where its fingerprint is not the manifest's."""
        self._versions.receipt(receipt)

    async def receivers(self, model: str) -> Mapping[str, Version]:
        """What each receiver last proved."""
        return self._versions.receivers(model)

    async def forget(self, receiver: str, model: str) -> None:
        """A receiver left or is quarantined: its proof no longer counts."""
        self._versions.forget(receiver, model)
