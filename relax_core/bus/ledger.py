# SPDX-License-Identifier: Apache-2.0
"""The sample ledger: every attempt by id from its issue to its end, and the lineage of trained steps.

The ledger has no IO and no clock, and decides nothing: the queue calls it, and the journal stores its `records`.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum

from relax_core.api.batch import AttemptId, RowId
from relax_core.api.bus import Sealed
from relax_core.api.errors import RelaxError
from relax_core.api.trajectory import DropReason
from relax_core.api.weights import Version
from relax_core.bus.journal import (
    EndedRecord,
    IssuedRecord,
    PendingRecord,
    Record,
    RememberedRecord,
    RollbackRecord,
    TrainedRecord,
)

MAX_UNFINISHED = 1 << 16
"""Largest number of dropped attempts of unknown length; a producer that died never reports the length."""


class AttemptState(StrEnum):
    """State of an attempt; an attempt ends as `trained` or `dropped`."""

    ISSUED = "issued"
    RUNNING = "running"
    SCORED = "scored"
    CLAIMED = "claimed"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(slots=True)
class Attempt:
    """One attempt at a sample, from its issue to its end."""

    id: AttemptId
    state: AttemptState = AttemptState.ISSUED
    sealed: Sealed | None = None
    reason: DropReason | None = None
    with_gradient: bool = True


@dataclass(slots=True)
class Group:
    """All attempts of one issue of a group, and the columns that their rows have."""

    number: int
    issue: int
    """Number of earlier issues of this group, which is the attempt number of its members."""
    retry: int
    holder: str
    granted: int
    """Step of the engine's version at issue; no token of the group has an older version."""
    members: dict[AttemptId, Attempt]
    running: int
    """Number of members that are neither sealed nor dropped."""
    rows: dict[RowId, None] = field(default_factory=dict)
    """Ids of the rows of members that are sealed (all their rows are put), in order of arrival."""
    first_columns: dict[str, int] = field(default_factory=dict)
    """column -> number of rows whose put contained the column."""
    derived: dict[str, tuple[Version | None, str]] = field(default_factory=dict)
    """column written under a claim -> (version that computed it, None for fixed weights; task that wrote it)."""
    floor: int = 0
    """Oldest version among the trained tokens; while members run, `granted` counts as well."""
    sealed_at: int = 0
    """The actor's version when the last member was sealed."""
    claimed: bool = False
    trained_to: int | None = None
    """Version completed by the step that trained the group; None: not trained."""
    recorded: int | None = None
    """`trained_to` before a rollback gave the group back; such groups are claimed first, in this order."""

    @property
    def complete(self) -> bool:
        return self.running == 0

    @property
    def valid(self) -> list[Attempt]:
        """Members that were scored and not dropped, in order."""
        return [
            member for member in self.members.values() if member.sealed and member.state is not AttemptState.DROPPED
        ]

    @property
    def newest(self) -> int:
        """Newest step among the trained tokens, which are all of one lineage; `granted` if no token is trained."""
        seals = [member.sealed for member in self.valid if member.sealed and member.sealed.trained_tokens]
        return max(
            (step for seal in seals for step in (seal.newest.values() or (self.sealed_at,))), default=self.granted
        )

    @property
    def rows_kept(self) -> bool:
        """True if the rows are still stored, or the group never had rows."""
        return bool(self.rows) or not any(m.sealed and m.sealed.num_rows for m in self.valid)

    def has(self, columns: frozenset[str]) -> bool:
        """Return True if every row has all of these columns."""
        count = len(self.rows)
        return all(name in self.derived or self.first_columns.get(name, 0) == count for name in columns)

    def claim_order(self) -> tuple[float, int, int]:
        """Return a sort key: groups given back by a rollback first, as recorded; then by last version, then by number."""
        return (math.inf if self.recorded is None else self.recorded, self.floor, self.number)

    def update_floor(self) -> None:
        """Recompute the floor. While members run, `granted` counts as well as the trained tokens."""
        floors = [seal.floor for member in self.valid if (seal := member.sealed) and seal.trained_tokens]
        self.floor = min(floors) if floors and not self.running else min([self.granted, *floors])


