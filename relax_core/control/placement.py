# SPDX-License-Identifier: Apache-2.0
"""The placement of a plan: worker groups, the names of their devices, and the parts that each group offloads.

A device is only a name here, `gpu:0` or `cpu:0`. Groups with a device in common use it one after another. Engine pools
and teachers are placed here too. Nothing is started.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, cast

from relax_core.api.batch import TEACHER_INDEX
from relax_core.api.engine import Engine
from relax_core.api.environment import Environment
from relax_core.api.errors import ConfigError
from relax_core.api.plan import OffloadPart, Operation, WorkerGroup
from relax_core.api.reward import Reward
from relax_core.api.weights import WeightTransport
from relax_core.config.checks import no_pool
from relax_core.config.run_config import Choice, RunConfig
from relax_core.config.tables import EngineTable, RankPlacement
from relax_core.engines.factories import AUXILIARY_GROUP
from relax_core.registry.catalogue import Catalogue

ROLLOUT, TEACHER = "rollout", "teacher"
TABLES = {"actor": "actor", ROLLOUT: "rollout", "reference": "reference", "actor-fwd": "actor_fwd", TEACHER: "teacher",
          "critic": "critic"}  # fmt: skip
"""core role that works on devices -> its table in `[placement]`. Roles of plugins are in `placement.roles`."""
SCORED = "teacher_log_probs"
"""The only column that an engine can produce as a teacher: log-probs of given tokens."""
THREADS = 1
"""Default number of threads of a process: processes share the cores, and spinning threads would slow them down."""

PoolUsers: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]
"""engine pool -> its users, as (role that opens the pool; name of the reward, environment or teacher)."""


def pool_users(config: RunConfig, catalogue: Catalogue) -> PoolUsers:
    """Find the users of each engine pool. Build the rewards and environments, because an option may name a pool.

    The rollout opens pools for rewards and environments, the teacher role opens pools for teachers. Raises ConfigError
    for a pool that both would open, a pool that is used but not configured or the reverse, and a teacher whose pool
    can't score.
    """
    users: dict[str, list[tuple[str, str]]] = {}
    choices: list[tuple[Choice, str]] = [(choice, "reward") for choice in config.rewards]
    choices += [(choice, "environment") for choice in (config.environment, *config.environments)]
    for choice, kind in choices:
        for name in cast(Reward | Environment, catalogue.build(choice.chosen)).needs_engines:
            users.setdefault(name, []).append((ROLLOUT, f"{kind} {choice.name}"))
    for at, teacher in enumerate(config.teachers):
        if teacher.engine:
            users.setdefault(teacher.engine, []).append((TEACHER, f"teachers.{at}"))
    for name, asking in users.items():
        if config.pool(name) is None:
            raise ConfigError("engines", f"no pool {name!r}, which {asking[0][1]} uses", no_pool(config))
        if len({role for role, _ in asking}) > 1:
            fix = "a pool can't serve a teacher and rewards or environments: configure two pools with the same path"
            raise ConfigError("engines", f"{name}, which {' and '.join(user for _, user in asking)} use", fix)
    for at, pool in enumerate(config.engines):
        if pool.name not in users:
            fix = "remove the pool, or name it in a reward, an environment or a teacher"
            raise ConfigError(f"engines.{at}.name", f"{pool.name}, a pool without users", fix)
    for at, teacher in enumerate(config.teachers):
        scoring = config.pool(teacher.engine) if teacher.engine else None
        if scoring is None:
            continue
        field, engine = f"teachers.{at}.engine", config.backend_of(scoring).name
        if not engine_class(catalogue, engine).capabilities.score:
            fix = "choose another engine for the pool, or write path instead, so that a trainer computes the log-probs"
            raise ConfigError(field, f"{scoring.name}: engine {engine} can't score given tokens", fix)
        if config.media:
            fix = "engines score text only: write path instead, so that a trainer computes the log-probs"
            raise ConfigError(field, f"{scoring.name}, in a run with media", fix)
    return users


def teacher_operations(operations: Sequence[Operation], config: RunConfig) -> tuple[Operation, ...]:
    """Give each teacher its own operations, with a filter for its rows.

    Raises ConfigError if no teacher is configured, if two have the same filter, and if a teacher on engines must
    produce a column that engines can't compute. An overlap of different filters is found only when tasks are read.
    """
    columns = {column for operation in operations if operation.role == TEACHER for column in operation.produces}
    if not any(operation.role == TEACHER for operation in operations):
        return tuple(operations)
    if not config.teachers:
        fix = 'the algorithm needs a teacher: write teachers = "FOLDER", or [[teachers]] with path and only'
        raise ConfigError("teachers", f"nothing, with algorithm {config.algorithm.name}", fix)
    seen: dict[str, int] = {}
    for number, teacher in enumerate(config.teachers):
        only = "=".join(part.strip() for part in teacher.only.split("=", 1))
        if only in seen:
            got = f"{teacher.only or 'nothing'}, as teachers.{seen[only]} has"
            raise ConfigError(f"teachers.{number}.only", got, 'give each teacher its own tasks: only = "domain=maths"')
        seen[only] = number
    if "" in seen and len(config.teachers) > 1:
        fix = 'each of several teachers needs a filter, such as only = "domain=code"'
        raise ConfigError(f"teachers.{seen['']}.only", "nothing, which matches every task", fix)
    more = sorted(columns - {SCORED})
    for number, teacher in enumerate(config.teachers):
        if teacher.engine and more:
            fix = "an engine computes only log-probs of given tokens: write path instead of engine"
            raise ConfigError(f"teachers.{number}.engine", f"{teacher.engine}, to produce {' and '.join(more)}", fix)
    if len(config.teachers) == 1:
        return tuple(operations)
    found: list[Operation] = []
    for operation in operations:
        if operation.role != TEACHER:
            found.append(operation)
            continue
        verb, consumes = operation.name.partition(".")[2], operation.consumes | {TEACHER_INDEX.name}
        found += [
            replace(operation, name=f"{TEACHER}-{number}.{verb}", consumes=consumes, row_filter=teacher.only)
            for number, teacher in enumerate(config.teachers)
        ]
    return tuple(found)


def worker_groups(
    config: RunConfig, catalogue: Catalogue, roles: Collection[str], on_gpus: bool, users: PoolUsers
) -> dict[str, WorkerGroup]:
    """Return role -> worker group for a run, including the worker groups of its engine pools.

    `on_gpus`: processes get a GPU unless their table says otherwise. Raises ConfigError for a table of an unknown role,
    and for groups that can't share their devices.
    """
    placement = config.placement
    for role in placement.roles:
        if role in TABLES or role not in catalogue.names("role"):
            known = ", ".join(sorted(set(catalogue.names("role")) - TABLES.keys()))
            fix = f"the name must be a role of a plugin; installed: {known or 'none'}"
            raise ConfigError("placement.roles", role, fix)
    by_ranks = not config.teachers or any(teacher.path for teacher in config.teachers)
    placed = [role for role in TABLES if (role in roles and (role != TEACHER or by_ranks)) or role == "actor"]
    placed += [role for role in placement.roles if role in roles]
    tables = {role: placement.of(TABLES.get(role, role)) for role in placed}
    num_gpus: dict[str, int] = {}
    for role, table in tables.items():
        if isinstance(table, RankPlacement):
            each = float(on_gpus) if table.gpus_per_rank is None else table.gpus_per_rank
            num_gpus[role] = math.ceil(table.ranks * each)
        else:
            num_gpus[role] = math.ceil(table.engines * _gpus_per_engine(config, catalogue, on_gpus))
    devices: dict[str, frozenset[str]] = {}
    homes = {role: placement.home(TABLES.get(role, role)) for role in placed}
    first = 0
    for number, home in enumerate(
        dict.fromkeys(homes.values())
    ):  # each home gets a block of devices; roles that share a home use the block's first devices
        sharing = [role for role in placed if homes[role] == home]
        for role in sharing:
            own = {f"gpu:{first + index}" for index in range(num_gpus[role])}
            devices[role] = frozenset(own or {f"cpu:{number}"})
        first += max(num_gpus[role] for role in sharing)
    groups: dict[str, WorkerGroup] = {}
    for role, table in tables.items():
        size = table.ranks if isinstance(table, RankPlacement) else table.engines
        parts = _offloaded_parts(config, catalogue, role, num_gpus[role] > 0)
        groups[role] = WorkerGroup(role, size, table.threads or THREADS, devices[role], parts)
    if (group := groups.pop(TEACHER, None)) is not None:  # several teachers use the same devices in turn
        names = [f"{TEACHER}-{number}" for number, teacher in enumerate(config.teachers) if teacher.path]
        groups |= {name: replace(group, name=name) for name in (names if len(config.teachers) > 1 else [TEACHER])}
    groups |= dict(_pool_groups(config, catalogue, users, roles, on_gpus, groups))
    _check_sharing(config, catalogue, groups)
    return groups


def _gpus_per_engine(config: RunConfig, catalogue: Catalogue, on_gpus: bool) -> float:
    """Return the GPUs of one engine by its parallel options. Raises ConfigError if `gpus_per_engine` differs."""
    engine, name = catalogue.build(config.engine.chosen), config.engine.chosen.name
    spread, given = engine.devices() if isinstance(engine, Engine) else 0, config.placement.rollout.gpus_per_engine
    each = ((spread or 1) if on_gpus else 0) if given is None else given
    too_few = each < spread and spread > 1 and (on_gpus or each > 0)  # on a CPU its parts are processes of one engine
    if (each > 1 and spread not in (0, each)) or too_few:
        fix = f"engine {name}, as configured, uses {spread}: set {spread}, leave it out, or change its parallel options"
        raise ConfigError("placement.rollout.gpus_per_engine", each, fix)
    return each


def _offloaded_parts(config: RunConfig, catalogue: Catalogue, role: str, on_gpu: bool) -> tuple[OffloadPart, ...]:
    """Return the parts that a role offloads; on a CPU, only parts whose content need not be kept."""
    if role in ("actor", "critic"):
        return ("weights", "optimizer", "gradients") if on_gpu else ("gradients",)
    if role != ROLLOUT:
        return ("weights",) if on_gpu else ()
    return _engine_parts(catalogue, config.engine.chosen.name, on_gpu)


def _engine_parts(catalogue: Catalogue, engine: str, on_gpu: bool) -> tuple[OffloadPart, ...]:
    """Return the parts of an engine's memory that the engine can offload."""
    able = engine_class(catalogue, engine).capabilities
    if not on_gpu and not able.offloads_on_cpu:
        return ()
    return cast(tuple[OffloadPart, ...], tuple(sorted(able.offloads & ({"weights", "kv"} if on_gpu else {"kv"}))))


