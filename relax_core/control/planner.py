# SPDX-License-Identifier: Apache-2.0
"""From a configuration to a plan: operations by the algorithm's needs, roles by operations, workers by placement.

The only place that looks at the placement mode; roles see just their worker groups.
"""

from __future__ import annotations

from typing import cast

from relax_core.api.algorithm import Algorithm, Scope, Source
from relax_core.api.errors import ConfigError
from relax_core.api.role import Operation, Role
from relax_core.api.trainer import Trainer
from relax_core.control.graph import select
from relax_core.options.operation import RankPlacement
from relax_core.options.run_config import RunConfig
from relax_core.plugins.catalogue import Catalogue
from relax_core.roles.plan import Plan, WorkerGroup

SHARED = 1
"""Threads of a process that was given none: several share the cores, and spinning threads would fight for them."""
METER = "rollout_log_probs"
"""Always read, so that every run measures how far the engine's log-probs are from the trainer's."""


def plan(config: RunConfig, catalogue: Catalogue) -> Plan:
    """Raises ConfigError for what can't run, before anything starts."""
    algorithm = catalogue.build(config.algorithm.chosen)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError("algorithm.name", config.algorithm.chosen.name, "it is no algorithm")
    if algorithm.source is not Source.ROLLOUT:
        raise ConfigError("algorithm.name", f"{config.algorithm.chosen.name} (learns from a {algorithm.source})",
                          "this version trains from rollout only")  # fmt: skip
    own_pass = _old_log_probs(config, algorithm)
    columns = _columns(algorithm, config, own_pass)
    operations = select(_operations(catalogue), {"actor.fit": columns})
    trainer = cast(type[Trainer], catalogue.target("trainer", config.trainer.chosen.name))
    waits = _why_whole_steps(config, algorithm, trainer)
    return Plan(
        mode=config.placement.mode,
        operations=operations,
        roles=tuple(dict.fromkeys(operation.role for operation in operations)),
        groups=_groups(config, operations),
        trained_columns=columns,
        advantage_columns=_advantage_columns(algorithm),
        batch_statistics=algorithm.statistics is Scope.BATCH,
        streams=not waits,
        needs_old_log_probs=own_pass,
        max_staleness=config.staleness,
        min_valid=algorithm.min_group_size,
        notes=(f"no streaming, each step waits for all of its rows: {waits}",) if waits else (),
    )


def _old_log_probs(config: RunConfig, algorithm: Algorithm) -> bool:
    """Whether a pass for the old policy runs: with one update a step the ratio is exactly 1 and none does."""
    wants = any(column.name == "old_log_probs" for column in algorithm.columns())
    return wants and config.batch.updates_per_step > 1


def _why_whole_steps(config: RunConfig, algorithm: Algorithm, trainer: type[Trainer]) -> str:
    """Why the actor can't begin before all rows of a step are there; empty where it can.

    Every count is late while rows still come, also that of groups (a step may be closed short), and only one may be.
    """
    name, counts = config.algorithm.chosen.name, sorted(algorithm.denominators)
    reasons = {
        "batch.stream is false": not config.batch.stream,
        "the run is deterministic": config.deterministic,
        f"{name} takes statistics over the whole batch": algorithm.statistics is Scope.BATCH,
        f"batch.updates_per_step is {config.batch.updates_per_step}": config.batch.updates_per_step > 1,
        f"{config.trainer.chosen.name} needs all rows of an update at once": not trainer.streams,
        f"{name} does not say what its loss is divided by (Algorithm.denominators)": not counts,
        f"the loss of {name} is divided by {' and '.join(counts)}, of which only one may be late": len(counts) > 1,
        "actor and rollout share devices": config.placement.mode == "colocate",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _columns(algorithm: Algorithm, config: RunConfig, own_pass: bool) -> tuple[str, ...]:
    """What the actor claims; the old policy's log-probs only where another role can have filled them."""
    names = {"tokens", "loss_mask", "weight_versions", "advantages", METER}
    names |= {column.name for column in algorithm.columns()} - {"old_log_probs"}
    if own_pass and config.placement.mode == "async":
        names.add("old_log_probs")
    return tuple(sorted(names))


def _advantage_columns(algorithm: Algorithm) -> tuple[str, ...]:
    """What crediting reads: rewards and the shape of rows, and what the algorithm asks for beyond them."""
    asked = {column.name for column in algorithm.advantage_columns()}
    return tuple(sorted({"tokens", "loss_mask", "rewards"} | asked))


def _operations(catalogue: Catalogue) -> list[Operation]:
    found: list[Operation] = []
    for name in catalogue.names("role"):
        role = catalogue.target("role", name)
        if issubclass(role, Role):
            found += role.operations()
    return found


def _groups(config: RunConfig, operations: tuple[Operation, ...]) -> dict[str, WorkerGroup]:
    roles = {operation.role for operation in operations}
    groups = {
        "actor": _ranks("actor", config.placement.actor),
        "rollout": WorkerGroup("rollout", config.placement.rollout.engines, config.placement.rollout.threads or SHARED),
    }
    own = {"reference": config.placement.reference, "actor-fwd": config.placement.actor_fwd}
    for role, placement in own.items():
        if role in roles:
            groups[role] = _ranks(role, placement if config.placement.mode == "async" else RankPlacement())
    return groups


def _ranks(role: str, placement: RankPlacement) -> WorkerGroup:
    return WorkerGroup(role, placement.ranks, placement.threads or SHARED)
