# SPDX-License-Identifier: Apache-2.0
"""The placement of a plan: worker groups with the names of their devices, and which parts of each give way to its
neighbours.

A device here is a name, `gpu:0` or `cpu:0`: groups that have one in common take turns. Nothing is placed or started.

Engine pools have worker groups on devices of their own. A pool is opened by the role that asks it: the rollout for
rewards and environments, the teacher for teachers. So one that both want is refused; two pools of one folder are no
difficulty.

Each teacher of a plan has its own set of operations, for rows that no other teacher has; tasks say later which.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from relax_core.api.batch import TEACHER_INDEX
from relax_core.api.devices import OffloadPart
from relax_core.api.engine import Engine
from relax_core.api.environment import Environment
from relax_core.api.errors import ConfigError
from relax_core.api.plan import Operation, WorkerGroup
from relax_core.api.reward import Reward
from relax_core.api.weights import WeightTransport
from relax_core.config.checks import no_pool
from relax_core.config.run_config import Choice, RunConfig
from relax_core.config.tables import RankPlacement
from relax_core.engines.factories import AUXILIARY_GROUP
from relax_core.registry.catalogue import Catalogue

ROLLOUT, TEACHER = "rollout", "teacher"
SCORED = frozenset({"teacher_log_probs"})
"""What an engine can tell of a teacher: log-probs of tokens that it is given."""
THREADS = 1


Asked: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]
"""By pool: the role that opens it, and who asks."""
NOBODY: Asked = MappingProxyType({})


def check_pools(config: RunConfig, catalogue: Catalogue, asked: Asked) -> None:
    """Raises ConfigError for a pool that is named and not there, is there and not named, or is asked for too much."""
    for name, whos in asked.items():
        if config.pool(name) is None:
            raise ConfigError("engines", f"none named {name!r}, which {whos[0][1]} asks", no_pool(config))
        roles = {role for role, _ in whos}
        if len(roles) > 1:
            fix = "give each a pool of its own; both may have the same path"
            raise ConfigError("engines", f"{name}, which {' and '.join(who for _, who in whos)} ask", fix)
    for at, pool in enumerate(config.engines):
        if pool.name not in asked:
            fix = "leave it out, or name it in a reward, an environment or a teacher"
            raise ConfigError(f"engines.{at}.name", f"{pool.name}, which nobody asks", fix)
    for at, teacher in enumerate(config.teachers):
        if teacher.engine:
            _check_teacher(config, catalogue, at, teacher.engine)


def check_asked(config: RunConfig, columns: Collection[str]) -> None:
    """Raises ConfigError for a teacher behind engines that is asked for more than log-probs of the policy's tokens."""
    more = sorted(set(columns) - SCORED)
    for at, teacher in enumerate(config.teachers):
        if teacher.engine and more:
            fix = "an engine scores the tokens that it is given and no others: write path instead of engine"
            raise ConfigError(f"teachers.{at}.engine", f"{teacher.engine}, asked for {' and '.join(more)}", fix)


def pool_groups(
    config: RunConfig, asked: Asked, roles: Collection[str], on_gpus: bool, taken: Mapping[str, WorkerGroup]
) -> dict[str, WorkerGroup]:
    """A worker group for each pool whose asker is in the plan, on devices that nobody else has."""
    devices = {name for group in taken.values() for name in group.devices}
    first = {kind: 1 + max((int(name[4:]) for name in devices if name.startswith(kind)), default=-1)
             for kind in ("gpu:", "cpu:")}  # fmt: skip
    groups: dict[str, WorkerGroup] = {}
    for pool in config.engines:
        if not any(role in roles for role, _ in asked.get(pool.name, ())):
            continue
        each = (1.0 if on_gpus else 0.0) if pool.gpus_per_engine is None else pool.gpus_per_engine
        many = math.ceil(pool.count * each)
        kind = "gpu:" if many else "cpu:"
        own = frozenset(f"{kind}{first[kind] + number}" for number in range(many or 1))
        first[kind] += len(own)
        groups[AUXILIARY_GROUP + pool.name] = WorkerGroup(
            AUXILIARY_GROUP + pool.name, pool.count, pool.threads or THREADS, own
        )
    return groups


