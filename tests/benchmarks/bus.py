# SPDX-License-Identifier: Apache-2.0
"""The bus: put and get of rows from 1 kB to 100 MB, every byte of what was read summed by its reader.

Ours in one process and on Ray, the TransferQueue package as its documentation uses it (`kv_batch_put`,
`kv_batch_get`), and our bus over it. On Ray writer and reader are this process; the bus is in others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from relax_core.api import Bus, BusSettings, ClaimRequest, DropReason, Outcome, Ragged, RowBatch, RowId, Sealed, Version
from tests.benchmarks import report

SIZES = {
    "1 kB": (1 << 10, 512),
    "64 kB": (1 << 16, 256),
    "1 MB": (1 << 20, 32),
    "10 MB": (10 << 20, 8),
    "100 MB": (100 << 20, 1),
}
"""A row's bytes, and how many rows are put and read at once."""
START = Version("actor", 0, 0)
STORE_BYTES = 1 << 30
WAIT_S = 60.0

Timed = Callable[[np.ndarray, int], Awaitable[tuple[float, float, float]]]
"""Seconds of one put, of the get, and of the sum over every byte, of so many rows with these values."""


async def on_bus(bus: Bus, values: np.ndarray, rows: int) -> tuple[float, float, float]:
    """One group of `rows` rows through our bus."""
    (issue,) = await bus.admit("rollout", START, 1, WAIT_S)
    ids = tuple(RowId(*issue.attempts[0], row) for row in range(rows))
    batch = RowBatch(ids, {"tokens": Ragged(values, np.full(rows, len(values) // rows, np.int64))})
    begun = time.perf_counter()
    await bus.put(batch, [Sealed(issue.attempts[0], rows, Outcome.FINISHED)], WAIT_S)
    put_s = time.perf_counter() - begun
    begun = time.perf_counter()
    claim = await bus.claim(ClaimRequest("reader", ("tokens",), 1), WAIT_S)
    if claim is None:
        raise RuntimeError(f"rows that were put were not handed out within {WAIT_S:.0f} s")
    found = (await bus.read(claim, ("tokens",))).columns["tokens"]
    get_s = time.perf_counter() - begun
    sum_s = _summed([found.values], values)
    await bus.acknowledge(claim)
    await bus.drop(issue.attempts, DropReason.FILTERED)
    return put_s, get_s, sum_s


async def on_package(values: np.ndarray, rows: int) -> tuple[float, float, float]:
    """The same rows through the package, as keys of a partition."""
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    keys = [f"row-{row}" for row in range(rows)]
    data = TensorDict({"tokens": torch.from_numpy(values).view(rows, -1)}, batch_size=rows)
    begun = time.perf_counter()
    await tq.async_kv_batch_put(keys=keys, partition_id="bench", fields=data)
    put_s = time.perf_counter() - begun
    begun = time.perf_counter()
    found = await tq.async_kv_batch_get(keys=keys, partition_id="bench")
    get_s = time.perf_counter() - begun
    sum_s = _summed([row.numpy() for row in found["tokens"].unbind()], values)
    await tq.async_kv_clear(keys=keys, partition_id="bench")
    return put_s, get_s, sum_s


def _summed(found: list[np.ndarray], want: np.ndarray) -> float:
    """Seconds of the sum over every byte; an error where it is not what was put."""
    begun = time.perf_counter()
    total = sum(int(part.view(np.uint64).sum()) for part in found)
    seconds = time.perf_counter() - begun
    if total != int(want.view(np.uint64).sum()):
        raise RuntimeError("what was read is not what was put")
    return seconds


async def measure(name: str, timed: Timed, options: argparse.Namespace) -> list[report.Row]:
    rows = []
    for size in options.sizes:
        row_bytes, count = SIZES[size]
        values = np.random.default_rng(0).integers(0, 1 << 40, count * row_bytes // 8)
        report.say(f"{name}: {count} rows of {size}")
        found = [await timed(values, count) for _ in range(options.repeats + 1)][1:]
        put_s, get_s, sum_s = (sorted(times)[len(found) // 2] for times in zip(*found, strict=True))
        gigabytes = values.nbytes / 1e9
        read_s = get_s + sum_s
        rows.append(
            {
                "bus": name, "row": size, "rows": count, "put ms": put_s * 1e3, "put GB/s": gigabytes / put_s,
                "get ms": get_s * 1e3, "first touch ms": sum_s * 1e3, "read GB/s": gigabytes / read_s, "rows/s": count / read_s,
            }
        )  # fmt: skip
    return rows


async def ours(component: Any, name: str, options: argparse.Namespace) -> list[report.Row]:
    from relax_core.bus.service import open_bus

    with tempfile.TemporaryDirectory() as directory:
        bus = await open_bus(component, _settings(), directory, START)
        try:
            return await measure(name, lambda values, rows: on_bus(bus, values, rows), options)
        finally:
            await bus.close()


async def ours_on_ray(component: Any, name: str, options: argparse.Namespace) -> list[report.Row]:
    """Through the hub, as roles do."""
    import ray

    from relax_core.runners.ray.bus import reach_bus
    from relax_core.runners.ray.connection import RpcClient, asked
    from relax_core.runners.ray.hub import CONCURRENCY, Hub

    hub = Hub.options(max_concurrency=CONCURRENCY).remote()  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as directory:
        store = await asked(hub.open_bus.remote(component, _settings(), directory, START), "hub", "open_bus", 120.0)
        reach = RpcClient(hub, "hub")
        bus = reach_bus(reach, store)
        try:
            return await measure(name, lambda values, rows: on_bus(bus, values, rows), options)
        finally:
            await reach.close()
            await asked(hub.close.remote(), "hub", "close", 60.0)
            ray.kill(hub)


async def package(options: argparse.Namespace) -> list[report.Row]:
    import transfer_queue as tq

    tq.init()
    try:
        return await measure("TransferQueue package", on_package, options)
    finally:
        tq.close()


def _settings() -> BusSettings:
    return BusSettings(1, 4, 1, columns=("tokens",))


async def run(options: argparse.Namespace) -> list[report.Row]:
    from relax_core.bus.store import InProcessBus

    rows: list[report.Row] = []
    if "in-process" in options.buses:
        rows += await ours(InProcessBus(), "in-process", options)
    if set(options.buses) - {"in-process"}:
        rows += await _on_cluster(options)
    return rows


async def _on_cluster(options: argparse.Namespace) -> list[report.Row]:
    from relax_core.runners.ray.environment import settle

    settle()
    import ray

    from relax_core.runners.ray.bus import RayBus

    rows: list[report.Row] = []
    ray.init(
        address="local", num_cpus=16, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False
    )
    try:
        if "ray" in options.buses:
            rows += await ours_on_ray(RayBus(), "ray", options)
        if "transferqueue" in options.buses:
            from relax_plugin_transferqueue.bus import TransferQueueBus

            rows += await ours_on_ray(TransferQueueBus(), "transferqueue (our plugin)", options)
        if "package" in options.buses:
            rows += await package(options)
    finally:
        ray.shutdown()
    return rows


def main() -> None:
    parser = report.parser(__doc__ or "")
    buses = ("in-process", "ray", "transferqueue", "package")
    parser.add_argument("--buses", nargs="+", choices=buses, default=buses)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=tuple(SIZES))
    options = parser.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    report.finish("bus", set_up, asyncio.run(run(options)), options)