class Lineage:
    """The versions that the actor's present weights descend from, across any number of rollbacks.

    A rollback to step c begins a new incarnation; of earlier incarnations only the versions up to c survive. Within a
    lineage a step names one version, so floors, lags and the `weight_versions` of rows are plain steps. Different
    incarnations give the same step to different weights, so steps must never be compared across a rollback. Three
    classes ensure this: `Router` gives no request to an engine of an earlier incarnation, `EngineSupervisor` lets no
    request run while its engine loads weights of another incarnation, and the queue accepts no sample of weights that
    did not survive. The queue needs one step for each incarnation that sampled (`Sealed.newest`), not one per token.

    Invariants:
    - Tokens of all live and provisional groups are of versions in the lineage.
    - A version that was given up never returns.
    """

    def __init__(self, version: Version) -> None:
        self.incarnation = version.incarnation
        self._restored = version.step
        """Last surviving step of the earlier incarnations that are not in `_last`."""
        self._last: dict[int, int] = {}
        """earlier incarnation in this process -> its last surviving step."""

    def has(self, incarnation: int, step: int) -> bool:
        """Return True if a version is in the lineage; a version of a later incarnation than the actor's is not."""
        if incarnation == self.incarnation:
            return True
        return incarnation < self.incarnation and step <= self._last.get(incarnation, self._restored)

    def rollback(self, step: int, incarnation: int) -> None:
        """Give up the versions after this step, and begin a new incarnation."""
        self._last = {known: min(last, step) for known, last in {**self._last, self.incarnation: step}.items()}
        self.incarnation, self._restored = incarnation, min(self._restored, step)


