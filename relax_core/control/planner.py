# SPDX-License-Identifier: Apache-2.0
"""The planner: turn a configuration into a plan, the operations that the algorithm needs and the workers to run them.

The graph of operations is acyclic within a step; only weights pass from step to step. The planner refuses combinations
of algorithm, trainer, engine and transport that can't work. A missing feature of a device (a GPU without bfloat16) is
found only when its trainer or engine starts. The planner starts no process. No decision depends on the placement
mode, which is only a preset of shared devices.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import cast

from relax_core.api.algorithm import Algorithm, Scope, Source
from relax_core.api.environment import Environment
from relax_core.api.errors import ConfigError
from relax_core.api.family import ROUTED_COLUMNS
from relax_core.api.model_folder import context_reason, model_context, routing
from relax_core.api.plan import Operation, Plan, WorkerGroup
from relax_core.api.role import Role
from relax_core.api.trainer import Trainer
from relax_core.api.weights import WeightTransport
from relax_core.config.run_config import RunConfig
from relax_core.config.tables import DataTable
from relax_core.control.corrections import correction_notes, truncation_notes
from relax_core.control.placement import (
    engine_class,
    has_gpus,
    has_own_devices,
    placement_notes,
    pool_users,
    teacher_operations,
    worker_groups,
)
from relax_core.engines.scaling import closed, fixed_size
from relax_core.registry.catalogue import Catalogue
from relax_core.runners.local.workers import visible_gpus

MEMBERS = {Source.DATASET: 1, Source.PAIRS: 2}
"""source of rows that are not generated -> number of samples of a group."""
ROWS_AHEAD = 1
"""Number of steps that a dataset's rows may be ready ahead of training; only a buffer: these rows never get stale."""
UNUSED_PRODUCERS = {Source.ROLLOUT: "source", Source.DATASET: "rollout", Source.PAIRS: "rollout"}
"""source of rows -> role that the run does not use, because the role produces rows of another source."""


