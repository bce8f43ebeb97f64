# SPDX-License-Identifier: Apache-2.0
"""Which groups a claim gets: for the actor's step by the gate's claim rule, for anybody else the first that are ready."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set

from relax_core.api.bus import ClaimRequest, LateRule
from relax_core.api.errors import RelaxError
from relax_core.bus import gate
from relax_core.bus.ledger import Group


def pick(request: ClaimRequest, live: Mapping[int, Group], seen: Set[int]) -> list[Group]:
    """Ready groups that the task has not had, by number."""
    columns = frozenset(request.columns)
    groups = (live[number] for number in sorted(live.keys() - seen))
    ready = (group for group in groups if group.complete and group.has(columns))
    return [group for group, _ in zip(ready, range(request.max_groups), strict=False)]


def trained_by(request: ClaimRequest, trained: Iterable[Group], followers: Collection[str]) -> list[Group]:
    """All groups that the step trained; RelaxError where they are gone, or the task was not announced."""
    if request.task not in followers:
        raise RelaxError(f"bus: claim of task {request.task}: it follows the actor; name it in BusSettings.followers")
    found = [group for group in trained if group.trained_to == request.step + 1]
    if not found or any(not group.rows and any(m.sealed and m.sealed.num_rows for m in group.valid) for group in found):
        raise RelaxError(f"bus: rows of step {request.step} are no longer kept; go on from the newest checkpoint")
    return found


def pick_for_step(
    request: ClaimRequest, columns: frozenset[str], live: Iterable[Group], rule: gate.Rule, late: LateRule, version: int
) -> list[Group]:
    """Ready groups that may join the step that starts at `version`, in claim order."""
    groups = sorted(live, key=claim_order)
    claimed = sum(group.claimed for group in groups)
    k = rule.max_staleness or 0
    due = Counter(group.floor + k for group in groups if not group.claimed)
    picked: list[Group] = []
    for group in groups:
        if len(picked) == request.max_groups:
            break
        ready = group.complete and not group.claimed and group.newest <= version and group.has(columns)
        if ready and _may_join(group, rule, late, version, claimed + len(picked), due, request.overdue):
            picked.append(group)
            due[group.floor + k] -= 1
    return picked


def _may_join(
    group: Group, rule: gate.Rule, late: LateRule, version: int, claimed: int, due: Mapping[int, int], overdue: bool
) -> bool:
    """Waiting for others is what `late = "wait"` does until the deadline; `mask` trains the old with less of it."""
    if late == "mask":
        return claimed < rule.groups_per_step
    if overdue or late != "wait":
        return gate.may_train(rule, version, claimed, group.floor)
    return gate.may_claim(rule, version, claimed, due, group.floor)


def waited_for(live: Iterable[Group], groups_per_step: int) -> tuple[int, ...]:
    """Groups that a step would take first and that are not complete."""
    first = sorted((group for group in live if not group.claimed), key=claim_order)[:groups_per_step]
    return tuple(group.number for group in first if not group.complete)


def claim_order(group: Group) -> tuple[float, int, int]:
    """As recorded, for what a rollback gave back; then earliest expiry, then number."""
    return (math.inf if group.recorded is None else group.recorded, group.floor, group.number)
