# SPDX-License-Identifier: Apache-2.0
"""Construction of a run's engine pools from its configuration: the policy's, and the auxiliary pools of `[[engines]]`.

An auxiliary pool serves a different model whose weights are never updated. An engine that replaces a failed one loads
the model folder again, and serves if the model's fingerprint is the same as at the start of the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, cast

from relax_core.api.component import Chosen
from relax_core.api.engine import Engine, EngineSpec
from relax_core.api.errors import ConfigError
from relax_core.api.events import RoleFailed, RoleRecovered, WorkRetried
from relax_core.api.family import ModelFamily
from relax_core.api.model_folder import bounded_context, vocabulary_size
from relax_core.api.plan import WorkerGroup
from relax_core.api.role import Phase, Workers, WorkerSpec
from relax_core.api.weights import Version
from relax_core.config.run_config import DEFAULT_NAMES, BackendChoice, RunConfig, RunContext
from relax_core.config.tables import EngineTable
from relax_core.data.media import media_store
from relax_core.devices.client import DEVICE_LEASE_WAIT_S
from relax_core.engines.model_client import PoolModelClient
from relax_core.engines.pool import EnginePool, SlotMaker
from relax_core.engines.router import RequestLimits
from relax_core.engines.slot import EngineSlot
from relax_core.engines.supervisor import Report, WeightUpdater
from relax_core.rpc.waiting import start_all

AUXILIARY_GROUP = "engines-"
"""Prefix of the name of an auxiliary pool's worker group."""
PHASES: tuple[Phase, Phase] = ("generate", "answer")
"""Two phases that alternate. A change of phase returns when all members of the lease have offloaded or loaded."""
LATER_S = 60.0
"""Seconds added to the router's deadline, so that the client's deadline comes first and its error names the pool."""


def make_pool(context: RunContext, now: Version, report: Report, suppress: tuple[int, ...] = ()) -> EnginePool:
    """Return the policy's pool at version `now`; engines load the model folder, and serve it only at step 0."""
    run, group = context.config, context.plan.groups["rollout"]
    spec = replace(engine_spec(run, now._replace(step=0)), media=media_store(context) if run.media else "")
    placement, weights, timeout_s = run.placement.rollout, run.weights, run.rollout.turn_timeout_s
    make_slot = _slot_maker(context, group, run.engine, spec, placement.silence_s)
    slots = [make_slot(f"engine-{number}", number, "") for number in range(group.size)]
    updates = WeightUpdater(context.weights, context.clock, weights.proof, weights.tolerance, weights.timeout_s)
    # Deterministic runs must not split batches, so nothing waits for capacity.
    limits = (
        RequestLimits(timeout_s)
        if run.deterministic
        else RequestLimits(
            timeout_s, placement.requests_per_engine, placement.backlog, kv_tokens=placement.kv_tokens_per_engine,
            kv_reserve=placement.kv_reserve,
        )
    )  # fmt: skip
    return EnginePool(
        slots, context.clock, updates, report, now.step == 0, run.deterministic, group.offloads, suppress, limits,
        make_slot,
    )  # fmt: skip


def engine_spec(run: RunConfig, version: Version) -> EngineSpec:
    """Return the settings of the policy's engines; each slot adds the engine's name."""
    model = {**run.model.model_dump(mode="json"), "dtype": run.engine_dtype}
    return EngineSpec(
        model, bounded_context(run.model.path), run.seed, run.deterministic, version,
        kv_across_versions=run.rollout.kv_across_versions,
    )  # fmt: skip


def engine_events(context: RunContext) -> Report:
    """Return a `Report` that emits failures, retries and recoveries of engines as events of the run."""

    async def report(event: str, detail: str, amount: float) -> None:
        if event == "failed":
            await context.run_status.emit(RoleFailed("engine", detail, 4, fatal=False))
        elif event == "retried":
            await context.run_status.emit(WorkRetried("engine", "requests", int(amount), detail))
        else:
            await context.run_status.emit(RoleRecovered("engine", amount, detail))

    return report


def auxiliary_spec(run: RunConfig, table: EngineTable) -> EngineSpec:
    """Return the settings of an auxiliary pool's engines; each slot adds the engine's name."""
    context = table.max_context or bounded_context(table.path)
    return EngineSpec(_model_table(run, table), context, run.seed, run.deterministic, Version(table.name, 0, 0))


def _model_table(run: RunConfig, table: EngineTable) -> dict[str, Any]:
    """Return an auxiliary model as a `[model]` table, without adapters or training settings."""
    own = {
        "path": table.path, "dtype": table.dtype or run.model.dtype, "tokenizer": table.tokenizer,
        "chat_template": table.chat_template, "chat_template_kwargs": table.chat_template_kwargs,
        "chat_template_date": run.model.chat_template_date,
    }  # fmt: skip
    model: dict[str, Any] = type(run.model)(**own).model_dump(mode="json")
    return model