def _check_sharing(config: RunConfig, catalogue: Catalogue, groups: Mapping[str, WorkerGroup]) -> None:
    """Refuse groups that can't share their devices.

    A live weight transport copies from memory to memory, so the trainer and the engines must be loaded together. An
    engine that can't offload its memory must not share a GPU.
    """
    rollout = groups.get(ROLLOUT)
    if rollout is None:
        return
    chosen = config.weights.chosen
    live = cast(type[WeightTransport], catalogue.target(chosen.kind, chosen.name)).live
    if live and "weights" in rollout.offloads and rollout.devices & groups["actor"].devices:
        fix = "engines and trainer share GPUs and are never loaded together: choose shared-memory or disk"
        raise ConfigError("weights.name", chosen.name, fix)
    neighbours = sorted(name for name, group in groups.items() if name != ROLLOUT and group.devices & rollout.devices)
    if neighbours and not rollout.offloads and any(name.startswith("gpu:") for name in rollout.devices):
        able = [name for name in catalogue.names("engine") if engine_class(catalogue, name).capabilities.offloads]
        got = f"{config.engine.chosen.name}, which can't offload memory, on GPUs shared with {_listed(neighbours)}"
        use = " or ".join(able) or "another"
        fix = f'use {use}, or give it GPUs of its own: placement = "hybrid" or placement.rollout.share = "own"'
        if all(name.startswith(AUXILIARY_GROUP) for name in neighbours):
            fix = f'use {use}, or give the pool devices of its own: devices = "own"'
        raise ConfigError("engine.name", got, fix)


