# SPDX-License-Identifier: Apache-2.0
"""A payload store in TransferQueue: each block is one sample of the run's partition.

The store uses only the package's key-value calls; the bus decides on readiness, claims and capacity. Every call has a
deadline. A long call checks the servers every second, and fails at once if a server is dead.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from relax_core.api.batch import Ragged
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, RelaxError
from relax_plugin_transferqueue import package

T = TypeVar("T")
LOOK_S = 1.0
"""Seconds between two checks of the servers during a call."""
FIX = "`relax resume` the run"


class Servers(Protocol):
    """The package's servers: their addresses, a check for dead servers, and a method to stop them."""

    shared: bool
    controller: dict[str, Any]
    units: list[dict[str, Any]]

    async def dead(self) -> str: ...

    async def close(self) -> None: ...


class TransferQueueStore:
    """An implementation of `api.PayloadStore`. A pickled copy in another process connects at its first call."""

    def __init__(self, servers: Servers, timeout_s: float, partition: str = "") -> None:
        self.shared = servers.shared
        self._servers, self._timeout_s = servers, timeout_s
        self._partition = partition or f"relax-{uuid.uuid4().hex}"
        self._connecting: asyncio.Task[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TransferQueueStore, (self._servers, self._timeout_s, self._partition)

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        await self._within(self._put(key, columns), f"put of block {key}")

    async def get(self, keys: Sequence[int], columns: Sequence[str]) -> Mapping[int, Mapping[str, Ragged]]:
        return await self._within(self._get(keys, frozenset(columns)), f"get of {len(keys)} blocks") if keys else {}

    async def free(self, keys: Sequence[int]) -> None:
        if keys:
            await self._within(self._free(keys), f"free of {len(keys)} blocks")

    async def close(self) -> None:
        if self._connecting is not None and not self._connecting.cancelled():
            client = await self._connecting
            await asyncio.to_thread(client.close)
        await self._servers.close()

    # -- calls of the package -------------------------------------------------------------------------------------

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
        """Fetch fields of blocks that all have these fields; the package returns only fields common to all samples."""
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
        """Return the client. It connects once; concurrent callers wait for the same connection."""
        if self._connecting is None:
            name = f"relax-{uuid.uuid4().hex[:12]}"
            work = asyncio.to_thread(package.connect, name, self._servers.controller, self._servers.units)
            self._connecting = asyncio.create_task(work)
        return await asyncio.shield(self._connecting)

    # -- deadlines ------------------------------------------------------------------------------------------------

    async def _within(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Run `work` with the deadline, and return its result.

        Raises DeadlineExceeded after the timeout, and InfrastructureError if the work fails or a server is dead.
        """
        task = asyncio.create_task(work)
        try:
            async with asyncio.timeout(self._timeout_s):
                # Wait until the task has ended, and look for dead servers meanwhile.
                while not (await asyncio.wait((task,), timeout=LOOK_S))[0]:
                    if dead := await self._servers.dead():
                        raise InfrastructureError(f"bus transferqueue: {what}: {dead}; {FIX}")
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
