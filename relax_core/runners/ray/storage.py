# SPDX-License-Identifier: Apache-2.0
"""Storage actors own the payloads of the bus: a writer may die, and its rows can still be read.

What comes in lies in Ray's shared memory under its writer's name. A large column is put there once more under the
storage's own, beside its work; from then on a reader gets a reference, and reads in place what was written once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from relax_core.api.batch import Cut, Ragged
from relax_core.bus.store import Blocks, MemoryStore
from relax_core.runners.ray.answer import answered, asked

CALL_S = 120.0
BY_REFERENCE_BYTES = 1 << 20
"""Smaller columns travel within the answer: a reference costs a call of its own."""


@ray.remote(num_cpus=0, max_restarts=0)
class StorageActor:
    """Blocks of columns in one process."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self._owned: dict[tuple[int, str], Any] = {}
        """References to the values of large columns, by block and name."""
        self._owning: dict[int, asyncio.Task[None]] = {}

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        await self._store.put(key, columns)
        large = {name: c.values for name, c in columns.items() if c.size_bytes >= BY_REFERENCE_BYTES}
        if large:
            self._owning[key] = asyncio.create_task(self._own(key, columns, large))

    async def _own(self, key: int, columns: Mapping[str, Ragged], large: Mapping[str, np.ndarray]) -> None:
        """The block holds lengths alone of what is owned: its writer's copy goes."""
        for name, values in large.items():
            self._owned[key, name] = await asyncio.to_thread(ray.put, values)
        light = {n: Ragged(c.values[:0], c.lengths) if n in large else c for n, c in columns.items()}
        await self._store.put(key, {n: Ragged(c.values.copy(), c.lengths) for n, c in light.items()})
        del self._owning[key]

    async def get(self, keys: Sequence[int], columns: Sequence[str], part: Cut | None) -> Any:
        """Blocks, and references to the values that they lack."""
        return await answered(self._get(keys, columns, part))

    async def _get(
        self, keys: Sequence[int], columns: Sequence[str], part: Cut | None
    ) -> tuple[Blocks, Mapping[tuple[int, str], Any]]:
        for key in keys:
            if key in self._owning:
                await self._owning[key]
        if part is None:
            found = await self._store.get(keys, columns)
            return found, {at: self._owned[at] for at in _places(found) if at in self._owned}
        return {key: await self._cut(key, columns, part) for key in keys}, {}

    async def _cut(self, key: int, columns: Sequence[str], part: Cut) -> Mapping[str, Ragged]:
        """Here, so that only the part travels."""
        whole = (await self._store.get([key], columns))[key]
        filled = {n: Ragged(await self._values(key, n, column), column.lengths) for n, column in whole.items()}
        return {name: column.cut(part) for name, column in filled.items()}

    async def _values(self, key: int, name: str, column: Ragged) -> np.ndarray:
        return await self._owned[key, name] if (key, name) in self._owned else column.values

    async def free(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key in self._owning:
                await self._owning[key]
        await self._store.free(keys)
        gone = frozenset(keys)
        self._owned = {at: ref for at, ref in self._owned.items() if at[0] not in gone}


class RemoteStore:
    """`api.bus.PayloadStore` over several storage actors; a block's key says which."""

    shared = True

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = tuple(actors)

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        actor = self._actors[key % len(self._actors)]
        await asked(actor.put.remote(key, columns), "bus storage", "put", CALL_S)

    async def get(self, keys: Sequence[int], columns: Sequence[str], part: Cut | None = None) -> Blocks:
        parts = await asyncio.gather(*(_fetched(a, mine, columns, part) for a, mine in self._by_actor(keys)))
        return {key: block for part_ in parts for key, block in part_.items()}

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


async def _fetched(actor: Any, keys: Sequence[int], columns: Sequence[str], part: Cut | None) -> Blocks:
    """Blocks of one storage, with what it owns in shared memory filled in."""
    blocks, owned = await asked(actor.get.remote(keys, columns, part), "bus storage", "get", CALL_S)
    if not owned:
        return blocks  # type: ignore[no-any-return]
    values = await asked(_all(owned.values()), "bus storage", "get of a large column", CALL_S)
    filled = {key: dict(block) for key, block in blocks.items()}
    for (key, name), found in zip(owned, values, strict=True):
        filled[key][name] = Ragged(found, filled[key][name].lengths)
    return filled


async def _all(references: Iterable[Any]) -> list[Any]:
    return list(await asyncio.gather(*references))


def _places(blocks: Blocks) -> list[tuple[int, str]]:
    return [(key, name) for key, block in blocks.items() for name in block]