def _pool_groups(
    config: RunConfig, catalogue: Catalogue, users: PoolUsers, roles: Collection[str], on_gpus: bool,
    taken: Mapping[str, WorkerGroup],
) -> Iterator[tuple[str, WorkerGroup]]:  # fmt: skip
    """Make a worker group for each engine pool with a user in the plan.

    A pool gets devices of its own, or shares the first devices of the policy's engines.
    """
    devices = {name for group in taken.values() for name in group.devices}
    free = {kind: 1 + max((int(name[4:]) for name in devices if name.startswith(kind)), default=-1)
            for kind in ("gpu:", "cpu:")}  # fmt: skip
    for pool in config.engines:
        if not any(role in roles for role, _ in users.get(pool.name, ())):
            continue
        each = float(on_gpus) if pool.gpus_per_engine is None else pool.gpus_per_engine
        num_gpus, name = math.ceil(pool.count * each), AUXILIARY_GROUP + pool.name
        if pool.devices != "own":
            engine, rollout = config.backend_of(pool).name, taken.get(ROLLOUT)
            shared = _shared_devices(pool, engine, rollout, num_gpus)
            parts = _engine_parts(catalogue, engine, num_gpus > 0)
            if num_gpus and not parts:
                fix = 'choose an engine that can, or set devices = "own"'
                raise ConfigError(
                    f"engines.{pool.name}.devices", f"{pool.devices}, with {engine}, which can't offload memory", fix
                )
            threads = pool.threads or THREADS
            yield name, WorkerGroup(name, pool.count, threads, shared, parts)
            continue
        kind = "gpu:" if num_gpus else "cpu:"
        own = frozenset(f"{kind}{free[kind] + number}" for number in range(num_gpus or 1))
        free[kind] += len(own)
        yield name, WorkerGroup(name, pool.count, pool.threads or THREADS, own)


