# SPDX-License-Identifier: Apache-2.0
"""From a configuration to a plan: operations by the algorithm's needs, roles by operations, workers by placement.

Nothing here or below looks at the placement mode: it is a preset of who shares whose devices (`placing`).

The graph, computed from data: which operations an algorithm needs, and in which order columns come to exist.

It is over operations and acyclic within a step; weights cross steps. Nothing here starts or places anything.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import cast

from relax_core.api.algorithm import Algorithm, Scope, Source
from relax_core.api.environment import Environment
from relax_core.api.errors import ConfigError
from relax_core.api.plan import Operation, Plan, WorkerGroup
from relax_core.api.role import Role
from relax_core.api.trainer import Trainer
from relax_core.config.run_config import RunConfig
from relax_core.control.feature_checks import adapters_alone, check_formats, replayed_columns
from relax_core.control.placement import (
    askers,
    check_live,
    check_pools,
    check_sleep,
    has_gpus,
    on_own_devices,
    pool_notes,
    remarks,
    taught,
    too_many,
    worker_groups,
)
from relax_core.registry.catalogue import Catalogue
from relax_core.runners.local.workers import seen_gpus


def select(operations: Sequence[Operation], goals: Mapping[str, Iterable[str]]) -> tuple[Operation, ...]:
    """The goals and whatever produces columns for them, producers before consumers.

    `goals` names operations, each with the columns that it needs beyond its own. Raises ConfigError for a column that
    nothing produces, one that two produce alike, and a cycle.
    """
    by_name = {operation.name: operation for operation in operations}
    chosen: dict[str, Operation] = {}
    producers: dict[str, list[str]] = {}
    open_columns: list[str] = []
    for goal, more in goals.items():
        if goal not in by_name:
            raise ConfigError("roles", f"a need for {goal!r}", f"no role offers it, only {', '.join(sorted(by_name))}")
        chosen[goal] = replace(by_name[goal], consumes=by_name[goal].consumes | frozenset(more))
        open_columns += sorted(chosen[goal].consumes)
    while open_columns:
        column = open_columns.pop()
        if column in producers:
            continue
        found = [operation for operation in operations if column in operation.produces]
        producers[column] = [operation.name for operation in found]
        _check_producers(column, found)
        for operation in found:
            if operation.name not in chosen:
                chosen[operation.name] = operation
                open_columns += sorted(operation.consumes)
    return _ordered(chosen, producers)


def _check_producers(column: str, found: Sequence[Operation]) -> None:
    if not found:
        raise ConfigError(
            "algorithm", f"a need for the column {column!r}", "no installed role produces it; choose another"
        )
    filters = [operation.row_filter for operation in found]
    if len(found) > 1 and (len(set(filters)) < len(filters) or "" in filters):
        names = " and ".join(operation.name for operation in found)
        raise ConfigError("roles", f"{names}, which both produce {column!r}", "give them disjoint row filters")


def _ordered(chosen: dict[str, Operation], producers: dict[str, list[str]]) -> tuple[Operation, ...]:
    needs = {
        name: {producer for column in operation.consumes for producer in producers.get(column, ()) if producer != name}
        for name, operation in sorted(chosen.items())
    }
    try:
        return tuple(chosen[name] for name in TopologicalSorter(needs).static_order())
    except CycleError as error:
        path = " -> ".join(map(str, error.args[1]))
        raise ConfigError("roles", f"the cycle {path}", "operations of one step must not wait for each other") from None


def draw(operations: Sequence[Operation]) -> str:
    """The graph in words: one operation a line, with what it reads, waits for and gives."""
    lines = []
    for operation in operations:
        consumes = ", ".join(sorted(operation.consumes)) or "tasks"
        produces = ", ".join(sorted(operation.produces)) or f"weights of {operation.updates}"
        reads = "" if operation.reads == "none" else f"  [weights: {operation.reads}]"
        lines.append(f"{operation.name:<22} {consumes} -> {produces}{reads}")
    return "\n".join(lines)


def mermaid(operations: Sequence[Operation]) -> str:
    """The graph as a Mermaid flowchart: edges carry the columns."""
    lines = ["flowchart LR"]
    for consumer in operations:
        for producer in operations:
            columns = sorted(consumer.consumes & producer.produces)
            if columns and producer is not consumer:
                lines.append(
                    f"    {_id(producer)}[{producer.name}] -- {', '.join(columns)} --> {_id(consumer)}[{consumer.name}]"
                )
        if consumer.updates:
            targets = [
                reader
                for reader in operations
                if reader.reads in ("latest", "step-start")
                and reader is not consumer
                and reader.model == consumer.updates
            ]
            lines += [f"    {_id(consumer)} -. weights .-> {_id(reader)}" for reader in targets]
    return "\n".join(lines)


def _id(operation: Operation) -> str:
    return operation.name.replace(".", "_").replace("-", "_")


METER = "rollout_log_probs"
"""Always read, so that every run measures how far the engine's log-probs are from the trainer's."""
MEMBERS = {Source.DATASET: 1, Source.PAIRS: 2}
"""Samples of a group that nobody generates."""
ROWS_AHEAD = 1
"""Steps by which rows of a dataset are ready before they are trained: nothing grows old, so it is only a buffer."""
PRODUCERS = {Source.ROLLOUT: "source", Source.DATASET: "rollout", Source.PAIRS: "rollout"}
"""By where rows come from, the role that has no part in it."""


def plan(config: RunConfig, catalogue: Catalogue, on_gpus: bool | None = None) -> Plan:
    """Raises ConfigError for what can't run, before anything starts. `on_gpus`: None looks at this machine."""
    algorithm = catalogue.build(config.learner)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError("algorithm.name", config.algorithm.chosen.name, "it is no algorithm")
    own_pass = _old_log_probs(config, algorithm)
    routes = replayed_columns(config, catalogue, algorithm.source)
    columns = tuple(sorted({*_columns(algorithm, config, own_pass), *routes}))
    _check_rewards(config, catalogue, algorithm)
    asked = askers(config, catalogue)
    check_pools(config, catalogue, asked)
    operations = taught(select(_operations(catalogue, algorithm.source), _goals(algorithm, columns)), config)
    trainer = cast(type[Trainer], catalogue.target("trainer", config.trainer.chosen.name))
    roles = tuple(dict.fromkeys(operation.role for operation in operations))
    groups = worker_groups(config, catalogue, roles, has_gpus() if on_gpus is None else on_gpus, asked)
    check_live(config, catalogue, groups)
    check_sleep(config, catalogue, groups)
    waits = _why_whole_steps(config, algorithm, trainer, groups)
    told = waits and algorithm.source is Source.ROLLOUT
    not_streamed = (f"no streaming, each step waits for all of its rows: {waits}",) if told else ()
    alone, form = adapters_alone(config, catalogue, roles)
    formats = check_formats(config, catalogue, operations, rounds=on_own_devices(config, "actor-fwd") and not alone)
    return Plan(
        mode=config.placement.mode,
        operations=operations,
        roles=roles,
        groups=groups,
        trained_columns=columns,
        advantage_columns=_advantage_columns(algorithm),
        batch_statistics=algorithm.statistics is Scope.BATCH,
        streams=not waits,
        needs_old_log_probs=own_pass,
        max_staleness=config.staleness if algorithm.source is Source.ROLLOUT else ROWS_AHEAD,
        min_valid=MEMBERS.get(algorithm.source, algorithm.min_group_size),
        source=algorithm.source,
        group_size=MEMBERS.get(algorithm.source, config.rollout.group_size + algorithm.greedy_baseline),
        greedy=config.rollout.group_size if algorithm.greedy_baseline else None,
        adapters_alone=alone,
        fit_columns={fit: tuple(sorted(_fit_columns(algorithm, fit))) for fit in algorithm.fits},
        warm_up_steps=config.critic.warmup_steps if "critic" in algorithm.fits else 0,
        notes=(
            *not_streamed,
            *form,
            *formats,
            *pool_notes(config, asked, groups),
            *remarks(groups),
            *too_many(groups, len(seen_gpus(os.environ))),
        ),
    )