def plan(config: RunConfig, catalogue: Catalogue, on_gpus: bool | None = None) -> Plan:
    """Plan a run. Raises ConfigError if the configuration can't run. `on_gpus`: None checks this machine for GPUs."""
    algorithm = catalogue.build(config.learner)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError("algorithm.name", config.algorithm.chosen.name, "choose an installed algorithm")
    samples = algorithm.source is Source.ROLLOUT

    # Log-probs of the old policy need a pass only with several updates per step: with one, the ratio is exactly 1.
    read = {column.name for column in algorithm.columns()}
    recomputes_routing = config.model.routing_replay == "recompute"
    own_pass = bool(algorithm.prepared()) or (
        config.batch.updates > 1 and ("old_log_probs" in read or recomputes_routing)
    )
    columns = {"tokens", "loss_mask", *(("media",) if config.media else ())} | read - {"old_log_probs"}
    columns |= set(_replayed_columns(config, catalogue, algorithm.source))
    if samples:  # every run measures the difference of the engine's and the trainer's log-probs
        columns |= {"weight_versions", "advantages", "rollout_log_probs"}
    if own_pass and has_own_devices(config, "actor-fwd") and not recomputes_routing:
        columns.add("old_log_probs")
    credited = {column.name for column in algorithm.advantage_columns()}
    fit_columns = {
        fit: tuple(sorted({"tokens", "loss_mask", "weight_versions"} | {c.name for c in algorithm.fit_columns(fit)}))
        for fit in algorithm.fits
    }
    goals: dict[str, Collection[str]] = {"actor.fit": columns}
    if samples:  # rows of a dataset get no advantages
        goals |= {"advantages.compute": credited, **{f"{fit}.fit": names for fit, names in fit_columns.items()}}

    if samples and algorithm.reads_rewards and not config.rewards:  # of the instance: options may change it
        environments = [catalogue.target("environment", one.name) for one in (config.environment, *config.environments)]
        if not all(cast(type[Environment], one).gives_reward for one in environments):
            names = ", ".join(catalogue.names("reward")) or "none is installed"
            fix = f'{config.algorithm.name}, as configured, learns from rewards: write rewards = ["NAME"] ({names})'
            raise ConfigError("rewards", "nothing", fix)

    rewards = [*(reward.known_as for reward in config.rewards), "environment"]
    for name in sorted(algorithm.reward_names()):
        if name not in rewards and name.partition("/")[0] not in rewards[:-1]:
            fix = f"name one of {', '.join(rewards)}, or REWARD/PART for a part of a reward's score"
            raise ConfigError("algorithm", f"the reward {name!r}", fix)

    users = pool_users(config, catalogue)
    offered: list[Operation] = []
    for name in catalogue.names("role"):
        role = catalogue.target("role", name)
        if issubclass(role, Role) and name != UNUSED_PRODUCERS[algorithm.source]:
            offered += role.operations()
    operations = teacher_operations(select(offered, goals), config)
    roles = tuple(dict.fromkeys(operation.role for operation in operations))
    if config.reference.path and "reference" not in roles:
        fix = f"{config.algorithm.name}, as configured, compares with no reference: remove it, or set algorithm.kl_coef"
        raise ConfigError("reference.path", config.reference.path, fix)
    groups = worker_groups(config, catalogue, roles, has_gpus() if on_gpus is None else on_gpus, users)

    whole_steps = _why_whole_steps(config, catalogue, algorithm, groups)
    notes = [f"no streaming, each step waits for all of its rows: {whole_steps}"] if whole_steps and samples else []
    notes += _idle_keys(config, samples)
    if reason := context_reason(config.model.path):
        notes.append(f"the model's context is {model_context(config.model.path)} tokens{reason}")
    adapters_alone = False
    if config.model.lora is not None and "rollout" in roles:
        folded = _why_folded(config, catalogue)
        adapters_alone = not folded
        payload = f"adapters are folded into the weights for every publish ({config.weights.payload}): {folded}"
        notes.append(
            payload
            if folded
            else "adapters are published alone; engines apply them to the model that they started with"
        )
    _check_formats(config, catalogue, operations, adapters_alone)
    if config.model.dtype != config.engine_dtype and any(one.name.startswith("rollout.") for one in operations):
        trained, served = config.model.dtype, config.engine_dtype
        notes.append(f"trainers compute in {trained}, engines in {served}: weights are published in {served}")
    if samples:
        notes += (*truncation_notes(config, catalogue), *correction_notes(config, catalogue))
    notes += placement_notes(config, users, groups, len(visible_gpus(os.environ)))
    planned = Plan(
        mode=config.placement.mode,
        media_pipeline=str(catalogue.part("relax_media_pipeline")) if config.media else "",
        operations=operations,
        roles=roles,
        groups=groups,
        trained_columns=tuple(sorted(columns)),
        advantage_columns=tuple(sorted({"tokens", "loss_mask", "rewards"} | credited)),
        batch_statistics=algorithm.statistics is Scope.BATCH,
        streams=not whole_steps,
        needs_old_log_probs=own_pass,
        max_staleness=config.staleness if samples else ROWS_AHEAD,
        min_valid=MEMBERS.get(algorithm.source, algorithm.min_group_size),
        source=algorithm.source,
        group_size=MEMBERS.get(algorithm.source, config.rollout.group_size + algorithm.greedy_baseline),
        greedy=config.rollout.group_size if algorithm.greedy_baseline else None,
        adapters_alone=adapters_alone,
        fit_columns=fit_columns,
        warm_up_steps=config.critic.warmup_steps if "critic" in algorithm.fits else 0,
        notes=tuple(notes),
    )
    if config.autoscale is not None and "rollout" in groups and (fixed := fixed_size(config, planned, "rollout")):
        field, got, fix = fixed
        raise ConfigError(field, got, f"{fix}, or remove [autoscale]: the number of engines can't change")
    external = config.placement.rollout.external.addresses
    if external and "rollout" in groups and (fixed := closed(config, planned, "rollout")):
        field, got, fix = fixed
        raise ConfigError(field, got, f"{fix}, or remove placement.rollout.external: no engine can join")
    return planned


def _idle_keys(config: RunConfig, samples: bool) -> Iterator[str]:
    """Describe the keys that are set and have no effect in this run; a stage may inherit them from the run."""
    data, unset = config.data, DataTable(train=config.data.train)
    idle: tuple[str, ...]
    if samples:
        idle, kind = ("max_row_tokens", "train_on"), "rows of a dataset, and this run samples its rows"
    else:
        idle, kind = ("max_prompt_tokens",), "sampled rows, and this run trains on the rows of a dataset"
        if config.filters:
            names = ", ".join(one.name for one in config.filters)
            yield f"filters judge samples, so they have no effect on the rows of a dataset: {names}"
    if keys := [f"data.{key}" for key in idle if getattr(data, key) != getattr(unset, key)]:
        yield f"{' and '.join(keys)}: no effect, for {kind}"
    if config.eval.sets and config.eval.size is not None:
        yield "eval.size: no effect, for tasks held out of data.train, and [[eval.sets]] names the tasks"


