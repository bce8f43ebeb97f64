# SPDX-License-Identifier: Apache-2.0
"""Builds the engine pool of a run from its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relax_core.api.engine import EngineSpec
from relax_core.api.events import RoleFailed, RoleRecovered
from relax_core.api.routing import Routing
from relax_core.api.weights import Version
from relax_core.api.worker import WorkerSpec
from relax_core.config.model_folder import routing
from relax_core.config.run_config import BackendChoice, RunContext
from relax_core.data.factories import context_of, media_store
from relax_core.engines.pool import EnginePool
from relax_core.engines.router import Bounds
from relax_core.engines.slot import EngineSlot
from relax_core.engines.supervisor import Tell
from relax_core.engines.weight_updater import WeightUpdater


def replayed_routing(run: Any) -> Routing | None:
    """How the model routes, where samples must say which experts they visited."""
    return routing(run.model.path) if run.model.routing_replay == "rollout" else None


def engine_spec(run: Any, version: Version) -> EngineSpec:
    """What each engine of a run is started with; its pool names it."""
    model = {**run.model.model_dump(mode="json"), "dtype": run.engine_dtype}
    return EngineSpec(
        model, context_of(run), run.seed, run.deterministic, version,
        kv_across_versions=run.rollout.kv_across_versions,
    )  # fmt: skip


def engine_events(context: RunContext) -> Tell:
    """Report engines that failed and came back as events of the run."""

    async def tell(what: str, detail: str, seconds: float) -> None:
        if what == "failed":
            await context.board.emit(RoleFailed("engine", detail, 4, fatal=False))
        else:
            await context.board.emit(RoleRecovered("engine", seconds, detail))

    return tell


def make_pool(context: RunContext, now: Version, tell: Tell, suppress: tuple[int, ...] = ()) -> EnginePool:
    """Engines for the run at version `now`; they start with the model folder, and serve as they are only at step 0."""
    run, group = context.config, context.plan.groups["rollout"]
    spec = replace(engine_spec(run, now._replace(step=0)), media=media_store(context) if run.media else "")
    slots = engine_slots(context, group, "engine", run.engine, spec, run.placement.rollout.silence_s)
    weights = run.weights
    feed = WeightUpdater(context.weights, context.clock, weights.proof, weights.tolerance, weights.timeout_s)
    bounds = pool_bounds(run)
    return EnginePool(
        slots, context.clock, feed, tell, now.step == 0, run.deterministic, group.sleeps, suppress, bounds
    )


def engine_slots(
    context: RunContext, group: Any, prefix: str, choice: BackendChoice, spec: EngineSpec, silence_s: float
) -> list[EngineSlot]:
    """The places of a worker group's engines, on its devices; none is started."""
    can = type(context.build(choice.chosen)).capabilities
    slots = []
    for number in range(group.size):
        name = f"{prefix}-{number}"
        worker = WorkerSpec(
            name, choice.chosen, str(choice.python or ""), {"OMP_NUM_THREADS": str(group.threads or 1)},
            devices=group.seat(number), num_gpus=context.plan.num_gpus(group.seat(number)),
        )  # fmt: skip
        lane = context.lane(name, group.devices_of(number))
        slots.append(EngineSlot(name, choice.chosen, spec, worker, context.workers, can, lane, silence_s))
    return slots


def pool_bounds(run: Any) -> Bounds:
    """Where all must come out the same bit for bit, what is asked together stays together: nothing waits for room."""
    placement, turn_s = run.placement.rollout, run.rollout.turn_timeout_s
    return Bounds(turn_s) if run.deterministic else Bounds(turn_s, placement.requests_per_engine, placement.backlog)
