# SPDX-License-Identifier: Apache-2.0
"""The balance of samples, and histograms of what became of them.

The balance compares id by id what the ledger has in flight with what producers, rows and leases show: a number that
happens to fit proves nothing, so a difference names the attempts that are missing or too many.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Account, Issue, Sealed
from relax_core.api.trajectory import DropReason
from relax_core.bus.leases import Leases, belongs
from relax_core.bus.ledger import AttemptState, Group, Ledger
from relax_core.bus.store import RowTable

MAX_NAMED = 5
"""Ids named in a problem; the rest are counted."""
MAX_UNFINISHED = 1 << 16
"""Dropped attempts whose length is awaited: a holder that died never tells it."""


def account(ledger: Ledger, working: set[AttemptId], table: RowTable, leases: Leases) -> Account:
    """Return the ledger's balance; `working` is what producers hold or are about to get."""
    members = (item for group in ledger.live.values() for item in group.members.items())
    believed = {attempt for attempt, member in members if member.state is not AttemptState.DROPPED}
    held = {attempt for attempt in working if not _left_producer(ledger, attempt)}
    held.update(attempt for attempt in table.samples if table.complete(attempt))
    leased = sorted(number for lease in leases.out.values() if lease.trains for number in lease.groups)
    claimed = sorted(number for number, group in ledger.live.items() if group.claimed)
    ended = ledger.trained + sum(ledger.dropped.values())
    problems = []
    if lost := believed - held:
        problems.append(f"the ledger has in flight but no holder does: {_names(lost)}")
    if unknown := held - believed:
        problems.append(f"a holder has but the ledger does not: {_names(unknown)}")
    if leased != claimed:
        problems.append(f"claimed groups {claimed} are not the leased ones {leased}")
    problems += ledger.faults
    if ledger.issued != ended + len(held):
        problems.append(f"issued {ledger.issued} is not trained and dropped {ended} + in flight {len(held)}")
    return Account(
        ledger.issued,
        ledger.trained,
        ledger.trained_without_gradient,
        dict(ledger.dropped),
        len(held),
        not problems,
        "; ".join(problems),
    )


def _left_producer(ledger: Ledger, attempt: AttemptId) -> bool:
    """Tell whether an attempt has ended, or is sealed and so to be found in the table; producers may notice late."""
    group = ledger.live.get(attempt.group)
    if group is None:
        return attempt.group < ledger.next_group
    member = group.members.get(attempt)
    return attempt.attempt < group.issue if member is None else member.sealed is not None or member.reason is not None


def _names(ids: Iterable[AttemptId]) -> str:
    found = sorted(ids)
    names = ", ".join(f"{group}/{sample}/{attempt}" for group, sample, attempt in found[:MAX_NAMED])
    return names + (f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else "")


class Report:
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


@dataclass(slots=True)
class Holder:
    """One producer's newest report, and the attempts that were admitted to it since."""

    reported: frozenset[AttemptId] = frozenset()
    seen: int = 0
    """Attempts that had been admitted to it when it made the report."""
    admitted: int = 0
    since: deque[AttemptId] = field(default_factory=deque)


class Holders:
    """Attempts that producers say they work on, by producer. The balance counts from here, so that a lost one is seen.

    Invariant: a report covers the attempts that its holder had been admitted by then; later ones count as on their way.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Holder] = {}

    def admit(self, name: str, issue: Issue) -> None:
        holder = self.by_name.setdefault(name, Holder())
        holder.admitted += len(issue.attempts)
        holder.since.extend(issue.attempts)

    def report(self, name: str, attempts: frozenset[AttemptId], admitted: int) -> None:
        """Take a report unless a later one was here before it."""
        holder = self.by_name.setdefault(name, Holder())
        if admitted < holder.seen:
            return
        for _ in range(min(admitted, holder.admitted) - holder.seen):
            holder.since.popleft()
        holder.seen, holder.reported = min(admitted, holder.admitted), attempts

    def forget(self, role: str) -> None:
        """Forget the producers of a role: its new incarnation holds nothing yet."""
        self.by_name = {name: holder for name, holder in self.by_name.items() if not belongs(name, role)}

    def attempts(self) -> set[AttemptId]:
        """Return all that producers hold or are about to get."""
        return set().union(*((*holder.reported, *holder.since) for holder in self.by_name.values()))