class Ledger:
    """Groups by number: `live` (in flight), `provisional` (trained, not final), `pending` (to be issued again).

    Life cycle of an attempt: `issued -> running -> scored -> claimed -> trained | dropped`; `claimed -> scored` when a
    claim is given back, `trained -> scored | dropped` when a rollback undoes the step.

    Invariants:
    - A group is in at most one of `live`, `provisional` and `pending`; a pending group has no members.
    - An attempt ends once: `issued` equals `trained` + the sum of `dropped` + the open attempts of live groups.
    - A group leaves the ledger when each member is trained for good or dropped; `faults` names groups that left before.
    - `records` holds every change that must outlive the process, in order.
    """

    def __init__(self, group_size: int, remembered: RememberedRecord) -> None:
        self.group_size = group_size
        self.next_group = remembered.next_group
        self.pending: list[tuple[int, int, int]] = sorted(remembered.pending)
        self.live: dict[int, Group] = {}
        self.provisional: dict[int, Group] = {}
        self.issued = remembered.issued
        self.trained = remembered.trained
        self.trained_without_gradient = remembered.trained_without_gradient
        self.dropped: Counter[str] = Counter(dict(remembered.dropped))
        self.histograms = SampleHistograms()
        self.records: list[Record] = []
        self.faults: list[str] = []

    # -- from issue to score -------------------------------------------------------------------------------------

    def issue(self, holder: str, granted: int) -> Group:
        """Issue the first pending group, or a new group if none is pending."""
        if self.pending:
            number, issue, retry = self.pending.pop(0)
        else:
            number, issue, retry = self.next_group, 0, 0
            self.next_group += 1
        ids = [AttemptId(number, sample, issue) for sample in range(self.group_size)]
        members = {attempt: Attempt(attempt) for attempt in ids}
        group = Group(number, issue, retry, holder, granted, members, self.group_size, floor=granted)
        self.live[number] = group
        self.issued += self.group_size
        self.records.append(IssuedRecord(number, issue, retry, self.group_size))
        return group

    def member(self, attempt: AttemptId) -> tuple[Group, Attempt] | None:
        """Return a live attempt with its group; None if the attempt has ended or never existed."""
        group = self.live.get(attempt.group)
        member = group.members.get(attempt) if group else None
        return None if group is None or member is None or member.state is AttemptState.DROPPED else (group, member)

    def has_left_producer(self, attempt: AttemptId) -> bool:
        """Return True if an attempt is sealed or has ended, although its producer may still report it."""
        group = self.live.get(attempt.group)
        if group is None:
            return attempt.group < self.next_group
        member = group.members.get(attempt)
        if member is None:
            return attempt.attempt < group.issue
        return member.sealed is not None or member.reason is not None

    def seal(self, group: Group, member: Attempt, sealed: Sealed, rows: Iterable[RowId], version: int) -> None:
        """Record that a sample was scored and its rows are stored."""
        member.state, member.sealed = AttemptState.SCORED, sealed
        group.running -= 1
        group.sealed_at = max(group.sealed_at, version)
        group.rows.update(dict.fromkeys(rows))
        if group.complete:
            group.update_floor()
        elif sealed.trained_tokens:  # the result of `update_floor`, without its loop over all members
            group.floor = min(group.floor, sealed.floor)

    def drop(self, group: Group, member: Attempt, reason: DropReason, unjudged: Sealed | None = None) -> None:
        """Drop one attempt of a live group; `unjudged` is the seal of a sample that failed, whose rows are not kept."""
        group.running -= member.sealed is None
        group.rows = {row: None for row in group.rows if row[:3] != member.id}
        self._drop(member, reason, unjudged)
        group.update_floor()

    def end(self, group: Group, reason: DropReason, again: bool = False, retry: int = 0) -> None:
        """Drop the remaining attempts of a live group.

        With `again`, admission issues the group again before any new group; `retry` is added to its retry count.
        """
        for member in group.members.values():
            if member.state is not AttemptState.DROPPED:
                self._drop(member, reason)
        group.running = 0
        self._close(group)
        if again:
            insort(self.pending, (group.number, group.issue + 1, group.retry + retry))
            self.records.append(PendingRecord(group.number, group.retry + retry))

    def _drop(self, member: Attempt, reason: DropReason, unjudged: Sealed | None = None) -> None:
        self.histograms.dropped(member.id, unjudged or member.sealed, reason)
        member.state, member.reason = AttemptState.DROPPED, reason
        self.dropped[reason.value] += 1
        self.records.append(EndedRecord(member.id, reason.value, None, -1, True))

    def _close(self, group: Group) -> None:
        """Remove a group whose members have all ended; only counts remain."""
        ends = (AttemptState.DROPPED, AttemptState.TRAINED)
        left = [attempt for attempt, member in group.members.items() if member.state not in ends]
        if left or len(group.members) != self.group_size:
            self.faults.append(f"group {group.number} left the ledger with open members: {left or len(group.members)}")
        self.live.pop(group.number, None)

    # -- training ------------------------------------------------------------------------------------------------

    def claim(self, group: Group, claimed: bool) -> None:
        """Record that the actor has claimed the group, or has given it back."""
        group.claimed = claimed
        for member in group.valid:
            member.state = AttemptState.CLAIMED if claimed else AttemptState.SCORED

    def train(self, group: Group, step: int, without_gradient: frozenset[RowId]) -> None:
        """Record that the update which completes version `step` was applied: the members are trained, provisionally."""
        if group.number in self.provisional or self.live.get(group.number) is not group:
            fix = "this is a bug in Relax: report it with `ledger.db` and `logs/` of the run directory"
            raise RelaxError(f"ledger: group {group.number} would be trained twice; {fix}")
        moving = {row[:3] for row in group.rows if row not in without_gradient}
        self.records.append(TrainedRecord(group.number, step))
        newest = group.newest
        self.histograms.trained(group, step - 1)
        for member in group.valid:
            member.state, member.with_gradient = AttemptState.TRAINED, member.id in moving
            self._count_trained(member, 1)
            self.records.append(EndedRecord(member.id, "", step, newest, member.with_gradient))
        group.claimed, group.trained_to = False, step
        self.provisional[group.number] = self.live.pop(group.number)

    def _count_trained(self, member: Attempt, sign: int) -> None:
        self.trained += sign
        self.trained_without_gradient += 0 if member.with_gradient else sign

    def finalize(self, step: int, wanted: Set[int] = frozenset()) -> list[Group]:
        """Remove and return the groups that a checkpoint of version `step` covers, except those in `wanted`."""
        found = self.provisional.values()
        final = [group for group in found if (group.trained_to or 0) <= step and group.number not in wanted]
        for group in final:
            del self.provisional[group.number]
            self._close(group)
        return final

    # -- lineage -------------------------------------------------------------------------------------------------

    def rollback(self, step: int, incarnation: int, moved: bool) -> tuple[list[Group], list[Group], list[Group]]:
        """Undo the steps after version `step`; return the groups (given back, ended after training, ended while live).

        A group ends if it has a trained token of weights that are given up, or if its rows are no longer stored. If the
        version `moved` back, incomplete groups end too, since they may hold such tokens. Ended groups are issued again.
        """
        self.records.append(RollbackRecord(step, incarnation))
        unfinished = [g for g in self.live.values() if g.newest > step or (moved and not g.complete)]
        for group in unfinished:
            self.end(group, DropReason.ABANDONED, again=True)
        returned, undone = [], []
        for group in [group for group in self.provisional.values() if (group.trained_to or 0) > step]:
            self.live[group.number] = self.provisional.pop(group.number)
            for member in group.members.values():
                if member.state is AttemptState.TRAINED:
                    self._count_trained(member, -1)
                    member.state = AttemptState.SCORED
            group.recorded, group.trained_to = group.trained_to, None
            if group.newest <= step and group.rows_kept:
                returned.append(group)
            else:
                self.end(group, DropReason.ABANDONED if group.newest > step else DropReason.RESUMED, again=True)
                undone.append(group)
        return returned, undone, unfinished


