# SPDX-License-Identifier: Apache-2.0
"""TransferQueue's servers as Ray actors, spread over the cluster; without names, so that runs can't share them."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from relax_core.api.errors import ConfigError
from relax_plugin_transferqueue import package
from relax_plugin_transferqueue.child import LOOPBACK

START_S = 120.0
LOOK_S = 10.0


@ray.remote(num_cpus=0, max_restarts=0)
class Server:
    """An actor that runs one server of the package."""

    def __init__(self, role: str, address: str) -> None:
        at = address or ray.util.get_node_ip_address()
        self._server = package.serve_controller(at) if role == "controller" else package.serve_unit(at)

    def describe(self) -> dict[str, Any]:
        return package.describe(self._server)


class ActorServers:
    """An implementation of `store.Servers` with Ray actors; a pickled copy reaches the same servers."""

    shared = True

    def __init__(self, actors: list[Any], addresses: list[dict[str, Any]]) -> None:
        self._actors = actors
        self.controller, *self.units = addresses

    @classmethod
    async def start(cls, units: int, trusted_network: bool) -> ActorServers:
        nodes = sum(node["Alive"] for node in ray.nodes())
        if nodes > 1 and not trusted_network:
            fix = 'servers decode pickles: set it to true if only trusted hosts can reach them, or use bus = "ray"'
            raise ConfigError("bus.trusted_network", f"false on a cluster of {nodes} nodes", fix)
        address = LOOPBACK if nodes == 1 else ""
        spread = Server.options(scheduling_strategy="SPREAD")  # type: ignore[attr-defined]
        actors = [spread.remote(role, address) for role in ("controller", *("unit",) * units)]
        try:
            async with asyncio.timeout(START_S):
                return cls(actors, list(await asyncio.gather(*(actor.describe.remote() for actor in actors))))
        except BaseException:
            _kill(actors)
            raise

    async def dead(self) -> str:
        """Return Ray's message for a dead server; empty if all servers live, or if Ray does not answer."""
        try:
            async with asyncio.timeout(LOOK_S):
                await asyncio.gather(*(actor.__ray_ready__.remote() for actor in self._actors))
        except ray.exceptions.ActorDiedError as error:
            return str(error).strip().partition("\n")[0]
        except (TimeoutError, ray.exceptions.RayError):
            return ""
        return ""

    async def close(self) -> None:
        _kill(self._actors)


def _kill(actors: list[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
