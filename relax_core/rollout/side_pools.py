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
from relax_core.api.role import Context
from relax_core.api.trainer import Chosen
from relax_core.api.version import Version
from relax_core.api.weights import Manifest, Receipt
from relax_core.options.choice import DEFAULT_NAMES
from relax_core.options.engines import EngineTable
from relax_core.options.model_folder import model_context, vocabulary_size
from relax_core.rollout.engine_slot import EngineSlot
from relax_core.rollout.opening_data import NO_BOUND
from relax_core.rollout.opening_engines import engine_slots
from relax_core.rollout.pool import EnginePool
from relax_core.rollout.pool_hand import PoolHand
from relax_core.rollout.router import Bounds
from relax_core.rollout.together import together
from relax_core.rollout.upkeep import Tell

GROUP = "engines-"
"""What the worker group of a pool is called, before its name."""
LATER_S = 60.0
"""A request's own deadline comes first, so that it can say whose it was."""


class NothingToFollow:
    """The feed of engines whose weights are those of their folder."""

    async def bring(self, slot: EngineSlot, manifest: Manifest, transport: Chosen) -> Receipt:
        raise InfrastructureError(f"{slot.name}: {manifest.version}, for an engine whose weights stay as they are")

    async def forget(self, slot: EngineSlot) -> None:
        """Nobody remembers it."""


class SidePools:
    """Those of one role."""

    def __init__(self, hands: Mapping[str, PoolHand], tables: Mapping[str, EngineTable]) -> None:
        self.hands, self._tables = hands, tables

    @classmethod
    def of(cls, context: Context, names: Iterable[str], tell: Tell) -> SidePools:
        """None of them is started yet."""
        tables = {name: table for name in names if (table := context.run.pool(name)) is not None}
        return cls({name: _hand(context, table, tell) for name, table in tables.items()}, tables)

    async def start(self) -> None:
        """Raises what kept an engine from starting, and ConfigError where it holds another model than its folder."""
        await together(*(self._start(name) for name in self.hands))

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


def side_pool_names(context: Context, teaching: bool) -> Sequence[str]:
    """Pools of the plan that teachers score with, or those of everybody else."""
    taught = {teacher.engine for teacher in context.run.teachers}
    return [
        table.name
        for table in context.run.engines
        if GROUP + table.name in context.plan.groups and (table.name in taught) is teaching
    ]


def _hand(context: Context, table: EngineTable, tell: Tell) -> PoolHand:
    run, group = context.run, context.plan.groups[GROUP + table.name]
    family: ModelFamily = context.build(Chosen("model-family", DEFAULT_NAMES["family"]))
    family.open(model_of(run, table))
    slots = engine_slots(
        context, group, f"{table.name}-engine", run.backend_of(table), pool_spec(run, table), table.silence_s
    )
    bounds = Bounds(table.timeout_s + LATER_S, 0 if run.deterministic else table.requests_per_engine)
    pool = EnginePool(
        slots, context.clock, NothingToFollow(), tell, deterministic=run.deterministic, bounds=bounds,
    )  # fmt: skip
    return PoolHand(table.name, pool, family, context.clock, table.timeout_s, run.deterministic)
