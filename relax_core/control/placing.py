# SPDX-License-Identifier: Apache-2.0
"""Who lives where: worker groups with the names of their devices, and which parts of each give way to its neighbours.

A device here is a name, `gpu:0` or `cpu:0`: groups that have one in common take turns. Nothing is placed or started.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

from relax_core.api.engine import Engine
from relax_core.api.errors import ConfigError
from relax_core.api.turn import Part
from relax_core.api.weights import WeightTransport
from relax_core.control.pools import NOBODY, Asked, pool_groups
from relax_core.control.teachers import teacher_groups
from relax_core.options.operation import RankPlacement
from relax_core.options.run_config import RunConfig
from relax_core.plugins.catalogue import Catalogue
from relax_core.roles.plan import WorkerGroup

SHARED = 1
"""Threads of a process that was given none: several share the cores, and spinning threads would fight for them."""
TABLES = {"actor": "actor", "rollout": "rollout", "reference": "reference", "actor-fwd": "actor_fwd", "teacher": "teacher",
          "critic": "critic"}  # fmt: skip
"""Roles that work on devices, and their tables in `[placement]`."""


def worker_groups(
    config: RunConfig, catalogue: Catalogue, roles: Collection[str], on_gpus: bool, asked: Asked = NOBODY
) -> dict[str, WorkerGroup]:
    """The groups of a run by role, and its engine pools. `on_gpus`: where a table does not say, a process has a GPU."""
    by_ranks = not config.teachers or any(teacher.path for teacher in config.teachers)
    placed = [role for role in TABLES if (role in roles and (role != "teacher" or by_ranks)) or role == "actor"]
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
    return getattr(config.placement, TABLES[role])


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
    homes = {role: config.placement.home(TABLES[role]) for role in gpus}
    for number, home in enumerate(dict.fromkeys(homes.values())):
        at_home = [role for role in gpus if homes[role] == home]
        for role in at_home:
            own = {f"gpu:{first + index}" for index in range(gpus[role])}
            names[role] = frozenset(own or {f"cpu:{number}"})
        first += max(gpus[role] for role in at_home)
    return names


def _sleeps(config: RunConfig, catalogue: Catalogue, role: str, on_gpu: bool) -> tuple[Part, ...]:
    """A CPU has no lower tier but the disk: only what need not be kept is freed there."""
    if role in ("actor", "critic"):
        return ("weights", "optimizer", "gradients") if on_gpu else ("gradients",)
    if role != "rollout":
        return ("weights",) if on_gpu else ()
    engine = cast(type[Engine], catalogue.target("engine", config.engine.chosen.name))
    able = engine.capabilities.sleep & ({"weights", "kv"} if on_gpu else {"kv"})
    if not on_gpu and not engine.capabilities.sleeps_on_cpu:
        return ()
    return cast(tuple[Part, ...], tuple(sorted(able)))
