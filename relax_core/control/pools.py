# SPDX-License-Identifier: Apache-2.0
"""The engine pools of a plan: who asks each, what is wrong with that, and their worker groups on devices of their own.

A pool is opened by the role that asks it: the rollout for rewards and environments, the teacher for teachers. So one that
both want is refused; two pools of one folder are no difficulty.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias, cast

from relax_core.api.engine import Engine
from relax_core.api.environment import Environment
from relax_core.api.errors import ConfigError
from relax_core.api.reward import Reward
from relax_core.options.choice import Choice
from relax_core.options.engines import no_pool
from relax_core.options.run_config import RunConfig
from relax_core.plugins.catalogue import Catalogue
from relax_core.roles.plan import WorkerGroup
from relax_core.rollout.side_pools import GROUP

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
        groups[GROUP + pool.name] = WorkerGroup(GROUP + pool.name, pool.count, pool.threads or THREADS, own)
    return groups


def pool_notes(config: RunConfig, asked: Asked, groups: Mapping[str, WorkerGroup]) -> Iterator[str]:
    """In words: which pools there are, and for whom."""
    for name, whos in asked.items():
        pool = config.pool(name)
        if pool is not None and GROUP + name in groups:
            engines = f"{pool.count} {config.backend_of(pool).name} engine{'s' * (pool.count > 1)}"
            yield f"engine pool {name}: {engines} with {pool.path}, for {' and '.join(who for _, who in whos)}"


def askers(config: RunConfig, catalogue: Catalogue) -> Asked:
    """What rewards, environments and teachers name; an option of theirs may, so they are built."""
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