class SampleHistograms:
    """Histograms of trained lag, and of ended samples' lengths by the next power of two; rollbacks keep all counts."""

    def __init__(self) -> None:
        self.lag: Counter[int] = Counter()
        self.dropped_lengths: dict[str, Counter[int]] = {}
        self.trained_lengths: Counter[int] = Counter()
        self._unfinished: dict[AttemptId, str] = {}
        """attempt dropped during generation -> reason; the producer reports the attempt's length later."""

    def trained(self, group: Group, version: int) -> None:
        """Count the samples of a group that is trained by the step which starts at `version`."""
        for member in group.valid:
            if member.sealed and member.sealed.trained_tokens:
                self.lag[version - member.sealed.floor] += 1
                self.trained_lengths[_bucket(member.sealed.trained_tokens)] += 1

    def dropped(self, attempt: AttemptId, sealed: Sealed | None, reason: DropReason) -> None:
        """Count a dropped sample; an unsealed sample counts under -1 until its producer reports the length."""
        lengths = self.dropped_lengths.setdefault(reason.value, Counter())
        lengths[-1 if sealed is None else _bucket(sealed.trained_tokens)] += 1
        if sealed is None:
            self._unfinished[attempt] = reason.value
            if len(self._unfinished) > MAX_UNFINISHED:
                del self._unfinished[next(iter(self._unfinished))]

    def given_up(self, tokens: Mapping[AttemptId, int]) -> None:
        """Count the lengths, in tokens, of dropped attempts that their producer has aborted."""
        for attempt, count in tokens.items():
            if (reason := self._unfinished.pop(attempt, None)) is not None:
                lengths = self.dropped_lengths[reason]
                lengths[-1] -= 1
                lengths[_bucket(count)] += 1


def _bucket(length: int) -> int:
    return 1 << max(0, length - 1).bit_length() if length else 0