def pool_notes(config: RunConfig, asked: Asked, groups: Mapping[str, WorkerGroup]) -> Iterator[str]:
    """In words: which pools there are, and for whom."""
    for name, whos in asked.items():
        pool = config.pool(name)
        if pool is not None and AUXILIARY_GROUP + name in groups:
            engines = f"{pool.count} {config.backend_of(pool).name} engine{'s' * (pool.count > 1)}"
            yield f"engine pool {name}: {engines} with {pool.path}, for {' and '.join(who for _, who in whos)}"


def askers(config: RunConfig, catalogue: Catalogue) -> Asked:
    """Return who asks each pool: rewards, environments and teachers, which are built since an option may name a pool."""
    found: dict[str, list[tuple[str, str]]] = {}
    own: list[tuple[Choice, str]] = [(choice, "reward") for choice in config.rewards]
    own += [(choice, "environment") for choice in (config.environment, *config.environments)]
    for choice, what in own:
        asker = cast(Reward | Environment, catalogue.build(choice.chosen))
        for name in asker.needs_engines:
            found.setdefault(name, []).append((ROLLOUT, f"{what} {choice.name}"))
    for at, teacher in enumerate(config.teachers):
        if teacher.engine:
            found.setdefault(teacher.engine, []).append((TEACHER, f"teachers.{at}"))
    return found


def _check_teacher(config: RunConfig, catalogue: Catalogue, at: int, name: str) -> None:
    pool = config.pool(name)
    if pool is None:
        raise ConfigError(f"teachers.{at}.engine", repr(name), no_pool(config))
    chosen = config.backend_of(pool)
    if not cast(type[Engine], catalogue.target("engine", chosen.name)).capabilities.score:
        fix = "choose another engine for the pool, or write path, which a trainer runs forward"
        raise ConfigError(f"teachers.{at}.engine", f"{name}: engine {chosen.name} scores no given tokens", fix)
    if config.media:
        fix = "engines score text only: write path, which a trainer runs forward"
        raise ConfigError(f"teachers.{at}.engine", f"{name}, in a run with media", fix)


def taught(operations: Sequence[Operation], config: RunConfig) -> tuple[Operation, ...]:
    """The operations, those of the teacher once for each that there is. Raises ConfigError where none is, or two overlap."""
    if not any(operation.role == TEACHER for operation in operations):
        return tuple(operations)
    if not config.teachers:
        fix = 'it learns from a teacher: write teachers = "FOLDER", or [[teachers]] with path and only'
        raise ConfigError("teachers", f"nothing, with algorithm {config.algorithm.name}", fix)
    _check_filters(config)
    check_asked(
        config, {column for operation in operations if operation.role == TEACHER for column in operation.produces}
    )
    if len(config.teachers) == 1:
        return tuple(operations)
    return tuple(each for operation in operations for each in _of_each(operation, config))


def teacher_groups(group: WorkerGroup, config: RunConfig) -> dict[str, WorkerGroup]:
    """One worker group a teacher with a folder; several live on the same devices, in turns. Others are engine pools."""
    if len(config.teachers) < 2:
        return {TEACHER: group}
    names = [f"{TEACHER}-{number}" for number, teacher in enumerate(config.teachers) if teacher.path]
    return {name: replace(group, name=name) for name in names}


def _check_filters(config: RunConfig) -> None:
    """Filters that are alike overlap for sure; whether others do, the tasks show."""
    seen: dict[str, int] = {}
    for number, teacher in enumerate(config.teachers):
        only = "=".join(part.strip() for part in teacher.only.split("=", 1))
        if only in seen:
            got = f"{teacher.only or 'nothing'}, as teachers.{seen[only]} has"
            raise ConfigError(f"teachers.{number}.only", got, 'give each its own tasks: only = "domain=maths"')
        seen[only] = number
    if "" in seen and len(config.teachers) > 1:
        fix = 'the others teach some of them: name its own, such as only = "domain=code"'
        raise ConfigError(f"teachers.{seen['']}.only", "nothing, which is every task", fix)


