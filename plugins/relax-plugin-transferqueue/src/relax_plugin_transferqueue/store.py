# SPDX-License-Identifier: Apache-2.0
"""Payloads in TransferQueue, one sample of one partition a block. Its key-value calls alone: what is ready, who has
claimed what, and how much there may be, the bus says.

Every call has a deadline, and while it takes long its servers are looked at: a dead one is an error at once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from relax_core.api.batch import Cut, Ragged
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, RelaxError
from relax_plugin_transferqueue import package

T = TypeVar("T")
LOOK_S = 1.0
"""How long a call may take before its servers are looked at, again and again."""
FIX = "`relax resume` the run"


class Servers(Protocol):
    """Addresses of the package's servers."""

    shared: bool
    controller: dict[str, Any]
    units: list[dict[str, Any]]

    async def dead(self) -> str: ...

    async def close(self) -> None: ...


class TransferQueueStore:
    """`api.PayloadStore`. A copy in another process connects at its first call."""

    def __init__(self, servers: Servers, timeout_s: float, partition: str = "") -> None:
        self.shared = servers.shared
        self._servers, self._timeout_s = servers, timeout_s
        self._partition = partition or f"relax-{uuid.uuid4().hex}"
        self._connecting: asyncio.Task[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TransferQueueStore, (self._servers, self._timeout_s, self._partition)

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        await self._within(self._put(key, columns), f"put of block {key}")

    async def get(
        self, keys: Sequence[int], columns: Sequence[str], part: Cut | None = None
    ) -> Mapping[int, Mapping[str, Ragged]]:
        """The package sends columns whole; a part is cut here."""
        found = await self._within(self._get(keys, frozenset(columns)), f"get of {len(keys)} blocks") if keys else {}
        if part is None:
            return found
        return {key: {name: column.cut(part) for name, column in block.items()} for key, block in found.items()}

    async def free(self, keys: Sequence[int]) -> None:
        if keys:
            await self._within(self._free(keys), f"free of {len(keys)} blocks")

    async def close(self) -> None:
        if self._connecting is not None and not self._connecting.cancelled():
            client = await self._connecting
            await asyncio.to_thread(client.close)
        await self._servers.close()

    # -- what it asks of the package ------------------------------------------------------------------------------

    async def _put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        from relax_plugin_transferqueue.blocks import packed

        client = await self._client()
        fields, tag = packed(columns)
        meta = await self._meta(client, [key], create=True)
        meta.update_custom_meta([tag])
        if fields.keys():
            await client.async_put(fields, meta)
        else:
            await client.async_set_custom_meta(meta)

    async def _get(self, keys: Sequence[int], columns: frozenset[str]) -> dict[int, dict[str, Ragged]]:
        from relax_plugin_transferqueue.blocks import unpacked

        client = await self._client()
        meta = await self._meta(client, keys)
        if meta.size != len(keys):
            raise InfrastructureError(f"bus transferqueue: got {meta.size} of {len(keys)} blocks; {FIX}")
        tags = {key: tag["columns"] for key, tag in zip(keys, meta.get_all_custom_meta(), strict=True)}
        found: dict[int, dict[str, Ragged]] = {}
        alike: dict[tuple[str, ...], list[int]] = {}
        for key, tag in tags.items():
            wanted = columns & tag.keys()
            filled = tuple(sorted(name for name in wanted if 0 not in tag[name][1]))
            found[key] = {name: unpacked(tag[name], None) for name in wanted.difference(filled)}
            alike.setdefault(filled, []).append(key)
        for names, some in alike.items():
            raw = await self._fields(client, some, names)
            for name in names:
                for key, one in zip(some, raw[name].unbind(), strict=True):
                    found[key][name] = unpacked(tags[key][name], one)
        return found

    async def _fields(self, client: Any, keys: Sequence[int], names: Sequence[str]) -> Any:
        """Fetch fields of blocks that have all of these; the package tells only fields that all of its samples have."""
        if not names:
            return {}
        meta = await self._meta(client, keys)
        return await client.async_get_data(meta.select_fields(list(names)))

    async def _free(self, keys: Sequence[int]) -> None:
        client = await self._client()
        meta = await self._meta(client, keys)
        if meta.size:
            await client.async_clear_samples(meta)

    async def _meta(self, client: Any, keys: Sequence[int], create: bool = False) -> Any:
        return await client.async_kv_retrieve_meta([str(key) for key in keys], self._partition, create=create)

    async def _client(self) -> Any:
        """Connected once; whoever asks meanwhile waits for the same."""
        if self._connecting is None:
            name = f"relax-{uuid.uuid4().hex[:12]}"
            work = asyncio.to_thread(package.connect, name, self._servers.controller, self._servers.units)
            self._connecting = asyncio.create_task(work)
        return await asyncio.shield(self._connecting)

    # -- deadlines ------------------------------------------------------------------------------------------------

    async def _within(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Return the result of the work; raise an error of ours where it fails, its servers are gone or the deadline
        has passed."""
        task = asyncio.create_task(work)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._watched(task, what)
        except TimeoutError:
            raise DeadlineExceeded("bus transferqueue", what, self._timeout_s) from None
        finally:
            task.cancel()
        try:
            return task.result()
        except RelaxError:
            raise
        except Exception as error:
            raise InfrastructureError(f"bus transferqueue: {what}: {type(error).__name__}: {error}; {FIX}") from error

    async def _watched(self, task: asyncio.Task[Any], what: str) -> None:
        """Returns when the task has ended; raises when a server has."""
        while not (await asyncio.wait((task,), timeout=LOOK_S))[0]:
            if dead := await self._servers.dead():
                raise InfrastructureError(f"bus transferqueue: {what}: {dead}; {FIX}")
