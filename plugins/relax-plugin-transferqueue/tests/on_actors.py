# SPDX-License-Identifier: Apache-2.0
"""Run by `test_servers.py`: a store on actors, its pickled copy, and what is said when the storages have died."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import ray
from relax_plugin_transferqueue.actors import ActorServers
from relax_plugin_transferqueue.store import TransferQueueStore

from relax_core.api import InfrastructureError, Ragged


async def main() -> None:
    servers = await ActorServers.start(2, trusted_network=False)
    store = TransferQueueStore(servers, 60.0)
    copy = pickle.loads(pickle.dumps(store))
    assert store.shared and {unit["ip"] for unit in servers.units} == {"127.0.0.1"}
    await store.put(1, {"a": Ragged(np.arange(6), np.array([2, 4]))})
    assert (await copy.get([1], ("a",)))[1]["a"].values.tolist() == list(range(6))
    for actor in servers._actors[1:]:
        ray.kill(actor)
    try:
        async with asyncio.timeout(60):
            while True:  # Ray kills in its own time
                await store.get([1], ("a",))
                await asyncio.sleep(0.1)
    except InfrastructureError as error:
        print(error)
    await store.close()


if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    try:
        asyncio.run(main())
    finally:
        ray.shutdown()