def _of_each(operation: Operation, config: RunConfig) -> Iterator[Operation]:
    if operation.role != TEACHER:
        yield operation
        return
    consumes = operation.consumes | {TEACHER_INDEX.name}
    for number, teacher in enumerate(config.teachers):
        name = f"{TEACHER}-{number}.{operation.name.partition('.')[2]}"
        yield replace(operation, name=name, consumes=consumes, row_filter=teacher.only)


SHARED = 1
"""Threads of a process that was given none: several share the cores, and spinning threads would fight for them."""
TABLES = {"actor": "actor", "rollout": "rollout", "reference": "reference", "actor-fwd": "actor_fwd", "teacher": "teacher",
          "critic": "critic"}  # fmt: skip
"""The core's roles that work on devices, and their tables in `[placement]`; those of plugins are in `placement.roles`."""


def worker_groups(
    config: RunConfig, catalogue: Catalogue, roles: Collection[str], on_gpus: bool, asked: Asked = NOBODY
) -> dict[str, WorkerGroup]:
    """The groups of a run by role, and its engine pools. `on_gpus`: where a table does not say, a process has a GPU."""
    by_ranks = not config.teachers or any(teacher.path for teacher in config.teachers)
    for role in config.placement.roles:
        if role in TABLES or role not in catalogue.names("role"):
            known = ", ".join(sorted(set(catalogue.names("role")) - TABLES.keys()))
            raise ConfigError(
                "placement.roles", role, f"it is no role that a plugin brings; there are {known or 'none'}"
            )
    own = [role for role in config.placement.roles if role in roles]
    placed = [role for role in TABLES if (role in roles and (role != "teacher" or by_ranks)) or role == "actor"] + own
    counts = {role: _gpus(_table(config, role), on_gpus) for role in placed}
    if "rollout" in counts:
        counts["rollout"] = _engine_gpus(config, catalogue, on_gpus)
    names = _names(config, counts)
    groups = {
        role: WorkerGroup(
            role, _size(_table(config, role)), _table(config, role).threads or SHARED, devices=names[role],
            sleeps=_sleeps(config, catalogue, role, counts[role] > 0),
        )
        for role in placed
    }  # fmt: skip
    taught = teacher_groups(groups.pop("teacher"), config) if "teacher" in groups else {}
    return {**groups, **taught, **pool_groups(config, asked, roles, on_gpus, {**groups, **taught})}


def check_live(config: RunConfig, catalogue: Catalogue, groups: Mapping[str, WorkerGroup]) -> None:
    """Weights from memory to memory need both sides awake at once: refused where one sleeps for the other."""
    if "rollout" not in groups:
        return
    chosen, rollout = config.weights.chosen, groups["rollout"]
    live = cast(type[WeightTransport], catalogue.target(chosen.kind, chosen.name)).live
    if live and "weights" in rollout.sleeps and rollout.devices & groups["actor"].devices:
        fix = "engines and trainer take turns on the same GPUs: choose one that keeps a copy, shared-memory or disk"
        raise ConfigError("weights.name", chosen.name, fix)


def check_sleep(config: RunConfig, catalogue: Catalogue, groups: Mapping[str, WorkerGroup]) -> None:
    """An engine that gives no memory back can't take turns on a GPU: what it holds is missing to its neighbours."""
    rollout = groups.get("rollout")
    if rollout is None or rollout.sleeps or not any(name.startswith("gpu:") for name in rollout.devices):
        return
    around = sorted(group.name for group in groups.values() if group.devices & rollout.devices and group != rollout)
    if around:
        kinds = {name: cast(type[Engine], catalogue.target("engine", name)) for name in catalogue.names("engine")}
        able = " or ".join(name for name, kind in kinds.items() if kind.capabilities.sleep) or "another"
        got = f"{config.engine.chosen.name}, which gives no memory back, beside {_listed(around)}"
        fix = f'use {able}, or give it GPUs of its own: placement = "hybrid" or placement.rollout.share = "own"'
        raise ConfigError("engine.name", got, fix)


def on_own_devices(config: RunConfig, role: str) -> bool:
    """Whether a role's devices are none of the actor's."""
    return config.placement.home(TABLES[role]) != config.placement.home("actor")


