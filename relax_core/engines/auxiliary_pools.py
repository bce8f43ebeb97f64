# SPDX-License-Identifier: Apache-2.0
"""Opens the pools of `[[engines]]`: engines of another model than the policy's, which is never updated.

They are the policy's pool and router with nothing to follow: an engine that died loads its folder again, and serves once
it has shown the fingerprint that the pool began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relax_core.api.engine import EngineSpec
from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.family import ModelFamily
from relax_core.api.trainer import Chosen
from relax_core.api.weights import Manifest, Receipt, Version
from relax_core.config.model_folder import model_context, vocabulary_size
from relax_core.config.run_config import DEFAULT_NAMES, RunContext
from relax_core.config.tables import EngineTable
from relax_core.data.factories import NO_BOUND
from relax_core.engines.factories import engine_slots
from relax_core.engines.model_client import PoolModelClient
from relax_core.engines.pool import EnginePool
from relax_core.engines.router import Bounds
from relax_core.engines.slot import EngineSlot
from relax_core.engines.supervisor import Tell
from relax_core.rpc.waiting import start_all

GROUP = "engines-"
"""What the worker group of a pool is called, before its name."""
LATER_S = 60.0
"""A request's own deadline comes first, so that it can say whose it was."""


class FixedWeights:
    """The feed of engines whose weights are those of their folder."""

    async def bring(self, slot: EngineSlot, manifest: Manifest, transport: Chosen) -> Receipt:
        raise InfrastructureError(f"{slot.name}: {manifest.version}, for an engine whose weights stay as they are")

    async def forget(self, slot: EngineSlot) -> None:
        """Nobody remembers it."""


class AuxiliaryPools:
    """Those of one role."""

    def __init__(self, hands: Mapping[str, PoolModelClient], tables: Mapping[str, EngineTable]) -> None:
        self.hands, self._tables = hands, tables

    @classmethod
    def of(cls, context: RunContext, names: Iterable[str], tell: Tell) -> AuxiliaryPools:
        """None of them is started yet."""
        tables = {name: table for name in names if (table := context.config.pool(name)) is not None}
        return cls({name: _hand(context, table, tell) for name, table in tables.items()}, tables)

    async def start(self) -> None:
        """Raises what kept an engine from starting, and ConfigError where it holds another model than its folder."""
        await start_all(*(self._start(name) for name in self.hands))

    async def close(self) -> None:
        await asyncio.gather(*(hand.pool.close() for hand in self.hands.values()))

    def facts(self) -> dict[str, Any]:
        return {name: hand.facts() for name, hand in self.hands.items()}

    async def _start(self, name: str) -> None:
        facts, table = await self.hands[name].pool.start(), self._tables[name]
        have, want = facts.get("vocab_size"), vocabulary_size(table.path)
        if have and want and have != want:
            fix = f"its config.json says {want}: let the engine load that folder, and leave its files alone"
            raise ConfigError(f"engines.{name}", f"an engine with a vocabulary of {have} for {table.path}", fix)


def model_of(run: Any, table: EngineTable) -> dict[str, Any]:
    """As a `[model]` table: whole weights that nobody trains."""
    own = {
        "path": table.path, "dtype": table.dtype or run.model.dtype, "tokenizer": table.tokenizer,
        "chat_template": table.chat_template, "chat_template_kwargs": table.chat_template_kwargs,
    }  # fmt: skip
    model: dict[str, Any] = type(run.model)(**own).model_dump(mode="json")
    return model


def pool_spec(run: Any, table: EngineTable) -> EngineSpec:
    """What each engine of a pool is started with; its pool names it."""
    context = table.max_context or model_context(table.path) or NO_BOUND
    return EngineSpec(model_of(run, table), context, run.seed, run.deterministic, Version(table.name, 0, 0))


def auxiliary_pool_names(context: RunContext, teaching: bool) -> Sequence[str]:
    """Pools of the plan that teachers score with, or those of everybody else."""
    taught = {teacher.engine for teacher in context.config.teachers}
    return [
        table.name
        for table in context.config.engines
        if GROUP + table.name in context.plan.groups and (table.name in taught) is teaching
    ]


def _hand(context: RunContext, table: EngineTable, tell: Tell) -> PoolModelClient:
    run, group = context.config, context.plan.groups[GROUP + table.name]
    family: ModelFamily = context.build(Chosen("model-family", DEFAULT_NAMES["family"]))
    family.open(model_of(run, table))
    slots = engine_slots(
        context, group, f"{table.name}-engine", run.backend_of(table), pool_spec(run, table), table.silence_s
    )
    bounds = Bounds(table.timeout_s + LATER_S, 0 if run.deterministic else table.requests_per_engine)
    pool = EnginePool(
        slots, context.clock, FixedWeights(), tell, deterministic=run.deterministic, bounds=bounds,
    )  # fmt: skip
    return PoolModelClient(table.name, pool, family, context.clock, table.timeout_s, run.deterministic)
