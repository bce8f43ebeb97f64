# SPDX-License-Identifier: Apache-2.0
"""The late rules: treatment of groups that would become stale, or are unfinished at a step's deadline (`rollout.late`).

The rules are pure. The transfer queue asks its rule which groups may join a step, and after each change which groups to
end. Every rule keeps the staleness bound: no trained token has a lag above it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from relax_core.api.bus import LateRule
from relax_core.api.trajectory import DropReason
from relax_core.bus import gate

MAX_RETRIES = 3
"""Number of times that `regenerate` issues a late group again before dropping it."""


class Backlog(NamedTuple):
    """The groups that no step has claimed."""

    version: int
    """Version of the actor: the coming step."""
    claimed: int
    """Number of groups that the coming step has claimed."""
    groups: Sequence[tuple[int, bool, int]]
    """(last version whose step may train the group, complete, group number) of each unclaimed group."""


class Ended(NamedTuple):
    """The groups to end, and the reason if a group is not issued again."""

    groups: Sequence[int]
    reason: DropReason


class LateGroups:
    """A late rule. Unless a rule overrides a method, late groups are dropped at once, and as few groups as possible."""

    def __init__(self, bounds: gate.Rule) -> None:
        self._bounds = bounds

    def may_claim(self, version: int, claimed: int, unclaimed: Mapping[int, int], floor: int, overdue: bool) -> bool:
        """Return True if a ready group may join the coming step, which has `claimed` groups.

        `unclaimed`: last version whose step may train a group -> number of unclaimed groups. `overdue`: the step's
        deadline has passed.
        """
        return gate.may_train(self._bounds, version, claimed, floor)

    def mask_before(self, step: int) -> int:
        """Return the version below which sampled tokens are too stale for a step to train; 0: train all tokens."""
        return 0

    def after_put(self, backlog: Backlog) -> Ended:
        """Return the groups to end after a put; not called while a claim is overdue."""
        return Ended(self._overflow(backlog), DropReason.STALE)

    def after_claim(self, backlog: Backlog) -> Ended:
        """Return the groups to end after a claim for the coming step."""
        return Ended(self._overflow(backlog), DropReason.STALE)

    def after_step(self, backlog: Backlog, short: bool, overdue: bool) -> Ended:
        """Return the groups to end after a step's commit.

        `short`: the step trained fewer groups than planned, or claimed after its deadline. `overdue`: the step made a
        request after its deadline.
        """
        return Ended(self._overflow(backlog), DropReason.SPARE if self._bounds.spare_groups else DropReason.STALE)

    def issues_again(self, retry: int, empty: bool) -> bool:
        """Return True to issue an ended group again, after `retry` earlier times, and False to drop the group.

        `empty`: the step's deadline passed without a ready group.
        """
        return False

    def _overflow(self, backlog: Backlog) -> Sequence[int]:
        """Return the fewest groups to end so that the rest, except spare groups, can be trained in time."""
        if self._bounds.max_staleness is None:
            return ()
        version, claimed, groups = backlog
        return gate.victims(self._bounds, version, claimed, groups, self._bounds.spare_groups)


class WaitForLate(LateGroups):
    """`wait`: until the step's deadline, groups wait for groups that become stale sooner; the deadline ends the rest."""

    def may_claim(self, version: int, claimed: int, unclaimed: Mapping[int, int], floor: int, overdue: bool) -> bool:
        if overdue:
            return super().may_claim(version, claimed, unclaimed, floor, overdue)
        return gate.may_claim(self._bounds, version, claimed, unclaimed, floor)

    def after_claim(self, backlog: Backlog) -> Ended:
        return Ended((), DropReason.STALE)

    def after_step(self, backlog: Backlog, short: bool, overdue: bool) -> Ended:
        ended = super().after_step(backlog, short, overdue)
        return ended._replace(reason=DropReason.DEADLINE) if short else ended


class MaskLate(LateGroups):
    """`mask`: a group never becomes stale, because a step masks the group's stale tokens."""

    def may_claim(self, version: int, claimed: int, unclaimed: Mapping[int, int], floor: int, overdue: bool) -> bool:
        return claimed < self._bounds.groups_per_step

    def mask_before(self, step: int) -> int:
        k = self._bounds.max_staleness
        return 0 if k is None else max(0, step - k)

    def after_step(self, backlog: Backlog, short: bool, overdue: bool) -> Ended:
        """Return the slow, old groups after an overdue step, so that the next step does not wait for them, too."""
        if not overdue or self._bounds.max_staleness is None:
            return Ended((), DropReason.DEADLINE)
        slow = [number for last, complete, number in backlog.groups if not complete and last < backlog.version]
        return Ended(slow, DropReason.DEADLINE)

    def _overflow(self, backlog: Backlog) -> Sequence[int]:
        return ()


class DropLate(LateGroups):
    """`drop`: a late group is dropped."""


class RegenerateLate(LateGroups):
    """`regenerate`: a late group is issued again, a limited number of times, since a slow task may be late each time."""

    def issues_again(self, retry: int, empty: bool) -> bool:
        return retry < (1 if empty else MAX_RETRIES)


LATE_RULES: Mapping[LateRule, type[LateGroups]] = {
    "wait": WaitForLate,
    "mask": MaskLate,
    "drop": DropLate,
    "regenerate": RegenerateLate,
}
