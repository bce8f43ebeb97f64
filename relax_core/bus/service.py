# SPDX-License-Identifier: Apache-2.0
"""The bus as a service: the queue's state machine with waiting, durability and payloads around it.

The service has one event loop and one writer thread, and no process-local state beyond its arguments, so any process
may host it. A client that can reach the payload store has a `RowAccess` of its own; the service then handles no payload.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relax_core.api.batch import AttemptId, Ragged, RowBatch, RowId
from relax_core.api.bus import (
    Account,
    BusComponent,
    BusSettings,
    BusStatistics,
    Claim,
    ClaimRequest,
    Issue,
    PayloadStore,
    Sealed,
)
from relax_core.api.errors import StaleFence
from relax_core.api.role import Clock, SystemClock
from relax_core.api.trajectory import DropReason
from relax_core.api.weights import Version
from relax_core.bus.journal import LedgerJournal, NoteRecord
from relax_core.bus.queue import TransferQueue
from relax_core.bus.store import Place, assemble, check_columns, check_seals
from relax_core.rpc.waiting import TimedCondition


async def open_bus(
    component: BusComponent, settings: BusSettings, directory: str, version: Version, clock: Clock | None = None,
    epoch: int = 0,
) -> BusService:  # fmt: skip
    """Open the bus of a run in this process; a ledger in the directory continues from the restored `version`.

    `epoch` is the number of this start of the run, as for `LedgerJournal`.
    """
    journal = await asyncio.to_thread(LedgerJournal, directory, epoch)
    try:
        remembered = await asyncio.to_thread(journal.remember, version)
        queue = TransferQueue(settings, version, remembered)
        store = await component.open_store()
    except BaseException:
        journal.close()
        raise
    return BusService(queue, store, journal, clock or SystemClock(), dict(remembered.notes))


class RowAccess:
    """The calls of `api.bus.Bus` that move payloads: the service, perhaps of another process, gets only the metadata.

    A put or write stores its block between `begin_...` and `end_...`. A block that the bus no longer expects is freed.
    """

    def __init__(self, service: BusService, store: PayloadStore) -> None:
        self._service, self._store = service, store

    async def put(self, batch: RowBatch, sealed: Sequence[Sealed], wait_s: float) -> bool:
        check_seals(batch.ids, sealed)
        size = batch.size_bytes
        key = await self._service.begin_put(tuple(seal.attempt for seal in sealed), len(batch), size, wait_s)
        if key is None:
            return False
        try:
            await self._store.put(key, batch.columns)
        except BaseException:
            await self._service.cancel_put(key)
            raise
        try:
            await self._service.end_put(key, batch.ids, tuple(batch.columns), size, tuple(sealed))
        except StaleFence:
            await self._store.free([key])
            raise
        return True

    async def read(self, claim: Claim, columns: Sequence[str]) -> RowBatch:
        places = await self._service.locate(claim, columns)
        keys = list(dict.fromkeys(key for at in places.values() for key, _ in at))
        return RowBatch(claim.rows, assemble(places, await self._store.get(keys, columns)))

    async def write(self, claim: Claim, columns: Mapping[str, Ragged], version: Version | None = None) -> None:
        check_columns(claim, columns)
        size = sum(column.size_bytes for column in columns.values())
        key = await self._service.begin_write(claim)
        await self._store.put(key, columns)
        try:
            await self._service.end_write(claim, key, tuple(columns), size, version)
        except StaleFence:
            await self._store.free([key])
            raise


class BusService:
    """The implementation of `api.bus.Bus`.

    Invariants:
    - A call that promises something durable (`register`, `admit`, `trained`, `rollback`, `checkpoint`) returns after
      its records are on disk; records reach the disk in order.
    - A waiting call tries again after every change and every expiry, until its own deadline.
    - A waiting call is granted nothing once its role has registered again, because its caller is gone. The registration
      takes back earlier grants, including those whose answer was lost.
    """

    def __init__(
        self,
        queue: TransferQueue,
        store: PayloadStore,
        journal: LedgerJournal,
        clock: Clock,
        kept: Mapping[str, str] = {},
    ) -> None:
        self.queue, self.store = queue, store
        rows = RowAccess(self, store)
        self.put, self.read, self.write = rows.put, rows.read, rows.write
        self._kept = dict(kept)
        self._journal, self._clock = journal, clock
        self._writer = ThreadPoolExecutor(1, "relax-ledger")
        self._committing = asyncio.Lock()
        """Held during a commit, so that records reach the disk in order, and one commit serves all waiting callers."""
        self._changes = TimedCondition(clock, queue.next_expiry)
        self._serving: dict[str, Version] = {}
        self._closed = False

    # -- roles and admission --------------------------------------------------------------------------------------

    async def register(self, role: str) -> int:
        registration = self.queue.register(role, self._clock.now())
        await self._changed()
        await self._durable()
        return registration

    async def admit(self, holder: str, version: Version, limit: int, wait_s: float) -> tuple[Issue, ...]:
        self._serving[holder] = version
        registration = self.queue.registration(holder)

        def attempt(now: float) -> tuple[Issue, ...] | None:
            if self.queue.registration(holder) != registration:
                return None
            return self.queue.admit(holder, self._serving[holder], limit) or None

        issues = await self._changes.wait_for(attempt, wait_s)
        if issues is None:
            return ()
        try:
            await self._durable()
        except BaseException:  # the caller never receives these issues
            self.queue.withdraw(issues)
            raise
        return issues

    async def serves(self, holder: str, version: Version) -> None:
        self._serving[holder] = version
        self._changes.notify()

    def pause(self) -> None:
        """Stop admitting groups; groups that were admitted continue."""
        self.queue.paused = True

    def resume(self) -> None:
        self.queue.paused = False
        self._changes.notify()

    async def report_held(
        self,
        holder: str,
        attempts: frozenset[AttemptId],
        admitted: int,
        given_up: Mapping[AttemptId, int] | None = None,
    ) -> frozenset[AttemptId]:
        return self.queue.report_held(holder, attempts, admitted, given_up)

    # -- rows -----------------------------------------------------------------------------------------------------

    async def begin_put(self, attempts: Sequence[AttemptId], rows: int, size_bytes: int, wait_s: float) -> int | None:
        """Reserve credit for a put; return the key under which to store the payloads, or None after `wait_s`."""
        return await self._changes.wait_for(lambda now: self.queue.reserve(attempts, rows, size_bytes, now), wait_s)

    async def end_put(
        self, key: int, ids: Sequence[RowId], columns: Sequence[str], size_bytes: int, sealed: Sequence[Sealed]
    ) -> None:
        """Accept the rows of a put whose payloads are stored."""
        self.queue.check_reserved(key)
        self.queue.put(key, ids, columns, size_bytes, sealed)
        await self._changed()

    async def cancel_put(self, key: int) -> None:
        """Give back the credit of payloads that could not be stored."""
        self.queue.credits.unreserve(key)
        self._changes.notify()

    async def drop(self, attempts: Sequence[AttemptId], reason: DropReason, regenerate: bool = False) -> None:
        self.queue.drop(attempts, reason, regenerate)
        await self._changed()

    # -- claims ---------------------------------------------------------------------------------------------------

    async def claim(self, request: ClaimRequest, wait_s: float) -> Claim | None:
        registration = self.queue.registration(request.task)

        def attempt(now: float) -> Claim | None:
            return self.queue.claim(request, now) if self.queue.registration(request.task) == registration else None

        claim = await self._changes.wait_for(attempt, wait_s)
        if claim is not None and request.trains:
            await self._changed()
        return claim

    async def end_awaited(self, step: int) -> tuple[int, ...]:
        ended = self.queue.end_awaited(step)
        await self._changed()
        return ended

    async def locate(self, claim: Claim, columns: Sequence[str]) -> Mapping[str, Sequence[Place]]:
        """Return the block key and index of every claimed row, by column, for `assemble`."""
        return self.queue.locate(claim, columns, self._clock.now())

    async def begin_write(self, claim: Claim) -> int:
        """Return the key under which to store derived columns. Raises StaleFence if the claim's lease has ended."""
        return self.queue.begin_write(claim, self._clock.now())

    async def end_write(
        self, claim: Claim, key: int, columns: Sequence[str], size_bytes: int, version: Version | None
    ) -> None:
        """Accept derived columns that are stored, so that tasks that need these columns can claim the rows."""
        self.queue.check_reserved(key)
        self.queue.write(claim, key, columns, size_bytes, version, self._clock.now())
        await self._changed()

    async def verify(self, claim: Claim) -> None:
        self.queue.leases.check(claim, self._clock.now())

    async def acknowledge(self, claim: Claim) -> None:
        self.queue.acknowledge(claim, self._clock.now())

    async def release(self, claim: Claim) -> None:
        self.queue.release(claim)
        await self._changed()

    # -- training and lineage -------------------------------------------------------------------------------------

    async def trained(self, claims: Sequence[Claim], step: int, without_gradient: Sequence[RowId] = ()) -> Version:
        version = self.queue.trained(claims, step, without_gradient, self._clock.now())
        await self._changed()
        await self._durable()
        return version

    async def version(self) -> Version:
        return self.queue.version

    async def rollback(self, step: int) -> Version:
        """Undo the steps after version `step`, at which the trainer was restored, and begin a new incarnation."""
        version = self.queue.rollback(step, self.queue.version.incarnation + 1)
        await self._changed()
        await self._durable()
        return version

    async def abandoned(self, version: Version) -> bool:
        return not self.queue.lineage.has(version.incarnation, version.step)

    async def account(self) -> Account:
        return self.queue.account()

    async def checkpoint(self, step: int, directory: str, final: bool = True) -> None:
        self.queue.cover(step)
        await self._durable()
        async with self._committing:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._journal.copy, directory)
        if final:
            await self.finalize(step)

    async def finalize(self, step: int) -> None:
        self.queue.finalize(step)
        await self._changed()

    async def keep(self, name: str, value: Mapping[str, Any]) -> None:
        self._kept[name] = text = json.dumps(value)
        self._journal.add([NoteRecord(name, self.queue.version.step, text)])

    async def kept(self, name: str) -> Mapping[str, Any] | None:
        return json.loads(self._kept[name]) if name in self._kept else None

    async def statistics(self) -> BusStatistics:
        return self.queue.statistics()

    async def close(self) -> None:
        """Commit the remaining records, and end waiting calls with an empty answer."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._durable()
        finally:
            self._changes.close()
            self._writer.shutdown()
            self._journal.close()
            await self.store.close()

    # -- changes and durability -----------------------------------------------------------------------------------

    async def _changed(self) -> None:
        """Wake the waiting calls, and free unneeded payloads."""
        self._changes.notify()
        if freed := self.queue.take_freed():
            await self.store.free(freed)

    async def _durable(self) -> None:
        """Commit all records so far; concurrent callers share a commit."""
        async with self._committing:
            self._journal.add(self.queue.take_records())
            if self._journal.behind:
                await asyncio.get_running_loop().run_in_executor(self._writer, self._journal.commit)
