# SPDX-License-Identifier: Apache-2.0
"""What the package alone does not: servers on loopback that end with their run, deadlines, deaths that are told at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from relax_plugin_transferqueue.child import ChildServers
from relax_plugin_transferqueue.store import TransferQueueStore

from relax_core.api import InfrastructureError, Ragged
from relax_core.api.errors import DeadlineExceeded
from tests.processes import stop

COLUMN = Ragged(np.arange(6, dtype=np.uint16), np.array([2, 0, 4]))


async def test_a_dead_server_is_an_error_and_not_a_wait() -> None:
    servers = await ChildServers.start(1)
    store = TransferQueueStore(servers, 60.0)
    await store.put(1, {"a": COLUMN})
    os.kill(servers._process.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        with pytest.raises(InfrastructureError, match="ended with -9"):
            await store.get([1], ("a",))
        await store.close()


async def test_a_stuck_server_ends_the_call_at_its_deadline(servers: ChildServers) -> None:
    store = TransferQueueStore(servers, 2.0)
    await store.put(1, {"a": COLUMN})
    await asyncio.to_thread(stop, servers._process.pid)
    try:
        with pytest.raises(DeadlineExceeded, match="get of 1 blocks"):
            await store.get([1], ("a",))
    finally:
        os.kill(servers._process.pid, signal.SIGCONT)
    await store.close()


def test_servers_listen_on_the_loopback_alone(servers: ChildServers) -> None:
    found = psutil.Process(servers._process.pid).net_connections("tcp")
    assert {at.laddr.ip for at in found if at.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


async def test_runs_on_the_same_servers_do_not_meet(servers: ChildServers) -> None:
    one, other = TransferQueueStore(servers, 60.0), TransferQueueStore(servers, 60.0)
    await one.put(1, {"a": COLUMN})
    await other.put(1, {"a": Ragged(COLUMN.values + 1, COLUMN.lengths)})
    assert (await one.get([1], ("a",)))[1]["a"].values.tolist() == [0, 1, 2, 3, 4, 5]
    await other.free([1])
    assert (await one.get([1], ("a",)))[1]["a"].lengths.tolist() == [2, 0, 4]
    with pytest.raises(InfrastructureError, match="got 0 of 1"):
        await other.get([1], ("a",))
    for store in (one, other):
        await store.close()


async def test_columns_of_every_kind_come_back_as_they_went(servers: ChildServers) -> None:
    store = TransferQueueStore(servers, 60.0)
    texts = np.empty(2, object)
    texts[:] = ["a", {"b": 1}]
    block = {
        "bits": COLUMN,
        "none": Ragged(np.zeros((0, 3, 2), np.float32), np.zeros(3, np.int64)),
        "texts": Ragged(texts, np.ones(2, np.int64)),
        "given": Ragged(np.frombuffer(bytes(16), np.float64), np.array([1, 1])),
    }
    await store.put(7, block)
    await store.put(8, {"bits": COLUMN})
    found = await store.get([7, 8], (*block, "unknown"))
    assert found[7].keys() == block.keys() and found[8].keys() == {"bits"}
    for name, column in block.items():
        got = found[7][name]
        assert (got.values.dtype, got.values.shape) == (column.values.dtype, column.values.shape)
        assert got.values.tolist() == column.values.tolist() and got.lengths.tolist() == column.lengths.tolist()
    await store.close()


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.timeout(200)
def test_on_a_cluster_its_servers_are_actors_that_a_copy_reaches_and_a_dead_one_is_named() -> None:
    """In a process of its own: Ray's other tests are on a cluster of theirs."""
    script = Path(__file__).with_name("on_actors.py")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("bus transferqueue: get of 1 blocks")
