# SPDX-License-Identifier: Apache-2.0
"""The sample ledger: every attempt from its issue to its one end, by id, and the lineage of trained steps.

A trained group is provisional until a checkpoint covers its step; a rollback returns it to ready or ends it.
Groups whose members have all ended are checked by set and folded into counts. No IO, no time: facts that must be
durable are left in `records` for whoever owns the journal.

A group in the ledger: the attempts of one issue, what is known of each, and which columns its rows have.

Data with the questions one group can answer of itself; what happens to it is decided in the ledger and the queue.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from enum import StrEnum

from relax_core.api.batch import AttemptId, AttemptIds, RowId
from relax_core.api.bus import Issue, Sealed
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


class AttemptState(StrEnum):
    """Where an attempt is; the last two are its end."""

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
    """All attempts of one issue of a group."""

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
    """Rows that were put with a column."""
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

    @staticmethod
    def issued(number: int, issue: int, retry: int, holder: str, granted: int, size: int) -> Group:
        ids = [AttemptId(number, sample, issue) for sample in range(size)]
        return Group(number, issue, retry, holder, granted, {i: Attempt(i) for i in ids}, size, floor=granted)

    def as_issue(self) -> Issue:
        return Issue(self.number, AttemptIds(self.members), self.retry)

    @property
    def complete(self) -> bool:
        return self.running == 0

    @property
    def valid(self) -> list[Attempt]:
        """Members with a verdict that were not dropped, by place."""
        return [
            member for member in self.members.values() if member.sealed and member.state is not AttemptState.DROPPED
        ]

    def settle(self) -> None:
        """Know the floor again: what was granted counts while members run, then only what is trained."""
        floors = [seal.floor for member in self.valid if (seal := member.sealed) and seal.trained_tokens]
        self.floor = min(floors) if floors and not self.running else min([self.granted, *floors])

    @property
    def newest(self) -> int:
        """Newest version among its trained tokens; what was granted, without any."""
        sealed = [member.sealed for member in self.valid if member.sealed]
        told = (self.sealed_at if seal.newest is None else seal.newest for seal in sealed if seal.trained_tokens)
        return max(told, default=self.granted)

    def has(self, columns: frozenset[str]) -> bool:
        """Whether every row has them all."""
        count = len(self.rows)
        return all(name in self.derived or self.first_columns.get(name, 0) == count for name in columns)

    def ordered_rows(self) -> list[RowId]:
        return sorted(self.rows)


class Ledger:
    """Groups by number: `live` (in flight), `provisional` (trained, not final), `pending` (to be issued again)."""

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

    # -- from issue to verdict ------------------------------------------------------------------------------------

    def issue(self, holder: str, granted: int) -> Group:
        """The next group: one to be issued again, else a new one."""
        if self.pending:
            number, issue, retry = self.pending.pop(0)
        else:
            number, issue, retry = self.next_group, 0, 0
            self.next_group += 1
        group = Group.issued(number, issue, retry, holder, granted, self.group_size)
        self.live[number] = group
        self.issued += self.group_size
        self.records.append(IssuedRecord(number, issue, retry, self.group_size))
        return group

    def member(self, attempt: AttemptId) -> tuple[Group, Attempt] | None:
        """A live attempt with its group; None where it has ended or never was."""
        group = self.live.get(attempt.group)
        member = group.members.get(attempt) if group else None
        return None if group is None or member is None or member.state is AttemptState.DROPPED else (group, member)

    def seal(self, group: Group, member: Attempt, sealed: Sealed, rows: Iterable[RowId], version: int) -> None:
        """A sample was judged and its rows are stored."""
        member.state, member.sealed = AttemptState.SCORED, sealed
        group.running -= 1
        group.sealed_at = max(group.sealed_at, version)
        group.rows.update(dict.fromkeys(rows))
        if group.complete:
            group.settle()
        elif sealed.trained_tokens:  # as `settle` would find it, without a look at every member for each of them
            group.floor = min(group.floor, sealed.floor)

    def drop(self, group: Group, member: Attempt, reason: DropReason) -> None:
        """End one attempt of a live group."""
        group.running -= member.sealed is None
        group.rows = {row: None for row in group.rows if row.attempt_id != member.id}
        self._end(group, member, reason)
        group.settle()

    def end(self, group: Group, reason: DropReason, again: bool = False, retry: int = 0) -> None:
        """End all that is left of a live group; `again` issues it once more, `retry` counts it as another try."""
        for member in group.members.values():
            if member.state is not AttemptState.DROPPED:
                self._end(group, member, reason)
        group.running = 0
        self.forget(group)
        if again:
            self.put_off(group, retry)

    def put_off(self, group: Group, retry: int = 0) -> None:
        """Let admission issue the group again, before any new one."""
        insort(self.pending, (group.number, group.issue + 1, group.retry + retry))
        self.records.append(PendingRecord(group.number, group.retry + retry))

    def forget(self, group: Group) -> None:
        """Every member has ended: only counts remain."""
        left = [
            i for i, member in group.members.items() if member.state not in (AttemptState.DROPPED, AttemptState.TRAINED)
        ]
        if left or len(group.members) != self.group_size:
            self.faults.append(f"group {group.number} closed with {left or len(group.members)} open")
        self.live.pop(group.number, None)

    def _end(self, group: Group, member: Attempt, reason: DropReason) -> None:
        member.state, member.reason = AttemptState.DROPPED, reason
        self.dropped[reason.value] += 1
        self.records.append(EndedRecord(member.id, reason.value, None, -1, True))

    # -- training -------------------------------------------------------------------------------------------------

    def claim(self, group: Group, claimed: bool) -> None:
        """The actor has taken the group, or gives it back."""
        group.claimed = claimed
        for member in group.valid:
            member.state = AttemptState.CLAIMED if claimed else AttemptState.SCORED

    def train(self, group: Group, step: int, without_gradient: frozenset[RowId]) -> None:
        """The update that completes version `step` was applied: its members are trained, provisionally."""
        if group.number in self.provisional or self.live.get(group.number) is not group:
            raise RelaxError(f"ledger: group {group.number} would be trained twice; report this with `relax bundle`")
        moving = {row.attempt_id for row in group.rows if row not in without_gradient}
        self.records.append(TrainedRecord(group.number, step))
        newest = group.newest
        for member in group.valid:
            member.state, member.with_gradient = AttemptState.TRAINED, member.id in moving
            self._count_trained(member, 1)
            self.records.append(EndedRecord(member.id, "", step, newest, member.with_gradient))
        group.claimed, group.trained_to = False, step
        self.provisional[group.number] = self.live.pop(group.number)

    def finalize(self, step: int, wanted: Set[int] = frozenset()) -> list[Group]:
        """A checkpoint of version `step` exists; returns the groups that nothing can bring back now and nobody wants."""
        found = self.provisional.values()
        final = [group for group in found if (group.trained_to or 0) <= step and group.number not in wanted]
        for group in final:
            del self.provisional[group.number]
            self.forget(group)
        return final

    def _count_trained(self, member: Attempt, sign: int) -> None:
        self.trained += sign
        self.trained_without_gradient += 0 if member.with_gradient else sign

    # -- lineage --------------------------------------------------------------------------------------------------

    def rollback(self, step: int, incarnation: int, moved: bool) -> tuple[list[Group], list[Group], list[Group]]:
        """Undo what came after version `step`. Returns trained groups given back, trained groups ended, unfinished ones ended.

        Ended are groups with a trained token of weights that are given up, and rows that are no longer kept; where
        the version `moved` back, unfinished ones may hold such tokens too. All of them are issued again.
        """
        self.records.append(RollbackRecord(step, incarnation))
        unfinished = [g for g in self.live.values() if g.newest > step or (moved and not g.complete)]
        for group in unfinished:
            self.end(group, DropReason.ABANDONED, again=True)
        undone = [group for group in self.provisional.values() if (group.trained_to or 0) > step]
        returned = [group for group in undone if self._undo(group, step)]
        return returned, [group for group in undone if group.number not in self.live], unfinished

    def _undo(self, group: Group, step: int) -> bool:
        """Bring a provisional group back; False where it had to end instead."""
        del self.provisional[group.number]
        self.live[group.number] = group
        for member in group.members.values():
            if member.state is AttemptState.TRAINED:
                self._count_trained(member, -1)
                member.state = AttemptState.SCORED
        kept = group.rows or not any(m.sealed and m.sealed.num_rows for m in group.valid)
        group.recorded, group.trained_to = group.trained_to, None
        if group.newest <= step and kept:
            return True
        self.end(group, DropReason.ABANDONED if group.newest > step else DropReason.RESUMED, again=True)
        return False