def _replayed_columns(config: RunConfig, catalogue: Catalogue, source: Source) -> tuple[str, ...]:
    """Return the columns that the actor reads for routing replay. Raises ConfigError if replay is impossible."""
    replay, field = config.model.routing_replay, "model.routing_replay"
    if replay == "off":
        return ()
    trainer = config.trainer.chosen.name
    if not cast(type[Trainer], catalogue.target("trainer", trainer)).replays_routing:
        raise ConfigError(field, replay, f"trainer {trainer} can't replay routing: use torch, or leave it out")
    if (config.model.path / "config.json").is_file() and routing(config.model.path) is None:
        raise ConfigError(field, replay, f"{config.model.path} has no experts to route to: leave it out")
    if replay == "recompute":
        if config.batch.updates == 1:
            fix = "with one update per step this changes nothing: leave it out, or raise batch.updates_per_step"
            raise ConfigError(field, replay, fix)
        return ()
    if source is not Source.ROLLOUT:
        fix = "rows of a dataset were not sampled here, so their routed experts are unknown: leave it out"
        raise ConfigError(field, replay, fix)
    engine = config.engine.chosen.name
    if not engine_class(catalogue, engine).capabilities.routed_experts:
        able = [name for name in catalogue.names("engine") if engine_class(catalogue, name).capabilities.routed_experts]
        use = " or ".join(able) or "another"
        fix = f"engine {engine} does not report the experts that its tokens visited: use {use}, or leave it out"
        raise ConfigError(field, replay, fix)
    return ROUTED_COLUMNS