def _shared_devices(pool: EngineTable, engine: str, rollout: WorkerGroup | None, num_gpus: int) -> frozenset[str]:
    """Return the devices that a pool shares with the policy's engines. Raises ConfigError for too few devices."""
    field = f"engines.{pool.name}.devices"
    if rollout is None:
        raise ConfigError(field, f"{pool.devices}, in a run without engines of the policy", 'set devices = "own"')
    theirs = sorted(rollout.devices, key=lambda name: (len(name), name))
    if not num_gpus:
        if theirs[0].startswith("gpu:"):
            fix = 'a pool on the CPU can\'t share GPUs: set devices = "own"'
            raise ConfigError(field, f"{pool.devices}, with gpus_per_engine = 0, while the policy has GPUs", fix)
        return frozenset(theirs)
    gpus = [name for name in theirs if name.startswith("gpu:")]
    if num_gpus > len(gpus):
        fix = 'lower count or gpus_per_engine, raise placement.rollout.engines, or set devices = "own"'
        got = f"{pool.devices}: {pool.count} {engine} engines on {num_gpus} GPUs, and the policy's have {len(gpus)}"
        raise ConfigError(field, got, fix)
    return frozenset(gpus[:num_gpus])


def has_own_devices(config: RunConfig, role: str) -> bool:
    """Return True if a role shares no device with the actor."""
    return config.placement.home(TABLES[role]) != config.placement.home("actor")


def engine_class(catalogue: Catalogue, name: str) -> type[Engine]:
    """Import the class of an engine."""
    return cast(type[Engine], catalogue.target("engine", name))


def has_gpus(devices: Path = Path("/dev")) -> bool:
    """Return True if this process may use an NVIDIA GPU, judged by device files, without loading a driver."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(devices.glob("nvidia[0-9]*"))


def placement_notes(
    config: RunConfig, users: PoolUsers, groups: Mapping[str, WorkerGroup], num_gpus: int
) -> Iterator[str]:
    """Describe the engine pools and their users, the groups that share devices, and the parts that these offload.

    `num_gpus` is the number of GPUs visible on this machine.
    """
    for name, asking in users.items():
        pool = config.pool(name)
        if pool is not None and AUXILIARY_GROUP + name in groups:
            engines = f"{pool.count} {config.backend_of(pool).name} engine{'s' * (pool.count > 1)}"
            where = "" if pool.devices == "own" else f"; {_turns(pool, {role for role, _ in asking})}"
            yield (
                f"engine pool {name}: {engines} with {pool.path}, for {' and '.join(user for _, user in asking)}{where}"
            )
    said: set[frozenset[str]] = set()
    for group in groups.values():
        sharing = [other for other in groups.values() if other.devices & group.devices]
        names = frozenset(other.name for other in sharing)
        if len(names) > 1 and not any(names <= known for known in said):
            said.add(names)
            where = ", ".join(sorted(frozenset[str]().union(*(other.devices for other in sharing))))
            yield f"{_listed(sorted(names))} take turns on {where}"
            for other in sharing:
                yield f"{other.name} offloads {_listed(other.offloads) or 'nothing'} while a neighbour has the devices"
    planned = {name for group in groups.values() for name in group.devices if name.startswith("gpu:")}
    if 0 < num_gpus < len(planned):
        fix = "placement = colocate takes turns"
        yield f"{len(planned)} GPUs are planned; on this machine {num_gpus} would be shared without turns ({fix})"


def _turns(pool: EngineTable, roles: Collection[str]) -> str:
    """Describe when a pool takes its turn on the devices of the policy's engines."""
    if TEACHER in roles:
        return "its turn on the rollout's devices comes when a whole step waits for it"
    enough = f"{pool.turn_requests} requests wait or " if pool.devices == "shared" else ""
    return (
        f"its turn on the rollout's devices comes when {enough}the rollout has nothing to do, "
        f"after {pool.turn_wait_s:g} s at the latest"
    )


def _listed(names: Collection[str]) -> str:
    *most, last = names or ("",)
    return f"{', '.join(most)} and {last}" if most else last