def _slot_maker(
    context: RunContext, group: WorkerGroup, choice: BackendChoice, spec: EngineSpec, silence_s: float
) -> SlotMaker:
    """Return a function that makes slots of a worker group's engines, on its devices, without starting them.

    An engine with a number beyond the group's size shares a CPU device of the group, or gets as many GPUs as each engine
    of the group from the runner. An engine with an address was started elsewhere and has devices of its own.
    """
    engine = type(context.build(choice.chosen, Engine))
    token = context.config.placement.rollout.external.token

    def make_slot(name: str, number: int, address: str) -> EngineSlot:
        if address and token is not None:
            elsewhere = context.part(
                "relax_external_workers", address=address, token=token, engine=choice.chosen, kind=engine,
                plugins=context.plugins, clock=context.clock,
            )  # fmt: skip
            return EngineSlot(
                name, choice.chosen, spec, WorkerSpec(name, choice.chosen), cast(Workers, elsewhere), engine.capabilities,
                context.track(name), silence_s, address,
            )  # fmt: skip
        elastic, num_gpus = number >= group.size, context.plan.num_gpus(group.process_devices(0))
        unplanned = elastic and num_gpus > 0  # the plan does not name the GPUs of such an engine
        worker = WorkerSpec(
            name, choice.chosen, str(choice.python or ""), {"OMP_NUM_THREADS": str(group.threads or 1)},
            devices=() if unplanned else group.process_devices(number), num_gpus=num_gpus, preload=engine.preload,
            elastic=elastic,
        )  # fmt: skip
        track = context.track(name, () if unplanned else group.devices_of(number))
        return EngineSlot(name, choice.chosen, spec, worker, context.workers, engine.capabilities, track, silence_s)

    return make_slot


class AuxiliaryPools:
    """The auxiliary pools of one role with their clients: the pools of teachers, or all remaining pools."""

    def __init__(
        self, context: RunContext, clients: Mapping[str, PoolModelClient], tables: Sequence[EngineTable]
    ) -> None:
        self._context, self.clients, self._tables = context, clients, tables

    @classmethod
    def from_context(cls, context: RunContext, report: Report, *, teaching: bool) -> AuxiliaryPools:
        """Return the plan's pools without starting them: the teachers' if `teaching`, else the remaining ones."""
        taught = {teacher.engine for teacher in context.config.teachers}
        tables = [
            table
            for table in context.config.engines
            if AUXILIARY_GROUP + table.name in context.plan.groups and (table.name in taught) is teaching
        ]
        return cls(context, {table.name: _client(context, table, report) for table in tables}, tables)

    @property
    def taking_turns(self) -> dict[str, PoolModelClient]:
        """Clients of the pools that share the devices of the policy's engines, by worker group."""
        return {
            AUXILIARY_GROUP + table.name: self.clients[table.name] for table in self._tables if table.devices != "own"
        }

    async def start(self) -> None:
        """Start all pools at once. Raises ConfigError if an engine's vocabulary differs from its model folder's."""
        await start_all(*(self._start(table) for table in self._tables))

    async def start_in_turns(self) -> None:
        """Start all pools; those on shared devices start one after another, since they do not fit in memory together.

        Each of these is paused, joins the device scheduler and is offloaded before the next starts.
        """
        await start_all(*(self._start(table) for table in self._tables if table.devices == "own"))
        devices, phases = self._context.devices, cycle(PHASES)
        for table in self._tables:
            if table.devices == "own":
                continue
            group, client = AUXILIARY_GROUP + table.name, self.clients[table.name]
            own = self._context.plan.groups[group].devices
            async with devices.acquire(own, next(phases), {}, DEVICE_LEASE_WAIT_S) as lease:
                await self._start(table)
                await client.pause()
                await devices.join(group, own, client.pool.supervisor)
                await lease.change_phase(next(phases), {}, DEVICE_LEASE_WAIT_S)  # returns when the pool is offloaded

    async def _start(self, table: EngineTable) -> None:
        facts = await self.clients[table.name].pool.start()
        have, want = facts.get("vocab_size"), vocabulary_size(table.path)
        if have and want and have != want:
            fix = f"its config.json says {want}; make the engine load that folder, and do not change its files"
            raise ConfigError(f"engines.{table.name}", f"an engine with a vocabulary of {have} for {table.path}", fix)

    async def close(self) -> None:
        await asyncio.gather(*(client.pool.close() for client in self.clients.values()))

    def facts(self) -> dict[str, Any]:
        return {name: client.facts() for name, client in self.clients.items()}


def _client(context: RunContext, table: EngineTable, report: Report) -> PoolModelClient:
    run, group = context.config, context.plan.groups[AUXILIARY_GROUP + table.name]
    family = context.build(Chosen("model-family", DEFAULT_NAMES["family"]), ModelFamily)
    family.open(_model_table(run, table))
    spec = auxiliary_spec(run, table)
    make_slot = _slot_maker(context, group, run.backend_of(table), spec, table.silence_s)
    slots = [make_slot(f"{table.name}-engine-{number}", number, "") for number in range(group.size)]
    limits = RequestLimits(table.timeout_s + LATER_S, 0 if run.deterministic else table.requests_per_engine)
    pool = EnginePool(
        slots, context.clock, None, report, deterministic=run.deterministic, limits=limits,
        make_slot=make_slot,
    )  # fmt: skip
    limit_s = run.rollout.step_timeout_s
    return PoolModelClient(
        table.name, pool, family, context.clock, table.timeout_s, run.deterministic, limit_s, table.path.name
    )
