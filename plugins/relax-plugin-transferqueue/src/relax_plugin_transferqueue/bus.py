# SPDX-License-Identifier: Apache-2.0
"""A bus that stores payloads in TransferQueue servers: Ray actors if this process uses Ray, else one child process."""

from __future__ import annotations

import importlib.util
import sys

from pydantic import PositiveFloat, PositiveInt

from relax_core.api.bus import BusComponent, PayloadStore
from relax_core.api.errors import ConfigError
from relax_core.api.options import Options


class TransferQueueOptions(Options):
    """Options of the bus `transferqueue` for its storage servers."""

    units: PositiveInt = 1
    """Number of storage servers; on a Ray cluster, servers are spread over the nodes."""
    timeout_s: PositiveFloat = 60.0
    """Seconds until a call to a server fails. If a server is dead, the call fails within a few seconds."""
    trusted_network: bool = False
    """Confirm that only trusted hosts can reach the servers, which decode pickles. Required on more than one node."""


class TransferQueueBus(BusComponent[TransferQueueOptions]):
    """A bus with payloads in TransferQueue; Relax itself keeps ledger, claims, leases, credits and staleness."""

    async def open_store(self) -> PayloadStore:
        if importlib.util.find_spec("transfer_queue") is None:
            fix = "pip install relax-plugin-transferqueue with its dependencies, or use another bus"
            raise ConfigError("bus.name", "transferqueue without the TransferQueue package", fix)
        from relax_plugin_transferqueue.store import TransferQueueStore

        if _on_cluster():
            from relax_plugin_transferqueue.actors import ActorServers

            servers = await ActorServers.start(self.options.units, self.options.trusted_network)
            return TransferQueueStore(servers, self.options.timeout_s)
        from relax_plugin_transferqueue.child import ChildServers

        return TransferQueueStore(await ChildServers.start(self.options.units), self.options.timeout_s)


def _on_cluster() -> bool:
    """Return True if this process has started or joined Ray, without importing Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
