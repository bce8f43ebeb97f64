# SPDX-License-Identifier: Apache-2.0
"""TransferQueue's servers as Ray actors of one run, spread over the cluster. They have no names, so runs do not meet."""

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
    """One server of the package in a process of its own."""

    def __init__(self, role: str, address: str) -> None:
        at = address or ray.util.get_node_ip_address()
        self._server = package.serve_controller(at) if role == "controller" else package.serve_unit(at)

    def describe(self) -> dict[str, Any]:
        return package.describe(self._server)


class ActorServers:
    """`store.Servers` as actors; a pickled copy reaches the same."""

    shared = True

    def __init__(self, actors: list[Any], told: list[dict[str, Any]]) -> None:
        self._actors = actors
        self.controller, *self.units = told

    @classmethod
    async def start(cls, units: int, trusted_network: bool) -> ActorServers:
        nodes = sum(node["Alive"] for node in ray.nodes())
        if nodes > 1 and not trusted_network:
            fix = 'set it to true where nobody else reaches them: its servers decode pickles; or use bus = "ray"'
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
        """Name the server that is gone; empty while all are there, or Ray cannot tell."""
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
