# SPDX-License-Identifier: Apache-2.0
"""The scaler of a role's engine pools: it takes requests, performs the actions of `PoolScaling`, and keeps its state.

The state is a file of the run directory, so that an operation is finished or rolled back after a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from relax_core.api.errors import ConfigError
from relax_core.api.events import Logged
from relax_core.api.run_commands import ScaleRequest
from relax_core.config.run_config import RunConfig, RunContext
from relax_core.engines.factories import AUXILIARY_GROUP, AuxiliaryPools
from relax_core.engines.pool import EnginePool
from relax_core.engines.scaling import Action, CancelJoin, Join, PoolScaling, Step, fixed_size
from relax_core.observe.files import read_document, write_document

POLICY = "rollout"
"""Name of the pool of the policy's engines; every other pool has the name of its table in `[[engines]]`."""
SCHEMA = "relax.scaling/1"
POLL_S = 0.25
"""Seconds between two looks for requests."""
SHOWN = 10
"""Operations of a pool in the run's status."""


class ScaledPool(NamedTuple):
    """A pool with the machine that decides which engines join and leave."""

    pool: EnginePool
    scaling: PoolScaling


def role_of(config: RunConfig, pool: str) -> str:
    """Return the role that holds a pool of engines: `teacher` if a teacher uses the pool, else `rollout`."""
    return "teacher" if any(teacher.engine == pool for teacher in config.teachers) else "rollout"


def file_of(role: str) -> str:
    """Return the name of the file that holds the operations of a role's pools."""
    return "scaling.json" if role == "rollout" else f"scaling-{role}.json"


def scaled_pools(
    context: RunContext, auxiliary: AuxiliaryPools, policy: EnginePool | None = None
) -> dict[str, ScaledPool]:
    """Return the pools of a role with their machines. The first engines of each pool never leave.

    `policy`: the pool of the policy's engines, which only the rollout has.
    """
    config, plan = context.config, context.plan
    pools: dict[str, tuple[EnginePool, int, str, str]] = {}
    if policy is not None:
        pools[POLICY] = (policy, config.placement.rollout.least, "engine", POLICY)
    for name, client in auxiliary.clients.items():
        group = AUXILIARY_GROUP + name
        pools[name] = (client.pool, plan.groups[group].size, f"{name}-engine", group)
    allowed = {POLICY: config.placement.rollout.external.addresses}
    return {
        name: ScaledPool(
            pool,
            PoolScaling(
                name, list(pool.facts()), least, prefix, fixed_size(config, plan, group), allowed.get(name, ())
            ),
        )
        for name, (pool, least, prefix, group) in pools.items()
    }


