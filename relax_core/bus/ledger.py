# SPDX-License-Identifier: Apache-2.0
"""The sample ledger: every attempt from its issue to its one end, by id, and the lineage of trained steps.

It has no IO and no time, and decides nothing: the queue says what happens, and the journal keeps the `records` left here.
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
"""Dropped attempts whose length is awaited: a holder that died never tells it."""


class AttemptState(StrEnum):
    """State of an attempt; the last two are its end."""

    ISSUED = "issued"
    RUNNING = "running"
    SCORED = "scored"
    CLAIMED = "claimed"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(slots=True)
class Attempt:
    """One sample attempt."""

    id: AttemptId
    state: AttemptState = AttemptState.ISSUED
    sealed: Sealed | None = None
    reason: DropReason | None = None
    with_gradient: bool = True


@dataclass(slots=True)
class Group:
    """All attempts of one issue of a group, and which columns their rows have."""

    number: int
    issue: int
    """Counts the issues of this group; it is the attempt number of its members."""
    retry: int
    holder: str
    granted: int
    """Step of the engine's version when it was issued: no token of it is older."""
    members: dict[AttemptId, Attempt]
    running: int
    """Members neither sealed nor dropped."""
    rows: dict[RowId, None] = field(default_factory=dict)
    """Rows that are sealed, in the order they came."""
    first_columns: dict[str, int] = field(default_factory=dict)
    """Number of rows that were put with a column."""
    derived: dict[str, tuple[Version | None, str]] = field(default_factory=dict)
    """Columns written under a claim: the version that made them, and the task."""
    floor: int = 0
    """Oldest version among its trained tokens, as far as known."""
    sealed_at: int = 0
    """The actor's version when the last member was sealed."""
    claimed: bool = False
    trained_to: int | None = None
    """The version that its training completed; a rolled-back group keeps its place in `recorded`."""
    recorded: int | None = None

    @property
    def complete(self) -> bool:
        return self.running == 0

    @property
    def valid(self) -> list[Attempt]:
        """Members that were scored and not dropped, in their order."""
        return [
            member for member in self.members.values() if member.sealed and member.state is not AttemptState.DROPPED
        ]

    @property
    def newest(self) -> int:
        """Newest step among its trained tokens, which are of one lineage; the granted one where it has none."""
        seals = [member.sealed for member in self.valid if member.sealed and member.sealed.trained_tokens]
        return max(
            (step for seal in seals for step in (seal.newest.values() or (self.sealed_at,))), default=self.granted
        )

    @property
    def rows_kept(self) -> bool:
        """True where its rows are still stored, or it never had any."""
        return bool(self.rows) or not any(m.sealed and m.sealed.num_rows for m in self.valid)

    def has(self, columns: frozenset[str]) -> bool:
        """Tell whether every row has all of these columns."""
        count = len(self.rows)
        return all(name in self.derived or self.first_columns.get(name, 0) == count for name in columns)

    def claim_order(self) -> tuple[float, int, int]:
        """Sort as recorded for what a rollback gave back; then by earliest expiry, then by number."""
        return (math.inf if self.recorded is None else self.recorded, self.floor, self.number)

    def update_floor(self) -> None:
        """Recompute the floor: the granted version counts while members run, then only what is trained."""
        floors = [seal.floor for member in self.valid if (seal := member.sealed) and seal.trained_tokens]
        self.floor = min(floors) if floors and not self.running else min([self.granted, *floors])


