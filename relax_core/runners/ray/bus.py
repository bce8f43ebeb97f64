# SPDX-License-Identifier: Apache-2.0
"""The Ray bus keeps payloads in storage actors; and how a role in another process reaches any bus, through the run's hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from pydantic import PositiveInt

from relax_core.api.batch import AttemptIds, Cut, Ragged, RowBatch, RowId, RowIds
from relax_core.api.bus import Bus, BusComponent, Claim, PayloadStore, Sealed
from relax_core.api.errors import StaleFence
from relax_core.api.options import Options
from relax_core.api.weights import Version
from relax_core.bus.messages import Seals, check_columns, check_cut, check_seals
from relax_core.bus.service import BusService
from relax_core.bus.store import read
from relax_core.runners.ray.connection import RpcClient
from relax_core.runners.ray.storage import RemoteStore


class RayBusOptions(Options):
    """How payloads are kept."""

    storages: PositiveInt = 1
    """Storage actors; more of them share the reading."""


class RayBus(BusComponent[RayBusOptions]):
    """Opened inside the hub; its storage actors belong to the hub, not to any role."""

    async def open_store(self) -> PayloadStore:
        return await RemoteStore.open(self.options.storages)


class BusClient:
    """`api.bus.Bus` for a role in another process: small calls to the hub, payloads straight to a store that is shared.

    Payloads of a store that is not shared go through the hub too, as do all calls that are not written here.
    """

    def __init__(self, hub: RpcClient, store: PayloadStore | None) -> None:
        self._bus, self._store = hub.service(BusService, "bus"), store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def put(self, batch: RowBatch, sealed: Sequence[Sealed], wait_s: float) -> bool:
        if self._store is None:
            return await self._bus.put(batch, sealed, wait_s)
        check_seals(batch.ids, sealed)
        ids, seals, size, names = RowIds(batch.ids), Seals(sealed), batch.size_bytes, tuple(batch.columns)
        key = await self._bus.begin_put(AttemptIds(seal.attempt for seal in seals), len(batch), size, wait_s)
        if key is None:
            return False
        try:
            await self._store.put(key, batch.columns)
        except BaseException:
            await self._bus.cancel_put(key)
            raise
        try:
            await self._bus.end_put(key, ids, names, size, seals)
        except StaleFence:
            await self._store.free([key])
            raise
        return True

    async def read(self, claim: Claim, columns: Sequence[str]) -> RowBatch:
        if self._store is None:
            return await self._bus.read(claim, columns)
        return await read(self._store, claim, await self._bus.locate(_lease(claim), columns), columns)

    async def read_slice(self, claim: Claim, columns: Sequence[str], part: Cut) -> RowBatch:
        if self._store is None:
            return await self._bus.read_slice(claim, columns, part)
        check_cut(part)
        return await read(self._store, claim, await self._bus.locate(_lease(claim), columns), columns, part)

    async def write(self, claim: Claim, columns: Mapping[str, Ragged], version: Version | None = None) -> None:
        if self._store is None:
            await self._bus.write(claim, columns, version)
            return
        check_columns(claim, columns)
        key = await self._bus.begin_write(_lease(claim))
        await self._store.put(key, columns)
        size = sum(column.size_bytes for column in columns.values())
        try:
            await self._bus.end_write(_lease(claim), key, tuple(columns), size, version)
        except StaleFence:
            await self._store.free([key])
            raise

    async def verify(self, claim: Claim) -> None:
        await self._bus.verify(_lease(claim))

    async def acknowledge(self, claim: Claim) -> None:
        await self._bus.acknowledge(_lease(claim))

    async def release(self, claim: Claim) -> None:
        await self._bus.release(_lease(claim))

    async def trained(self, claims: Sequence[Claim], step: int, without_gradient: Sequence[RowId] = ()) -> Version:
        return await self._bus.trained([_lease(claim) for claim in claims], step, RowIds(without_gradient))

    async def kept(self, name: str) -> Mapping[str, Any] | None:
        found = await self._bus.kept(name)
        return None if found is None else json.loads(json.dumps(found))  # lists, which have travelled as tuples

    async def close(self) -> None:
        """The hub closes the bus; a client holds nothing."""


def bus_client(hub: RpcClient, store: PayloadStore | None) -> Bus:
    return cast(Bus, BusClient(hub, store))


def _lease(claim: Claim) -> Claim:
    """The claim without its rows, which the bus knows itself."""
    return replace(claim, rows=(), samples={})