class Scaler:
    """The scaler of the pools of one role: `made -> restored -> running`.

    Invariants:
    - A request is in the file before its first engine starts or leaves.
    - The pools own the tasks of joins and leaves; closing a pool ends them.
    """

    def __init__(
        self, pools: Mapping[str, ScaledPool], role: str, context: RunContext, wall: Callable[[], float] = time.time
    ) -> None:
        """`pools`: the role's pools by name. `wall`: the time of day, in seconds since 1970."""
        self._pools, self._role, self._context, self._wall = pools, role, context, wall
        self._file = Path(context.run_dir) / file_of(role)
        self._changed = asyncio.Event()
        self._told: dict[str, tuple[str, str]] = {}
        """(state, detail) of each operation at its last event."""
        self._ending: dict[str, set[str]] = {name: set() for name in pools}
        """Addresses of the machines that are about to end and have not been vacated, by pool."""

    async def run(self) -> None:
        """Finish the operations of a replaced process of this role, then serve requests; return if there are no pools."""
        if not self._pools:
            return
        kept = await asyncio.to_thread(read_document, self._file) or {}
        found = kept.get("pools", {})
        for pool in found.values():
            self._told |= {one["id"]: (one["state"], one["detail"]) for one in pool["operations"]}
        restored = {
            name: one.scaling.restored(found[name], self._wall()) for name, one in self._pools.items() if name in found
        }
        await self._keep()
        for name, actions in restored.items():
            self._perform(name, actions)
        while True:
            asked = [(request.pool, self._ask(request)) for request in await self._requests()]
            for name, one in self._pools.items():
                if actions := one.scaling.expire(self._wall()) or self._on_endings(name):
                    asked.append((name, actions))
            if asked or self._changed.is_set():
                self._changed.clear()
                await self._keep()
            for name, actions in asked:
                self._perform(name, actions)
            try:
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def facts(self) -> dict[str, Any]:
        """Return each pool's machine with its last operations, for the run's status; see `PoolScaling.of`."""
        return {name: self._machine(name).plain(SHOWN) for name in self._pools}

    def _machine(self, name: str) -> PoolScaling:
        """Return the machine of a pool, which then knows where the engines are now."""
        pool, scaling = self._pools[name]
        scaling.nodes = pool.hosts()
        return scaling

    async def _requests(self) -> list[ScaleRequest]:
        """Return the requests that have arrived. A request for an unknown pool is left out with a warning."""
        requests = []
        for request in self._context.take_scale_requests():
            if request.ending:
                for ending in self._ending.values():
                    ending.add(request.ending)
            elif request.pool in self._pools:
                requests.append(request)
            else:
                why = f"pool: got {request.pool!r}; name one of {', '.join(self._pools)}"
                ignored = Logged("warning", self._role, f"a request to scale was ignored: {why}")
                await self._context.run_status.emit(ignored)
        return requests

    def _ask(self, request: ScaleRequest) -> list[Action]:
        scaling = self._machine(request.pool)
        try:
            return scaling.ask(request, self._wall())[1]
        except ConfigError as error:
            scaling.refused(request, str(error), self._wall())
            return []

    def _on_endings(self, name: str) -> list[Action]:
        """Vacate machines that are about to end; afterwards refill the pool, unless a policy decides about its size."""
        scaling = self._machine(name)
        if scaling.open is not None:
            return []
        ending = self._ending[name]
        if scaling.nodes.keys() >= set(scaling.engines):  # else an engine restarts, maybe on such a machine
            self._ending[name] = set()
        refill = name != POLICY or self._context.config.autoscale is None
        leaving = [one for node in ending for one in scaling.on_node(node)]
        return scaling.vacate(leaving, self._wall(), refill=refill) or scaling.refill(self._wall())

    def _perform(self, name: str, actions: Sequence[Action]) -> None:
        pool, scaling = self._pools[name]

        def on_step(engine: str, step: Step, why: str) -> None:
            more = scaling.on_step(engine, step, self._wall(), why)
            self._changed.set()
            self._perform(name, more)

        for action in actions:
            if isinstance(action, Join):
                pool.grow(pool.make_slot(action.engine, action.number, action.address), on_step)
            elif isinstance(action, CancelJoin):
                pool.cancel_join(action.engine)
            else:
                pool.drain(action.engine, on_step)

    async def _keep(self) -> None:
        """Write the machines to the file, and tell which operations have changed."""
        document = {"pools": {name: one.scaling.plain() for name, one in self._pools.items()}}
        await asyncio.to_thread(self._write, document)
        for one in self._pools.values():
            for operation in list(one.scaling.operations.values()):
                if (now := (operation.state, operation.detail)) == self._told.get(operation.id):
                    continue
                self._told[operation.id] = now
                level = "warning" if operation.state in ("failed", "partial", "refused") else "info"
                said = f"scaling {operation.pool} to {operation.target} engines ({operation.id}): {operation.state}"
                said += f"; {operation.detail}" if operation.detail else ""
                await self._context.run_status.emit(Logged(level, self._role, said, asdict(operation)))

    def _write(self, document: Mapping[str, Any]) -> None:
        with self._context.changing_files():
            write_document(self._file, SCHEMA, document)
