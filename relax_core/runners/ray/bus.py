# SPDX-License-Identifier: Apache-2.0
"""The Ray bus keeps payloads in storage actors; and how a role in another process reaches any bus, through the run's hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from pydantic import PositiveInt

from relax_core.api.batch import AttemptId, AttemptIds, Cut, Ragged, RowBatch, RowId, RowIds
from relax_core.api.bus import Account, BusComponent, Claim, ClaimRequest, Issue, PayloadStore, Registration, Sealed
from relax_core.api.errors import StaleFence
from relax_core.api.options import Options
from relax_core.api.trajectory import DropReason
from relax_core.api.weights import Version
from relax_core.bus.messages import Seals, check_columns, check_cut, check_seals
from relax_core.bus.store import read
from relax_core.runners.ray.remote import RemoteService
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

    Those of a store that is not go through the hub too.
    """

    def __init__(self, hub: RemoteService, store: PayloadStore | None) -> None:
        self._hub, self._store = hub, store

    async def register(self, role: str) -> Registration:
        return cast(Registration, await self._hub.call("register", role))

    async def admit(self, holder: str, version: Version, limit: int, wait_s: float) -> tuple[Issue, ...]:
        return cast(tuple[Issue, ...], await self._hub.call("admit", holder, version, limit, wait_s))

    async def serves(self, holder: str, version: Version) -> None:
        await self._hub.call("serves", holder, version)

    async def put(self, batch: RowBatch, sealed: Sequence[Sealed], wait_s: float) -> bool:
        if self._store is None:
            return cast(bool, await self._hub.call("put", batch, sealed, wait_s))
        check_seals(batch.ids, sealed)
        ids, seals, size, names = RowIds(batch.ids), Seals(sealed), batch.size_bytes, tuple(batch.columns)
        attempts = AttemptIds(seal.attempt for seal in seals)
        key = await self._hub.call("begin_put", attempts, len(batch), size, wait_s)
        if key is None:
            return False
        try:
            await self._store.put(key, batch.columns)
        except BaseException:
            await self._hub.call("cancel_put", key)
            raise
        try:
            await self._hub.call("end_put", key, ids, names, size, seals)
        except StaleFence:
            await self._store.free([key])
            raise
        return True

    async def drop(self, attempts: Sequence[AttemptId], reason: DropReason, regenerate: bool = False) -> None:
        await self._hub.call("drop", attempts, reason, regenerate)

    async def claim(self, request: ClaimRequest, wait_s: float) -> Claim | None:
        return cast(Claim | None, await self._hub.call("claim", request, wait_s))

    async def let_go(self, step: int) -> tuple[int, ...]:
        return cast(tuple[int, ...], await self._hub.call("let_go", step))

    async def read(self, claim: Claim, columns: Sequence[str]) -> RowBatch:
        if self._store is None:
            return cast(RowBatch, await self._hub.call("read", claim, columns))
        return await read(self._store, claim, await self._hub.call("locate", _ticket(claim), columns), columns)

    async def read_slice(self, claim: Claim, columns: Sequence[str], part: Cut) -> RowBatch:
        if self._store is None:
            return cast(RowBatch, await self._hub.call("read_slice", claim, columns, part))
        check_cut(part)
        return await read(self._store, claim, await self._hub.call("locate", _ticket(claim), columns), columns, part)

    async def write(self, claim: Claim, columns: Mapping[str, Ragged], version: Version | None = None) -> None:
        if self._store is None:
            await self._hub.call("write", claim, columns, version)
            return
        check_columns(claim, columns)
        key = await self._hub.call("begin_write", _ticket(claim))
        await self._store.put(key, columns)
        size = sum(column.size_bytes for column in columns.values())
        try:
            await self._hub.call("end_write", _ticket(claim), key, tuple(columns), size, version)
        except StaleFence:
            await self._store.free([key])
            raise

    async def verify(self, claim: Claim) -> None:
        await self._hub.call("verify", _ticket(claim))

    async def acknowledge(self, claim: Claim) -> None:
        await self._hub.call("acknowledge", _ticket(claim))

    async def release(self, claim: Claim) -> None:
        await self._hub.call("release", _ticket(claim))

    async def trained(self, claims: Sequence[Claim], step: int, without_gradient: Sequence[RowId] = ()) -> Version:
        skipped = RowIds(without_gradient)
        return cast(Version, await self._hub.call("trained", list(map(_ticket, claims)), step, skipped))

    async def version(self) -> Version:
        return cast(Version, await self._hub.call("version"))

    async def rollback(self, step: int) -> Version:
        return cast(Version, await self._hub.call("rollback", step))

    async def report_held(
        self,
        holder: str,
        attempts: frozenset[AttemptId],
        admitted: int,
        given_up: Mapping[AttemptId, int] | None = None,
    ) -> frozenset[AttemptId]:
        return cast(frozenset[AttemptId], await self._hub.call("report_held", holder, attempts, admitted, given_up))

    async def account(self) -> Account:
        return cast(Account, await self._hub.call("account"))

    async def checkpoint(self, step: int, directory: str, final: bool = True) -> None:
        await self._hub.call("checkpoint", step, directory, final)

    async def finalize(self, step: int) -> None:
        await self._hub.call("finalize", step)

    async def keep(self, name: str, value: Mapping[str, Any]) -> None:
        await self._hub.call("keep", name, value)

    async def kept(self, name: str) -> Mapping[str, Any] | None:
        return cast(Mapping[str, Any] | None, await self._hub.call("kept", name))

    async def statistics(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], await self._hub.call("statistics"))

    async def close(self) -> None:
        """The hub closes the bus; a client holds nothing."""


def _ticket(claim: Claim) -> Claim:
    """What the bus knows a lease by; its rows it knows itself."""
    return replace(claim, rows=(), samples={})
