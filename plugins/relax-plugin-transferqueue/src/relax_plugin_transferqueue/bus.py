# SPDX-License-Identifier: Apache-2.0
"""The bus whose payloads are in the TransferQueue package: as actors where this process is on a Ray cluster, else a child."""

from __future__ import annotations

import importlib.util
import sys

from pydantic import PositiveFloat, PositiveInt

from relax_core.api.bus import BusComponent, PayloadStore
from relax_core.api.errors import ConfigError
from relax_core.api.options import Options


class TransferQueueOptions(Options):
    """Keeping of payloads by the package."""

    units: PositiveInt = 1
    """Storage servers; on a Ray cluster they are spread over its nodes."""
    timeout_s: PositiveFloat = 60.0
    """Longest call; a server that died is noticed within seconds."""
    trusted_network: bool = False
    """On several nodes: its servers decode pickles from whoever reaches them; say that nobody else does."""


class TransferQueueBus(BusComponent[TransferQueueOptions]):
    """Ledger, claims, leases, credits and staleness are Relax's own, as on every bus."""

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
    """Tell whether Ray was started or joined here; it is not imported to find out."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