class Lineage:
    """Weights that the actor's present ones descend from, over any number of rollbacks.

    A rollback to step c begins another incarnation, and of those before it only the versions up to c survive. Within a
    lineage a step names one version, so that floors, lags and the `weight_versions` of rows are steps. Two incarnations
    give the same number to different weights, so that steps must never meet across a rollback. Three places see to it:
    an engine of an earlier incarnation is given nothing (`Router`), no request runs on while its engine takes weights of
    another one (`EngineSupervisor`), and the queue takes no sample of weights that do not survive. The last needs one step
    for each incarnation that sampled (`Sealed.newest`), and none for each token.

    Invariants:
    - Tokens of all live and provisional groups are of versions in the lineage.
    - What was once given up stays so.
    """

    def __init__(self, version: Version) -> None:
        self.incarnation = version.incarnation
        self._restored = version.step
        """Last step that survives of incarnations that are not known one by one."""
        self._last: dict[int, int] = {}
        """Last step that survives of each earlier incarnation of this process."""

    def has(self, incarnation: int, step: int) -> bool:
        """Tell whether a version is in the lineage; one of a later incarnation is none of this actor's."""
        if incarnation == self.incarnation:
            return True
        return incarnation < self.incarnation and step <= self._last.get(incarnation, self._restored)

    def rollback(self, step: int, incarnation: int) -> None:
        """Give up what came after this step."""
        self._last = {known: min(last, step) for known, last in {**self._last, self.incarnation: step}.items()}
        self.incarnation, self._restored = incarnation, min(self._restored, step)


