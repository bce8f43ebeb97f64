# SPDX-License-Identifier: Apache-2.0
"""The Ray bus: metadata and ledger in the run's hub, payloads in storage actors that clients reach directly."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import PositiveInt

from relax_core.api.batch import AttemptId, Ragged, RowBatch, RowId
from relax_core.api.bus import Account, Bus, BusComponent, BusSettings, Claim, ClaimRequest, Issue, Registration, Sealed
from relax_core.api.clock import SystemClock
from relax_core.api.errors import StaleFence
from relax_core.api.options import Options
from relax_core.api.outcome import DropReason
from relax_core.api.version import Version
from relax_core.bus.checks import check_columns
from relax_core.bus.in_process import restored
from relax_core.bus.service import BusService
from relax_core.bus.store import assemble
from relax_core.runners.ray.remote import Remote
from relax_core.runners.ray.storage import RemoteStore, StorageActor


class RayBusOptions(Options):
    """How payloads are kept."""

    storages: PositiveInt = 1
    """Storage actors; more of them share the reading."""


class RayBus(BusComponent[RayBusOptions]):
    """Opened inside the hub; its storage actors belong to the hub, not to any role."""

    async def open(self, settings: BusSettings, directory: str, version: Version) -> Bus:
        queue, _, journal = await asyncio.to_thread(restored, settings, directory, version)
        self.storages = [StorageActor.remote() for _ in range(self.options.storages)]  # type: ignore[attr-defined]
        return BusService(queue, RemoteStore(self.storages), journal, SystemClock())


class BusClient:
    """`api.bus.Bus` for a role in another process: small calls to the hub, payloads straight to their storage."""

    def __init__(self, hub: Remote, store: RemoteStore) -> None:
        self._hub, self._store = hub, store

    async def register(self, role: str) -> Registration:
        return cast(Registration, await self._hub.call("register", role))

    async def admit(self, holder: str, version: Version, limit: int, wait_s: float) -> tuple[Issue, ...]:
        return cast(tuple[Issue, ...], await self._hub.call("admit", holder, version, limit, wait_s))

    async def serves(self, holder: str, version: Version) -> None:
        await self._hub.call("serves", holder, version)

    async def put(self, batch: RowBatch, sealed: Sequence[Sealed], wait_s: float) -> bool:
        size, names = batch.size_bytes, tuple(batch.columns)
        key = await self._hub.call("begin_put", batch.ids, size, sealed, wait_s)
        if key is None:
            return False
        try:
            await self._store.put(key, batch.columns)
        except BaseException:
            await self._hub.call("cancel_put", key)
            raise
        await self._hub.call("end_put", key, batch.ids, names, size, sealed)
        return True

    async def drop(self, attempts: Sequence[AttemptId], reason: DropReason, regenerate: bool = False) -> None:
        await self._hub.call("drop", attempts, reason, regenerate)

    async def claim(self, request: ClaimRequest, wait_s: float) -> Claim | None:
        return cast(Claim | None, await self._hub.call("claim", request, wait_s))

    async def read(self, claim: Claim, columns: Sequence[str]) -> RowBatch:
        places = await self._hub.call("locate", claim, columns)
        keys = dict.fromkeys(key for at in places.values() for key, _ in at)
        return RowBatch(claim.rows, assemble(places, await self._store.get(list(keys), columns)))

    async def write(self, claim: Claim, columns: Mapping[str, Ragged], version: Version | None = None) -> None:
        check_columns(claim, columns)
        key = await self._hub.call("begin_write", claim)
        await self._store.put(key, columns)
        size = sum(column.size_bytes for column in columns.values())
        try:
            await self._hub.call("end_write", claim, key, tuple(columns), size, version)
        except StaleFence:
            await self._store.free([key])
            raise

    async def verify(self, claim: Claim) -> None:
        await self._hub.call("verify", claim)

    async def acknowledge(self, claim: Claim) -> None:
        await self._hub.call("acknowledge", claim)

    async def release(self, claim: Claim) -> None:
        await self._hub.call("release", claim)

    async def trained(self, claims: Sequence[Claim], step: int, without_gradient: Sequence[RowId] = ()) -> Version:
        return cast(Version, await self._hub.call("trained", claims, step, without_gradient))

    async def version(self) -> Version:
        return cast(Version, await self._hub.call("version"))

    async def rollback(self, step: int) -> Version:
        return cast(Version, await self._hub.call("rollback", step))

    async def report_held(self, holder: str, attempts: frozenset[AttemptId], admitted: int) -> frozenset[AttemptId]:
        return cast(frozenset[AttemptId], await self._hub.call("report_held", holder, attempts, admitted))

    async def account(self) -> Account:
        return cast(Account, await self._hub.call("account"))

    async def checkpoint(self, step: int, directory: str) -> None:
        await self._hub.call("checkpoint", step, directory)

    async def statistics(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], await self._hub.call("statistics"))

    async def close(self) -> None:
        """The hub closes the bus; a client holds nothing."""
