# SPDX-License-Identifier: Apache-2.0
"""A small world for the staleness rule: groups, engines, a trainer that publishes late, checkpoints and rollbacks.

Only the decisions are real: they are made by `relax_core.bus.gate`. Versions are relative to the trainer's, so that
endless schedules have finitely many states and all of them can be visited.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from relax_core.bus import gate

READY, CLAIMED, CARRIED = -1, -2, -3


class Group(NamedTuple):
    where: int
    """The engine that generates it, READY, CLAIMED, or CARRIED: begun, and on no engine now."""
    floor: int
    newest: int

    @property
    def begun(self) -> bool:
        """Whether some of its samples are not finished."""
        return self.where >= 0 or self.where == CARRIED


class Done(NamedTuple):
    """A trained group that no checkpoint covers yet."""

    step: int
    floor: int
    newest: int


@dataclass(frozen=True, slots=True)
class World:
    groups: tuple[Group, ...] = ()
    engines: tuple[int | None, ...] = (0, 0)
    """Relative version of each; None has weights that were given up."""
    published: int = 0
    checkpoint: int = 0
    done: tuple[Done, ...] = ()
    overdue: bool = False
    """The deadline has passed and the step took what was ready: what no longer fits ends when it is committed."""


@dataclass(frozen=True, slots=True)
class Limits:
    rule: gate.Rule
    engines: int = 2
    uncovered: int = 1
    """Steps at most between checkpoints."""
    drops: bool = True
    overdue: bool = True
    refreshed_floor: bool = True
    """A group may start later than it was granted, on newer weights."""
    carries: bool = False
    """Engines may let go of what they generate (a pause, an update, their death), and others go on with it."""


def explore(limits: Limits, most: int = 10_000_000) -> int:
    """Visit every world; raises AssertionError with the schedule that leads to a bad one. Returns how many there are."""
    start = World(engines=(0,) * limits.engines)
    came: dict[World, tuple[World | None, str]] = {start: (None, "start")}
    todo = deque([start])
    while todo and len(came) < most:
        world = todo.popleft()
        if problem := broken(world, limits):
            raise AssertionError(f"{problem} in {world} after {schedule(came, world)}")
        for name, following in moves(world, limits):
            if following not in came:
                came[following] = (world, name)
                todo.append(following)
    return len(came)


def schedule(came: dict[World, tuple[World | None, str]], world: World | None) -> list[str]:
    names: list[str] = []
    while world is not None:
        world, name = came[world]
        names.append(name)
    return names[::-1]


def broken(world: World, limits: Limits) -> str:
    """What is wrong with a world, or nothing."""
    rule = limits.rule
    for group in world.groups:
        if group.where == CLAIMED and not 0 <= -group.floor <= rule.max_staleness:
            return f"lag {-group.floor} of a claimed group is out of bounds"
        if group.where == CLAIMED and group.newest > 0:
            return "a claimed group has tokens of weights that do not exist yet"
    if world.overdue:
        return ""
    claimed = sum(group.where == CLAIMED for group in world.groups)
    if gate.overflow(rule, 0, claimed, due(world, rule)) > rule.spare_groups:
        return "groups in flight can't all be trained in time"
    return "" if can_finish(world, limits) else "the step can't finish though nothing stays slow"


def due(world: World, rule: gate.Rule) -> Counter[int]:
    return Counter(group.floor + rule.max_staleness for group in world.groups if group.where != CLAIMED)


def can_finish(world: World, limits: Limits) -> bool:
    """Whether the step ends without a deadline once whatever runs finishes and weights arrive."""
    rule = limits.rule
    world = replace(
        world,
        groups=tuple(finished(world, group) if group.begun else group for group in world.groups),
        engines=(0,) * limits.engines,
        published=0,
    )
    for _ in range(2 * (rule.max_staleness + 2) * rule.groups_per_step + rule.spare_groups):
        if sum(group.where == CLAIMED for group in world.groups) == rule.groups_per_step:
            return True
        claims = [w for name, w in claim_moves(world, rule, False)]
        if claims:
            world = claims[0]
        elif gate.may_grant(rule, 0, 0, len(world.groups)):
            world = replace(world, groups=(*world.groups, Group(READY, 0, 0)))
        else:
            return False
    return False


def finished(world: World, group: Group) -> Group:
    return sampled(world, group)._replace(where=READY)


def sampled(world: World, group: Group) -> Group:
    """With tokens of the engine it is on: as they are told, the oldest and the newest of the group."""
    engine = world.engines[group.where] if group.where >= 0 else None
    if engine is None:
        return group
    return Group(group.where, min(group.floor, engine), max(group.newest, engine))


def moves(world: World, limits: Limits) -> Iterator[tuple[str, World]]:
    rule = limits.rule
    claimed = sum(group.where == CLAIMED for group in world.groups)
    yield from engine_moves(world, limits)
    yield from claim_moves(world, rule, False)
    if world.published < 0:
        yield "publish", replace(world, published=0)
    if claimed == rule.groups_per_step and -world.published <= rule.max_staleness:
        yield from committed(world, limits, "train")
    if limits.overdue and claimed < rule.groups_per_step and -world.published <= rule.max_staleness:
        yield from claim_moves(world, rule, True)
        if claimed:
            yield from committed(world, limits, "close short")
    if world.checkpoint < 0 and not claimed:
        yield "checkpoint", replace(world, checkpoint=0, done=())
    if limits.uncovered:
        yield "rollback", rolled_back(world, limits)
    if limits.drops:
        for index, group in distinct(world.groups):
            if group.where != CLAIMED:
                yield f"drop {group}", replace(world, groups=without(world.groups, index))


def engine_moves(world: World, limits: Limits) -> Iterator[tuple[str, World]]:
    for index, version in enumerate(world.engines):
        if version is None or version < world.published:
            engines = tuple(world.published if i == index else v for i, v in enumerate(world.engines))
            yield f"engine {index} loads {world.published}", replace(world, engines=engines)
        if version is not None and gate.may_grant(limits.rule, 0, version, len(world.groups)):
            group = Group(index, version, version)
            yield f"engine {index} is granted at {version}", replace(world, groups=added(world.groups, group))
    if limits.carries:
        yield from carry_moves(world)
    for index, group in distinct(world.groups):
        if group.where >= 0:
            done = finished(world, group)
            for floor in {done.floor, done.newest} if limits.refreshed_floor else {done.floor}:
                ended = done._replace(floor=floor)
                yield f"{group} finishes as {ended}", replace(world, groups=added(without(world.groups, index), ended))


def carry_moves(world: World) -> Iterator[tuple[str, World]]:
    """Engines let go of groups with the tokens they have; any engine that may go on with one takes it."""
    for index, group in distinct(world.groups):
        rest = without(world.groups, index)
        if group.where >= 0:
            let_go = sampled(world, group)._replace(where=CARRIED)
            yield f"{group} is let go", replace(world, groups=added(rest, let_go))
        elif group.where == CARRIED:
            for engine, version in enumerate(world.engines):
                if version is not None and version >= group.floor:
                    on = group._replace(where=engine)
                    yield f"{group} goes on at engine {engine}", replace(world, groups=added(rest, on))


def claim_moves(world: World, rule: gate.Rule, overdue: bool) -> Iterator[tuple[str, World]]:
    claimed = sum(group.where == CLAIMED for group in world.groups)
    counts = due(world, rule)
    for index, group in distinct(world.groups):
        if group.where != READY:
            continue
        allowed = (
            gate.may_train(rule, 0, claimed, group.floor)
            if overdue
            else gate.may_claim(rule, 0, claimed, counts, group.floor)
        )
        if allowed:
            groups = added(without(world.groups, index), group._replace(where=CLAIMED))
            yield (
                f"claim {group}{' overdue' if overdue else ''}",
                replace(world, groups=groups, overdue=overdue or world.overdue),
            )
            return


def committed(world: World, limits: Limits, name: str) -> Iterator[tuple[str, World]]:
    """The step's update is applied; every version is one further back, and what no longer fits ends."""
    if limits.uncovered and -world.checkpoint >= limits.uncovered:
        return
    trained = [Done(0, group.floor - 1, group.newest - 1) for group in world.groups if group.where == CLAIMED]
    older = [Done(done.step - 1, done.floor - 1, done.newest - 1) for done in world.done]
    left = [group._replace(floor=group.floor - 1, newest=group.newest - 1) for group in world.groups]
    rule = limits.rule
    listed = [
        (group.floor + rule.max_staleness, group.where == READY, number)
        for number, group in enumerate(left)
        if group.where != CLAIMED
    ]
    ended = gate.victims(rule, 0, 0, listed, rule.spare_groups)
    after = World(
        tuple(sorted(g for number, g in enumerate(left) if g.where != CLAIMED and number not in ended)),
        tuple(None if version is None else max(version, -rule.max_staleness) - 1 for version in world.engines),
        world.published - 1,
        world.checkpoint - 1 if limits.uncovered else 0,
        tuple(sorted([*older, *trained])) if limits.uncovered else (),
    )
    yield name, after


def rolled_back(world: World, limits: Limits) -> World:
    """The trainer is restored at the checkpoint, under new weights; engines hold given-up ones until they load."""
    to = world.checkpoint
    back = [Group(READY, done.floor, done.newest) for done in world.done if done.newest <= to]
    kept = [
        group._replace(where=READY if group.where == CLAIMED else group.where)
        for group in world.groups
        if group.newest <= to and (not group.begun or to == 0)
    ]
    groups = [group._replace(floor=group.floor - to, newest=group.newest - to) for group in (*back, *kept)]
    return World(tuple(sorted(groups)), (None,) * limits.engines)


def added(groups: tuple[Group, ...], group: Group) -> tuple[Group, ...]:
    return tuple(sorted((*groups, group)))


def without(groups: tuple[Group, ...], index: int) -> tuple[Group, ...]:
    return groups[:index] + groups[index + 1 :]


def distinct(groups: tuple[Group, ...]) -> Iterator[tuple[int, Group]]:
    """Equal groups lead to equal worlds: one of each is enough."""
    return ((index, group) for index, group in enumerate(groups) if index == 0 or groups[index - 1] != group)