def has_gpus(devices: Path = Path("/dev")) -> bool:
    """Tell whether this process may use an NVIDIA GPU, by its device files: no driver is loaded for it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(devices.glob("nvidia[0-9]*"))


def too_many(groups: Mapping[str, WorkerGroup], num_gpus: int) -> Iterator[str]:
    """In words: that the plan names more GPUs than this machine shows."""
    named = {name for group in groups.values() for name in group.devices if name.startswith("gpu:")}
    if 0 < num_gpus < len(named):
        fix = "placement = colocate takes turns"
        yield f"{len(named)} GPUs are planned; on this machine {num_gpus} would be shared without turns ({fix})"


def remarks(groups: Mapping[str, WorkerGroup]) -> Iterator[str]:
    """In words: who takes turns with whom, and what stays in memory meanwhile."""
    told: set[frozenset[str]] = set()
    for group in groups.values():
        around = [other for other in groups.values() if other.devices & group.devices]
        names = frozenset(other.name for other in around)
        if len(names) > 1 and not any(names <= known for known in told):
            told.add(names)
            where = ", ".join(sorted(frozenset[str]().union(*(other.devices for other in around))))
            yield f"{_listed(sorted(names))} take turns on {where}"
            for other in around:
                yield f"{other.name}: {_listed(other.sleeps) or 'nothing'} sleeps while others have the devices"


def _listed(names: Collection[str]) -> str:
    *most, last = names or ("",)
    return f"{', '.join(most)} and {last}" if most else last


def _table(config: RunConfig, role: str) -> Any:
    return config.placement.of(TABLES.get(role, role))


def _size(table: Any) -> int:
    return int(table.ranks if isinstance(table, RankPlacement) else table.engines)


def _gpus(table: Any, on_gpus: bool) -> int:
    each = table.gpus_per_rank if isinstance(table, RankPlacement) else table.gpus_per_engine
    return math.ceil(_size(table) * ((1.0 if on_gpus else 0.0) if each is None else each))


def _engine_gpus(config: RunConfig, catalogue: Catalogue, on_gpus: bool) -> int:
    """As many as the engine's options spread each engine over. ConfigError where that is not what it is given."""
    engine, table, name = catalogue.build(config.engine.chosen), config.placement.rollout, config.engine.chosen.name
    wants = engine.devices() if isinstance(engine, Engine) else 0
    each = ((wants or 1) if on_gpus else 0) if table.gpus_per_engine is None else table.gpus_per_engine
    if wants > 1 and each == 0:
        fix = "there is no GPU here, and a CPU shares nothing with others: set its parallel options to 1"
        raise ConfigError("engine.name", f"{name} spread over {wants} GPUs", fix)
    if (each > 1 and wants not in (0, each)) or (0 < each < wants and wants > 1):
        fix = f"engine {name}, as it is set, works on {wants}: set {wants} or leave it out, or change its parallel options"
        raise ConfigError("placement.rollout.gpus_per_engine", each, fix)
    return math.ceil(table.engines * each)


def _names(config: RunConfig, gpus: Mapping[str, int]) -> dict[str, frozenset[str]]:
    """One block of devices for each home; who is at home there has its first ones."""
    names: dict[str, frozenset[str]] = {}
    first = 0
    homes = {role: config.placement.home(TABLES.get(role, role)) for role in gpus}
    for number, home in enumerate(dict.fromkeys(homes.values())):
        at_home = [role for role in gpus if homes[role] == home]
        for role in at_home:
            own = {f"gpu:{first + index}" for index in range(gpus[role])}
            names[role] = frozenset(own or {f"cpu:{number}"})
        first += max(gpus[role] for role in at_home)
    return names


def _sleeps(config: RunConfig, catalogue: Catalogue, role: str, on_gpu: bool) -> tuple[OffloadPart, ...]:
    """A CPU has no lower tier but the disk: only what need not be kept is freed there."""
    if role in ("actor", "critic"):
        return ("weights", "optimizer", "gradients") if on_gpu else ("gradients",)
    if role != "rollout":
        return ("weights",) if on_gpu else ()
    engine = cast(type[Engine], catalogue.target("engine", config.engine.chosen.name))
    able = engine.capabilities.sleep & ({"weights", "kv"} if on_gpu else {"kv"})
    if not on_gpu and not engine.capabilities.sleeps_on_cpu:
        return ()
    return cast(tuple[OffloadPart, ...], tuple(sorted(able)))
