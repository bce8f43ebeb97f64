# SPDX-License-Identifier: Apache-2.0
"""The Ray bus, whose payloads are owned by storage actors, and a role's access to the bus through the hub.

Rows stay readable when their writer dies. On a storage's machine, a writer writes a block as a file into the storage's
memory-backed folder and then tells the storage its key; readers there map the file without a call. From a different
machine, or if the folder has no room, blocks are sent through Ray. Ray frees a writer's objects when the writer dies,
so the storage puts large columns into Ray's shared memory again, as their owner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import ray
from pydantic import PositiveInt

from relax_core.api.batch import Ragged
from relax_core.api.bus import Bus, BusComponent, Claim, PayloadStore
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, WorkerDied
from relax_core.api.options import Options
from relax_core.bus.service import BusService, RowAccess
from relax_core.bus.store import Blocks, MemoryStore
from relax_core.rpc.connection import proxy
from relax_core.runners.ray.block_folder import BlockFolder, new_folder_name
from relax_core.runners.ray.connection import CALL_S, RpcActor, RpcClient, answered, asked

CLOSE_S = 5.0
BESIDE_BYTES = 1 << 20
"""Blocks of at least this size are written in a thread, off the event loop."""
BY_REFERENCE_BYTES = 1 << 20
"""Columns of at least this size are returned as Ray references. Smaller ones are sent within the answer."""
STORAGE_RESTARTS = 20
"""Deaths of one storage that Ray answers by starting a new process. One more death fails the run."""


class RayBusOptions(Options):
    """Options of the Ray bus."""

    storages: PositiveInt = 1
    """Number of storage actors; several share the load of reading."""


class RayBus(BusComponent[RayBusOptions]):
    """The bus with payloads in storage actors. The hub opens it, so the actors end with the hub and not with a role."""

    async def open_store(self) -> PayloadStore:
        return await RemoteStore.open(self.options.storages)


def reach_bus(hub: RpcClient, store: PayloadStore | None) -> Bus:
    """Return a role's access to the hub's bus: small calls go to the hub, payloads directly to the store.

    `store`: the bus's store; None if other processes can't reach the store, so that payloads go through the hub.
    """

    async def call(method: str, args: Sequence[Any]) -> Any:
        if method not in ("read", "write"):
            args = [_without_rows(arg) for arg in args]
        return await hub.call(f"bus.{method}", args)

    return proxy(Bus, call, None if store is None else RowAccess(proxy(BusService, call), store))


def _without_rows(arg: Any) -> Any:
    """Remove rows and samples from claims, because the hub has them."""
    if isinstance(arg, Claim):
        return replace(arg, rows=(), samples={})
    return list(map(_without_rows, arg)) if isinstance(arg, list | tuple) and Claim in map(type, arg) else arg


@ray.remote(num_cpus=0, max_restarts=STORAGE_RESTARTS, max_task_retries=-1)
class StorageActor(RpcActor):
    """A process that keeps blocks of columns. If it dies, Ray restarts it and repeats the unanswered Ray calls.

    Invariants:
    - Every call is safe to repeat: a call puts a whole block, under a key that is used only once.
    - The folder outlives the process: the next process has every block that is a file there. Blocks in memory are lost.
    """

    def __init__(self, folder_name: str) -> None:
        self._store = MemoryStore()
        self._owned: dict[tuple[int, str], Any] = {}
        """Ray references to the values of large columns, by block key and column name."""
        self._owning: dict[int, asyncio.Task[None]] = {}
        self._folder = BlockFolder.make(folder_name)
        self._files = set(self._folder.keys()) if self._folder is not None else set[int]()
        super().__init__()

    async def folder(self) -> BlockFolder | None:
        """Return the folder that processes on this machine may write to; None without memory-backed storage."""
        return self._folder

    async def address(self) -> str:
        await self._server.open()
        return self._server.address

    async def _serve(self, method: str, args: Sequence[Any]) -> Any:
        """Take over a block's file that a writer has put into the folder. This is the only call over the socket."""
        (key,) = args
        if self._folder is None or not self._folder.has(key):
            raise InfrastructureError(f"bus storage: got block {key} without its file; put the block again")
        self._files.add(key)

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        await self._store.put(key, columns)
        large = {name: c.values for name, c in columns.items() if c.size_bytes >= BY_REFERENCE_BYTES}
        if large:
            self._owning[key] = asyncio.create_task(self._own(key, columns, large))

    async def _own(self, key: int, columns: Mapping[str, Ragged], large: Mapping[str, np.ndarray]) -> None:
        """Put large values into Ray's shared memory as their owner; the block keeps only their lengths."""
        for name, values in large.items():
            self._owned[key, name] = await asyncio.to_thread(ray.put, values)
        light = {n: Ragged(c.values[:0], c.lengths) if n in large else c for n, c in columns.items()}
        await self._store.put(key, {n: Ragged(c.values.copy(), c.lengths) for n, c in light.items()})
        del self._owning[key]

    async def get(self, keys: Sequence[int], columns: Sequence[str]) -> Any:
        """Return blocks without their large values, and Ray references to these values."""
        return await answered(self._get(keys, columns))

    async def _get(self, keys: Sequence[int], columns: Sequence[str]) -> tuple[Blocks, Mapping[tuple[int, str], Any]]:
        files = {key: self._filed(key, columns) for key in keys if key in self._files}
        kept = [key for key in keys if key not in files]
        await self._settled(kept)
        if lost := [key for key in kept if key not in self._store]:
            raise InfrastructureError(f"bus storage: blocks {lost} were lost with the process that held them")
        found = await self._store.get(kept, columns)
        places = [(key, name) for key, block in found.items() for name in block]
        return {**files, **found}, {at: self._owned[at] for at in places if at in self._owned}

    def _filed(self, key: int, columns: Sequence[str]) -> Mapping[str, Ragged]:
        found = None if self._folder is None else self._folder.read(key, columns)
        if found is None:
            raise InfrastructureError(f"bus storage: the file of block {key} is gone; its rows are lost")
        return found

    async def free(self, keys: Sequence[int]) -> None:
        if self._folder is not None:
            self._folder.free(keys)
            self._files.difference_update(keys)
        await self._settled(keys)
        await self._store.free(keys)
        gone = frozenset(keys)
        self._owned = {at: ref for at, ref in self._owned.items() if at[0] not in gone}

    async def _settled(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key in self._owning:
                await self._owning[key]

    async def close(self) -> None:
        if self._folder is not None:
            await asyncio.to_thread(self._folder.remove)


class RemoteStore:
    """`api.bus.PayloadStore` over several storage actors; a block's key determines its actor."""

    shared = True

    def __init__(self, actors: Sequence[Any], folders: Sequence[BlockFolder | None]) -> None:
        self._actors, self._folders = tuple(actors), tuple(folders)
        self._clients = [RpcClient(actor, "bus storage") for actor in actors]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle actors and folders without connections: each process opens its own connections."""
        return RemoteStore, (self._actors, self._folders)

    @classmethod
    async def open(cls, count: int) -> Self:
        actors = [StorageActor.remote(new_folder_name()) for _ in range(count)]  # type: ignore[attr-defined]
        return cls(actors, [await asked(actor.folder.remote(), "bus storage", "open", CALL_S) for actor in actors])

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        try:
            if not (await self._written(key, columns) and await self._handed_over(key)):
                actor = self._actors[key % len(self._actors)]
                await asked(actor.put.remote(key, columns), "bus storage", "put", CALL_S)
        except BaseException:
            await self.free([key])
            raise

    async def _handed_over(self, key: int) -> bool:
        """Hand a written file over to its storage; return False if the storage died or restarted on another machine."""
        try:
            await self._clients[key % len(self._actors)].call("put", (key,))
        except DeadlineExceeded:
            raise
        except InfrastructureError:
            return False
        return True

    async def _written(self, key: int, columns: Mapping[str, Ragged]) -> bool:
        """Write a block into its storage's folder; return False if the folder is not on this machine or has no room."""
        folder = self._folder(key)
        if folder is None or not folder.here:
            return False
        if sum(column.size_bytes for column in columns.values()) < BESIDE_BYTES:
            return folder.write(key, columns)
        writing = asyncio.ensure_future(asyncio.to_thread(folder.write, key, columns))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(lambda _: folder.free([key]))
            raise

    async def get(self, keys: Sequence[int], columns: Sequence[str]) -> Blocks:
        found: dict[int, Mapping[str, Ragged]] = {}
        for key in keys:  # blocks with a file on this machine are mapped
            folder = self._folder(key)
            if folder is not None and (block := folder.read(key, columns)) is not None:
                found[key] = block
        left = self._by_actor([key for key in keys if key not in found])
        for blocks in await asyncio.gather(*(_fetched(actor, mine, columns) for actor, mine in left)):
            found.update(blocks)
        return found

    async def free(self, keys: Sequence[int]) -> None:
        for actor, mine in self._by_actor(keys):
            actor.free.remote(mine)

    async def close(self) -> None:
        await self.disconnect()
        for actor in self._actors:
            with contextlib.suppress(WorkerDied, DeadlineExceeded):
                await asked(actor.close.remote(), "bus storage", "close", CLOSE_S)
            ray.kill(actor)
        self.sweep()

    async def disconnect(self) -> None:
        """Close this process's connections to the storages."""
        await asyncio.gather(*(client.close() for client in self._clients))

    def sweep(self) -> None:
        """Remove the folders of the storages on this machine."""
        for folder in self._folders:
            if folder is not None:
                folder.remove()

    def _folder(self, key: int) -> BlockFolder | None:
        return self._folders[key % len(self._folders)]

    def _by_actor(self, keys: Sequence[int]) -> list[tuple[Any, list[int]]]:
        count = len(self._actors)
        parts = [(actor, [key for key in keys if key % count == number]) for number, actor in enumerate(self._actors)]
        return [(actor, mine) for actor, mine in parts if mine]


async def _fetched(actor: Any, keys: Sequence[int], columns: Sequence[str]) -> Blocks:
    """Fetch blocks of one storage, and fill in the large columns from Ray's shared memory."""
    blocks, owned = await asked(actor.get.remote(keys, columns), "bus storage", "get", CALL_S)
    if not owned:
        return blocks  # type: ignore[no-any-return]
    values = await asked(asyncio.gather(*owned.values()), "bus storage", "get of a large column", CALL_S)
    filled = {key: dict(block) for key, block in blocks.items()}
    for (key, name), found in zip(owned, values, strict=True):
        filled[key][name] = Ragged(found, filled[key][name].lengths)
    return filled
