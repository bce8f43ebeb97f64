# SPDX-License-Identifier: Apache-2.0
"""The staleness rule as pure functions: which groups may start, which a step may claim, and which must be dropped.

A version counts completed steps. The step that starts at version v trains up to `groups_per_step` groups. A group's
floor is the oldest version among its trained tokens. The group is stale after floor + k: the step that starts at this
version is the last that may train the group. The functions get unclaimed groups as counts by this last version.

Invariants, if the caller asks before each change and drops the `victims` afterwards:
- A group is trained with a lag of 0 to k.
- Each unclaimed group can be trained before it becomes stale: `overflow` is at most `spare_groups`. So no group becomes
  stale because groups with more time left were claimed first.
- Admission ensures this by a count: at most (k + 1) * `groups_per_step` + `spare_groups` groups are live. The bound is
  lower for an engine with older weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """The staleness bounds of one run."""

    max_staleness: int | None
    """Staleness bound k, in steps; None: no bound."""
    groups_per_step: int
    spare_groups: int = 0
    """Number of surplus groups (over-sampling); a step drops surplus groups instead of waiting for them."""
    steps: int | None = None
    """Number of steps of the run; a group is granted only if a step remains to train it. None: no known end."""


def capacity(rule: Rule, version: int, engine: int) -> int | None:
    """Return the number of live groups below which an engine at version `engine` may start another; None: no limit."""
    fresh = None if rule.max_staleness is None else rule.max_staleness + 1 - (version - min(engine, version))
    left = None if rule.steps is None else rule.steps - version
    bounds = [bound for bound in (fresh, left) if bound is not None]
    if not bounds:
        return None
    slots = min(bounds) * rule.groups_per_step
    return slots + rule.spare_groups if slots > 0 else 0


def may_grant(rule: Rule, version: int, engine: int, live: int) -> bool:
    """Return True if an engine may start a new group while `live` groups are neither dropped nor trained."""
    limit = capacity(rule, version, engine)
    return limit is None or live < limit


def slots_through(rule: Rule, version: int, claimed: int, last: int) -> int:
    """Return how many groups the steps at `version` to `last` can still claim; the first step has `claimed` groups."""
    return max(0, last - version + 1) * rule.groups_per_step - (claimed if last >= version else 0)


def overflow(rule: Rule, version: int, claimed: int, unclaimed: Mapping[int, int]) -> int:
    """Return the number of unclaimed groups that no order of claims can train before they become stale."""
    due, worst = 0, 0
    for last in sorted(unclaimed):
        due += unclaimed[last]
        worst = max(worst, due - slots_through(rule, version, claimed, last))
    return worst


def may_train(rule: Rule, version: int, claimed: int, floor: int) -> bool:
    """Return True if the step that starts at `version` can claim another group, and 0 <= lag <= k for this floor."""
    lag = version - floor
    return claimed < rule.groups_per_step and lag >= 0 and (rule.max_staleness is None or lag <= rule.max_staleness)


def may_claim(rule: Rule, version: int, claimed: int, unclaimed: Mapping[int, int], floor: int) -> bool:
    """Return True if a ready group may join the step that starts at `version`.

    Apart from `spare_groups`, all groups that stay unclaimed must still be trainable before they become stale.
    """
    if not may_train(rule, version, claimed, floor):
        return False
    if rule.max_staleness is None:
        return True
    last_version = floor + rule.max_staleness
    rest = {last: count - (last == last_version) for last, count in unclaimed.items()}
    return overflow(rule, version, claimed + 1, rest) <= rule.spare_groups


def victims(
    rule: Rule, version: int, claimed: int, unclaimed: Iterable[tuple[int, bool, int]], allowed: int
) -> tuple[int, ...]:
    """Choose the fewest groups to drop so that all but `allowed` of the rest can be trained; unready groups go first.

    `unclaimed`: (last version, ready, group number) of each group. Return the numbers of the chosen groups.
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
