# SPDX-License-Identifier: Apache-2.0
"""Which groups a claim gets: for the actor's step by the gate's claim rule, for anybody else the first that are ready."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set

from relax_core.api.bus import ClaimRequest, LateRule
from relax_core.bus import gate
from relax_core.bus.group import Group


def pick(request: ClaimRequest, live: Mapping[int, Group], seen: Set[int]) -> list[Group]:
    """Ready groups that the task has not had, by number."""
    columns = frozenset(request.columns)
    groups = (live[number] for number in sorted(live.keys() - seen))
    ready = (group for group in groups if group.complete and group.has(columns))
    return [group for group, _ in zip(ready, range(request.max_groups), strict=False)]


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


def claim_order(group: Group) -> tuple[float, int, int]:
    """As recorded, for what a rollback gave back; then earliest expiry, then number."""
    return (math.inf if group.recorded is None else group.recorded, group.floor, group.number)