class Ledger:
    """Groups by number: `live` (in flight), `provisional` (trained, not final), `pending` (to be issued again).

    Life cycle of an attempt: `issued -> running -> scored -> claimed -> trained | dropped`; `claimed -> scored` when a
    claim is given back, `trained -> scored | dropped` when a rollback undoes the step.

    Invariants:
    - A group is in at most one of `live`, `provisional` and `pending`; in `pending` it has lost its members.
    - An attempt ends once: `issued` is `trained` + all of `dropped` + the attempts of live groups that are not dropped.
    - A group leaves the ledger when each of its members is trained for good or dropped; `faults` names those that did not.
    - Every change that must outlive the process is in `records` in the order it happened.
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
        self.records: list[Record] = []
        self.faults: list[str] = []

    # -- from issue to score -------------------------------------------------------------------------------------

    def issue(self, holder: str, granted: int) -> Group:
        """Issue the next group: one that is pending, else a new one."""
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
        """Return a live attempt with its group; None where it has ended or never was."""
        group = self.live.get(attempt.group)
        member = group.members.get(attempt) if group else None
        return None if group is None or member is None or member.state is AttemptState.DROPPED else (group, member)

    def has_left_producer(self, attempt: AttemptId) -> bool:
        """Tell whether an attempt has ended, or is sealed and so to be found in the table; producers may notice late."""
        group = self.live.get(attempt.group)
        if group is None:
            return attempt.group < self.next_group
        member = group.members.get(attempt)
        if member is None:
            return attempt.attempt < group.issue
        return member.sealed is not None or member.reason is not None

    def seal(self, group: Group, member: Attempt, sealed: Sealed, rows: Iterable[RowId], version: int) -> None:
        """Note that a sample was scored and its rows are stored."""
        member.state, member.sealed = AttemptState.SCORED, sealed
        group.running -= 1
        group.sealed_at = max(group.sealed_at, version)
        group.rows.update(dict.fromkeys(rows))
        if group.complete:
            group.update_floor()
        elif sealed.trained_tokens:  # as `update_floor` would find it, without a look at every member for each of them
            group.floor = min(group.floor, sealed.floor)

    def drop(self, group: Group, member: Attempt, reason: DropReason) -> None:
        """End one attempt of a live group."""
        group.running -= member.sealed is None
        group.rows = {row: None for row in group.rows if row.attempt_id != member.id}
        self._drop(member, reason)
        group.update_floor()

    def end(self, group: Group, reason: DropReason, again: bool = False, retry: int = 0) -> None:
        """End all that is left of a live group; `again` lets admission issue it before any new one, as another `retry`."""
        for member in group.members.values():
            if member.state is not AttemptState.DROPPED:
                self._drop(member, reason)
        group.running = 0
        self._close(group)
        if again:
            insort(self.pending, (group.number, group.issue + 1, group.retry + retry))
            self.records.append(PendingRecord(group.number, group.retry + retry))

    def _drop(self, member: Attempt, reason: DropReason) -> None:
        member.state, member.reason = AttemptState.DROPPED, reason
        self.dropped[reason.value] += 1
        self.records.append(EndedRecord(member.id, reason.value, None, -1, True))

    def _close(self, group: Group) -> None:
        """Forget a group whose members have all ended: only counts remain."""
        ends = (AttemptState.DROPPED, AttemptState.TRAINED)
        left = [attempt for attempt, member in group.members.items() if member.state not in ends]
        if left or len(group.members) != self.group_size:
            self.faults.append(f"group {group.number} closed with {left or len(group.members)} open")
        self.live.pop(group.number, None)

    # -- training ------------------------------------------------------------------------------------------------

    def claim(self, group: Group, claimed: bool) -> None:
        """Note that the actor has taken the group, or gives it back."""
        group.claimed = claimed
        for member in group.valid:
            member.state = AttemptState.CLAIMED if claimed else AttemptState.SCORED

    def train(self, group: Group, step: int, without_gradient: frozenset[RowId]) -> None:
        """Note that the update which completes version `step` was applied: the members are trained, provisionally."""
        if group.number in self.provisional or self.live.get(group.number) is not group:
            fix = "this is a fault of Relax: report it with `ledger.db` and `logs/` of the run directory"
            raise RelaxError(f"ledger: group {group.number} would be trained twice; {fix}")
        moving = {row.attempt_id for row in group.rows if row not in without_gradient}
        self.records.append(TrainedRecord(group.number, step))
        newest = group.newest
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
        """Forget and return the groups that a checkpoint of version `step` covers and nobody wants any more."""
        found = self.provisional.values()
        final = [group for group in found if (group.trained_to or 0) <= step and group.number not in wanted]
        for group in final:
            del self.provisional[group.number]
            self._close(group)
        return final

    # -- lineage -------------------------------------------------------------------------------------------------

    def rollback(self, step: int, incarnation: int, moved: bool) -> tuple[list[Group], list[Group], list[Group]]:
        """Undo what came after version `step`; return trained groups given back, trained ones ended, unfinished ones ended.

        Ended are groups with a trained token of weights that are given up, and rows that are no longer kept; where
        the version `moved` back, unfinished ones may hold such tokens too. All of them are issued again.
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
    """Histograms that only grow: lag of what was trained, and lengths (by the next power of two) of all that ended."""

    def __init__(self) -> None:
        self.lag: Counter[int] = Counter()
        self.dropped_lengths: dict[str, Counter[int]] = {}
        self.trained_lengths: Counter[int] = Counter()
        self._unfinished: dict[AttemptId, str] = {}
        """Reasons of attempts that ended while they were generated: their holder tells how long they were."""

    def trained(self, group: Group, version: int) -> None:
        """Count a group that the step which starts at `version` trains."""
        for member in group.valid:
            if member.sealed and member.sealed.trained_tokens:
                self.lag[version - member.sealed.floor] += 1
                self.trained_lengths[_bucket(member.sealed.trained_tokens)] += 1

    def dropped(self, attempt: AttemptId, sealed: Sealed | None, reason: DropReason) -> None:
        """Count a sample that ended; an unfinished one under -1 until its holder has told its length."""
        lengths = self.dropped_lengths.setdefault(reason.value, Counter())
        lengths[-1 if sealed is None else _bucket(sealed.trained_tokens)] += 1
        if sealed is None:
            self._unfinished[attempt] = reason.value
            if len(self._unfinished) > MAX_UNFINISHED:
                del self._unfinished[next(iter(self._unfinished))]

    def given_up(self, tokens: Mapping[AttemptId, int]) -> None:
        """Count how long the dropped attempts were that a holder has aborted."""
        for attempt, count in tokens.items():
            if (reason := self._unfinished.pop(attempt, None)) is not None:
                lengths = self.dropped_lengths[reason]
                lengths[-1] -= 1
                lengths[_bucket(count)] += 1


def _bucket(length: int) -> int:
    return 1 << max(0, length - 1).bit_length() if length else 0
