# SPDX-License-Identifier: Apache-2.0
"""Storage actors own the payloads of the bus: a writer may die, and its rows can still be read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from relax_core.api.batch import Ragged
from relax_core.bus.store import Blocks, MemoryStore
from relax_core.runners.ray.answer import asked

CALL_S = 120.0


@ray.remote(num_cpus=0, max_restarts=0)
class StorageActor:
    """Blocks of columns in one process. Large answers leave it through Ray's shared memory, and are read in place."""

    def __init__(self) -> None:
        self._store = MemoryStore()

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        await self._store.put(key, columns)

    async def get(self, keys: Sequence[int], columns: Sequence[str]) -> Blocks:
        return await self._store.get(keys, columns)

    async def free(self, keys: Sequence[int]) -> None:
        await self._store.free(keys)


class RemoteStore:
    """`bus.store.PayloadStore` over several storage actors; a block's key says which."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = tuple(actors)

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        actor = self._actors[key % len(self._actors)]
        await asked(actor.put.remote(key, columns), "bus storage", "put", CALL_S)

    async def get(self, keys: Sequence[int], columns: Sequence[str]) -> Blocks:
        parts = await asyncio.gather(
            *(asked(a.get.remote(mine, columns), "bus storage", "get", CALL_S) for a, mine in self._by_actor(keys))
        )
        return {key: block for part in parts for key, block in part.items()}

    async def free(self, keys: Sequence[int]) -> None:
        for actor, mine in self._by_actor(keys):
            actor.free.remote(mine)

    async def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def _by_actor(self, keys: Sequence[int]) -> list[tuple[Any, list[int]]]:
        count = len(self._actors)
        parts = [(actor, [key for key in keys if key % count == number]) for number, actor in enumerate(self._actors)]
        return [(actor, mine) for actor, mine in parts if mine]