def _why_whole_steps(
    config: RunConfig, catalogue: Catalogue, algorithm: Algorithm, groups: Mapping[str, WorkerGroup]
) -> str:
    """Return why the actor can't begin before all rows of a step are ready; empty if it can.

    While rows still arrive, every divisor of the loss is unknown, even the number of groups, as a step may end with
    fewer groups. A trainer can divide the gradients by one count afterwards, but not by several counts.
    """
    trainer = config.trainer.chosen.name
    name = " and ".join(one.name for one in config.algorithms)
    counts = sorted(algorithm.denominators)
    own = groups["actor"].devices
    reasons = {
        "rows of a dataset are all ready at once": algorithm.source is not Source.ROLLOUT,
        "batch.stream is false": not config.batch.stream,
        "the run is deterministic": config.deterministic,
        f"{name} takes statistics over the whole batch": algorithm.statistics is Scope.BATCH
        or bool(algorithm.prepared()),
        f"batch.updates_per_step is {config.batch.updates_per_step}": config.batch.updates_per_step > 1,
        f"batch.passes is {config.batch.passes}": config.batch.passes > 1,
        f"{trainer} needs all rows of an update at once": not cast(
            type[Trainer], catalogue.target("trainer", trainer)
        ).streams,
        f"{name} does not say what its loss is divided by (Algorithm.denominators)": not counts,
        f"the loss of {name} is divided by {' and '.join(counts)}, and streaming allows one divisor": len(counts) > 1,
        "the actor shares its devices with another worker group": any(
            group.devices & own for role, group in groups.items() if role != "actor"
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _why_folded(config: RunConfig, catalogue: Catalogue) -> str:
    """Return why adapters are folded into whole weights; empty if they are published alone, at 1/1000 of the size."""
    lora, engine, transport = config.model.lora, config.engine.name, config.weights.name
    payloads = cast(type[WeightTransport], catalogue.target("weight-transport", transport)).payloads
    reasons = {
        "model.lora.dora scales whole rows of a weight": lora is not None and lora.dora,
        "model.lora.modules_to_save are trained whole": lora is not None and bool(lora.modules_to_save),
        f"engine {engine} takes no adapters": not engine_class(catalogue, engine).capabilities.lora,
        f"transport {transport} moves no adapters": "lora" not in payloads,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _check_formats(
    config: RunConfig, catalogue: Catalogue, operations: Iterable[Operation], adapters_alone: bool
) -> None:
    """Refuse number formats in which trainer or engine can't compute, and rounded weights for an actor-fwd.

    Refuse profiles that the trainer can't record, and of ranks that the actor does not have, too.
    """
    names = {operation.name for operation in operations}
    trainer, engine, field = config.trainer.chosen.name, config.engine.chosen.name, "rollout.dtype"
    trained, served = config.model.dtype, config.engine_dtype
    kind = cast(type[Trainer], catalogue.target("trainer", trainer))
    if trained not in kind.dtypes:
        raise ConfigError("model.dtype", trained, f"{trainer} computes in {', '.join(kind.dtypes)}")
    head = config.model.head_dtype
    if head not in ("", trained) and not kind.float32_head:
        fix = f"trainer {trainer} computes logits in model.dtype: leave this key out, or use torch"
        raise ConfigError("model.head_dtype", head, fix)
    if config.profile.steps and not kind.profiles:
        fix = f"trainer {trainer} can't record profiles: remove this key"
        raise ConfigError("profile.steps", list(config.profile.steps), fix)
    ranks = config.placement.actor.ranks
    if config.profile.steps and (absent := [rank for rank in config.profile.ranks if rank >= ranks]):
        fix = f"name ranks from 0 to {ranks - 1}: placement.actor.ranks is {ranks}"
        raise ConfigError("profile.ranks", absent, fix)
    if not any(name.startswith("rollout.") for name in names):
        return
    can = engine_class(catalogue, engine).capabilities
    if served not in can.dtypes:
        asked = field if config.rollout.dtype else "model.dtype"
        raise ConfigError(asked, served, f"{engine} computes in {', '.join(can.dtypes)}")
    if head not in ("", served) and not can.float32_head:
        others = [name for name in catalogue.names("engine") if engine_class(catalogue, name).capabilities.float32_head]
        fix = f"engine {engine} computes logits in {served}: use {' or '.join(others) or 'another engine'}, or leave this out"
        raise ConfigError("model.head_dtype", head, fix)
    rounds = has_own_devices(config, "actor-fwd") and not adapters_alone and served not in (trained, "float32")
    if rounds and "actor_fwd.log_probs" in names:
        fix = f"set it to {trained} or float32, or keep actor-fwd on the actor's workers (placement.mode)"
        why = f"gets rounded weights, as engines do, while the actor computes in {trained}"
        raise ConfigError(field, served, f"actor-fwd has devices of its own and {why}: {fix}")


def select(operations: Sequence[Operation], goals: Mapping[str, Iterable[str]]) -> tuple[Operation, ...]:
    """Choose the goals and the operations that produce their columns; return producers before consumers.

    `goals`: name of an operation -> columns that it needs in addition to its `consumes`. Raises ConfigError for a
    column without a producer, for two producers without disjoint row filters, and for a cycle.
    """
    by_name = {operation.name: operation for operation in operations}
    chosen: dict[str, Operation] = {}
    producers: dict[str, list[str]] = {}
    open_columns: list[str] = []
    for goal, more in goals.items():
        if goal not in by_name:
            raise ConfigError("roles", f"a need for {goal!r}", f"roles only offer {', '.join(sorted(by_name))}")
        chosen[goal] = replace(by_name[goal], consumes=by_name[goal].consumes | frozenset(more))
        open_columns += sorted(chosen[goal].consumes)
    while open_columns:
        column = open_columns.pop()
        if column in producers:
            continue
        found = [operation for operation in operations if column in operation.produces]
        producers[column] = [operation.name for operation in found]
        if not found:
            fix = "no installed role produces it; choose another algorithm"
            raise ConfigError("algorithm", f"a need for the column {column!r}", fix)
        filters = [operation.row_filter for operation in found]
        if len(found) > 1 and (len(set(filters)) < len(filters) or "" in filters):
            names = " and ".join(operation.name for operation in found)
            raise ConfigError("roles", f"{names}, which both produce {column!r}", "give them disjoint row filters")
        for operation in found:
            if operation.name not in chosen:
                chosen[operation.name] = operation
                open_columns += sorted(operation.consumes)
    needs = {
        name: {producer for column in operation.consumes for producer in producers.get(column, ()) if producer != name}
        for name, operation in sorted(chosen.items())
    }
    try:
        return tuple(chosen[name] for name in TopologicalSorter(needs).static_order())
    except CycleError as error:
        path = " -> ".join(map(str, error.args[1]))
        raise ConfigError("roles", f"the cycle {path}", "no operation may wait for its own result") from None


def draw(operations: Sequence[Operation]) -> str:
    """Return the graph as text: a line for each operation, with the columns in and out and the weights it reads."""
    lines = []
    for operation in operations:
        consumes = ", ".join(sorted(operation.consumes)) or "tasks"
        produces = ", ".join(sorted(operation.produces)) or f"weights of {operation.updates}"
        reads = "" if operation.reads == "none" else f"  [weights: {operation.reads}]"
        lines.append(f"{operation.name:<22} {consumes} -> {produces}{reads}")
    return "\n".join(lines)


def mermaid(operations: Sequence[Operation]) -> str:
    """Return the graph as a Mermaid flowchart, with columns on its edges."""
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
