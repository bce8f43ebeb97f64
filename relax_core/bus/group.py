# SPDX-License-Identifier: Apache-2.0
"""A group in the ledger: the attempts of one issue, what is known of each, and which columns its rows have.

Data with the questions one group can answer of itself; what happens to it is decided in the ledger and the queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from relax_core.api.batch import AttemptId, AttemptIds, RowId
from relax_core.api.bus import Issue, Sealed
from relax_core.api.outcome import DropReason
from relax_core.api.version import Version


class State(StrEnum):
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
    state: State = State.ISSUED
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
        return [member for member in self.members.values() if member.sealed and member.state is not State.DROPPED]

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
