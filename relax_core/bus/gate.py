# SPDX-License-Identifier: Apache-2.0
"""The staleness rule as pure functions over small numbers: which groups may start, which a step may claim, which must end.

Versions are completed steps; the step that starts at version v trains up to `groups_per_step` groups. A group's floor is
the oldest version among its trained tokens; the group expires at floor + k, the last version at whose step it may be
trained. Unclaimed groups are passed as counts by expiry.

Invariants, for the caller that asks before each change and ends the victims after it:
- A group is trained with a lag of 0 to k.
- The unclaimed groups fit the places that are left before each expires: `overflow` is at most `spare_groups`. So no group
  expires because others, which had more time, were claimed first.
- Admission keeps this by counting: at most (k + 1) * `groups_per_step` groups live, fewer for an engine whose weights lag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """Bounds of one run; `max_staleness` is k."""

    max_staleness: int | None
    groups_per_step: int
    spare_groups: int = 0
    """Unclaimed groups that need not fit: whoever is last is dropped, never waited for."""
    steps: int | None = None
    """Steps of the run: nothing is granted that no step is left for. None: no end is known."""


def capacity(rule: Rule, version: int, engine: int) -> int | None:
    """Return the number of live groups below which an engine at version `engine` may be given one more; None: no limit."""
    fresh = None if rule.max_staleness is None else rule.max_staleness + 1 - (version - min(engine, version))
    left = None if rule.steps is None else rule.steps - version
    bounds = [bound for bound in (fresh, left) if bound is not None]
    if not bounds:
        return None
    slots = min(bounds) * rule.groups_per_step
    return slots + rule.spare_groups if slots > 0 else 0


def may_grant(rule: Rule, version: int, engine: int, live: int) -> bool:
    """Tell whether an engine may start a new group while `live` are admitted, neither dropped nor trained."""
    limit = capacity(rule, version, engine)
    return limit is None or live < limit


def slots_through(rule: Rule, version: int, claimed: int, last: int) -> int:
    """Count the places left in the steps that start at `version` to `last`, when `claimed` of the first are taken."""
    return max(0, last - version + 1) * rule.groups_per_step - (claimed if last >= version else 0)


def overflow(rule: Rule, version: int, claimed: int, unclaimed: Mapping[int, int]) -> int:
    """Count the unclaimed groups that can't be trained in time, whatever is done; 0 when all fit."""
    due, worst = 0, 0
    for last in sorted(unclaimed):
        due += unclaimed[last]
        worst = max(worst, due - slots_through(rule, version, claimed, last))
    return worst


def may_train(rule: Rule, version: int, claimed: int, floor: int) -> bool:
    """Tell whether the step that starts at `version` has a place, and 0 <= lag <= k for a group with this floor."""
    lag = version - floor
    return claimed < rule.groups_per_step and lag >= 0 and (rule.max_staleness is None or lag <= rule.max_staleness)


def may_claim(rule: Rule, version: int, claimed: int, unclaimed: Mapping[int, int], floor: int) -> bool:
    """Tell whether a ready group may join the step that starts at `version`: all that stays unclaimed must still fit."""
    if not may_train(rule, version, claimed, floor):
        return False
    if rule.max_staleness is None:
        return True
    expires = floor + rule.max_staleness
    rest = {last: count - (last == expires) for last, count in unclaimed.items()}
    return overflow(rule, version, claimed + 1, rest) <= rule.spare_groups


def victims(
    rule: Rule, version: int, claimed: int, unclaimed: Iterable[tuple[int, bool, int]], allowed: int
) -> tuple[int, ...]:
    """Choose the fewest groups whose end lets the others fit, but for `allowed`; those that are not ready go first.

    `unclaimed` lists (expiry, ready, group number).
    """
    pool: list[tuple[bool, int, int]] = []
    ended: list[int] = []
    due = sorted(unclaimed)
    for index, (last, ready, number) in enumerate(due):
        pool.append((ready, last, -number))
        if index + 1 < len(due) and due[index + 1][0] == last:
            continue
        spared = allowed if last >= version else 0
        while len(pool) - spared > slots_through(rule, version, claimed, last):
            pool.remove(first := min(pool))
            ended.append(-first[2])
    return tuple(ended)