def _check_rewards(config: RunConfig, catalogue: Catalogue, algorithm: Algorithm) -> None:
    """Check that an algorithm which, with its options, reads rewards has some; its class alone does not tell."""
    environments = (config.environment, *config.environments)
    judged = config.rewards or all(
        cast(type[Environment], catalogue.target("environment", one.name)).gives_reward for one in environments
    )
    if algorithm.source is Source.ROLLOUT and algorithm.reads_rewards and not judged:
        names = ", ".join(catalogue.names("reward")) or "none is installed"
        fix = f'{config.algorithm.name}, as it is set, learns from them: write rewards = ["NAME"] ({names})'
        raise ConfigError("rewards", "nothing", fix)


def _old_log_probs(config: RunConfig, algorithm: Algorithm) -> bool:
    """Whether a pass for the old policy runs: with one update a step the ratio is exactly 1 and none does."""
    wants = any(column.name == "old_log_probs" for column in algorithm.columns())
    wants |= config.model.routing_replay == "recompute"
    return bool(algorithm.prepared()) or (wants and config.batch.updates_per_step > 1)


def _why_whole_steps(
    config: RunConfig, algorithm: Algorithm, trainer: type[Trainer], groups: Mapping[str, WorkerGroup]
) -> str:
    """Why the actor can't begin before all rows of a step are there; empty where it can.

    Every count is late while rows still come, also that of groups (a step may be closed short), and only one may be.
    """
    name = " and ".join(one.name for one in config.algorithms)
    counts = sorted(algorithm.denominators)
    reasons = {
        "rows of a dataset are there at once": algorithm.source is not Source.ROLLOUT,
        "batch.stream is false": not config.batch.stream,
        "the run is deterministic": config.deterministic,
        f"{name} takes statistics over the whole batch": algorithm.statistics is Scope.BATCH
        or bool(algorithm.prepared()),
        f"batch.updates_per_step is {config.batch.updates_per_step}": config.batch.updates_per_step > 1,
        f"{config.trainer.chosen.name} needs all rows of an update at once": not trainer.streams,
        f"{name} does not say what its loss is divided by (Algorithm.denominators)": not counts,
        f"the loss of {name} is divided by {' and '.join(counts)}, of which only one may be late": len(counts) > 1,
        "the actor shares its devices with those that it would wait for": _has_neighbours("actor", groups),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _has_neighbours(role: str, groups: Mapping[str, WorkerGroup]) -> bool:
    return any(group.devices & groups[role].devices for name, group in groups.items() if name != role)


def _columns(algorithm: Algorithm, config: RunConfig, own_pass: bool) -> tuple[str, ...]:
    """Return the columns that the actor claims; the old policy's log-probs only where another role can have filled
    them."""
    names = {"tokens", "loss_mask", *(("media",) if config.media else ())}
    if algorithm.source is Source.ROLLOUT:
        names |= {"weight_versions", "advantages", METER}
    names |= {column.name for column in algorithm.columns()} - {"old_log_probs"}
    if own_pass and on_own_devices(config, "actor-fwd") and config.model.routing_replay != "recompute":
        names.add("old_log_probs")
    return tuple(sorted(names))


def _advantage_columns(algorithm: Algorithm) -> tuple[str, ...]:
    """Return the columns that crediting reads: rewards and the shape of rows, and those that the algorithm asks for
    beyond them."""
    asked = {column.name for column in algorithm.advantage_columns()}
    return tuple(sorted({"tokens", "loss_mask", "rewards"} | asked))


def _goals(algorithm: Algorithm, columns: tuple[str, ...]) -> dict[str, Collection[str]]:
    """Return the operations that the step needs, with their columns; rows that were written beforehand are not
    credited."""
    if algorithm.source is not Source.ROLLOUT:
        return {"actor.fit": columns}
    credited = {column.name for column in algorithm.advantage_columns()}
    fits = {f"{fit}.fit": _fit_columns(algorithm, fit) for fit in algorithm.fits}
    return {"actor.fit": columns, "advantages.compute": credited, **fits}


def _fit_columns(algorithm: Algorithm, fit: str) -> set[str]:
    """Return the columns read by a role that trains on the actor's rows."""
    return {"tokens", "loss_mask", "weight_versions"} | {column.name for column in algorithm.fit_columns(fit)}


def _operations(catalogue: Catalogue, source: Source) -> list[Operation]:
    """Return the operations of all roles but the one that would bring rows from elsewhere."""
    found: list[Operation] = []
    for name in catalogue.names("role"):
        role = catalogue.target("role", name)
        if issubclass(role, Role) and name != PRODUCERS[source]:
            found += role.operations()
    return found
