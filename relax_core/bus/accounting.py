# SPDX-License-Identifier: Apache-2.0
"""What the bus measures: lag of what was trained, length of what was dropped, and where groups stand now.

The account: what the ledger believes against what producers, rows and leases show, by id sets.

A number that happens to fit proves nothing, so a difference names the attempts that are missing or too many.

What the producers say they work on. The account counts from here, so that a lost attempt is seen as lost.

A report covers the attempts that its holder had been admitted by then; later ones are still on their way to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Account, Issue, Sealed
from relax_core.api.trajectory import DropReason
from relax_core.bus.leases import Leases, belongs
from relax_core.bus.ledger import AttemptState, Group, Ledger
from relax_core.bus.store import RowTable

if TYPE_CHECKING:
    from relax_core.bus.ledger import Ledger
    from relax_core.bus.queue import TransferQueue


MOST_UNTOLD = 1 << 16
"""Of a holder that died nobody will tell."""


class Report:
    """Histograms that only grow."""

    def __init__(self) -> None:
        self.lag: Counter[int] = Counter()
        self.dropped_lengths: dict[str, Counter[int]] = {}
        self.trained_lengths: Counter[int] = Counter()
        self._untold: dict[AttemptId, str] = {}
        """Attempts that ended while they were generated, by reason: their holder tells how long they were."""

    def trained(self, group: Group, version: int) -> None:
        """A group is trained by the step that starts at `version`."""
        for member in group.valid:
            if member.sealed and member.sealed.trained_tokens:
                self.lag[version - member.sealed.floor] += 1
                self.trained_lengths[_bucket(member.sealed.trained_tokens)] += 1

    def dropped(self, attempt: AttemptId, sealed: Sealed | None, reason: DropReason) -> None:
        """A sample ended; one that was not finished is counted under -1 until its holder has told its length."""
        lengths = self.dropped_lengths.setdefault(reason.value, Counter())
        lengths[-1 if sealed is None else _bucket(sealed.trained_tokens)] += 1
        if sealed is None:
            self._untold[attempt] = reason.value
            if len(self._untold) > MOST_UNTOLD:
                del self._untold[next(iter(self._untold))]

    def given_up(self, tokens: Mapping[AttemptId, int]) -> None:
        """A holder has aborted what had ended, and tells how long it was."""
        for attempt, count in tokens.items():
            if (reason := self._untold.pop(attempt, None)) is not None:
                lengths = self.dropped_lengths[reason]
                lengths[-1] -= 1
                lengths[_bucket(count)] += 1


def statistics(queue: TransferQueue) -> Mapping[str, Any]:
    """Plain data for metrics and `relax why`; lengths are by the next power of two."""
    ledger, report = queue.ledger, queue.report
    groups = Counter("claimed" if g.claimed else "ready" if g.complete else "running" for g in ledger.live.values())
    return {
        "version": queue.version.step,
        "rows": queue.credits.rows,
        "bytes": queue.credits.bytes,
        "kept_bytes": queue.credits.kept_bytes,
        "groups": {"pending": len(ledger.pending), "provisional": len(ledger.provisional), **groups},
        "oldest_group": min(_unfinished(ledger), default=ledger.next_group),
        "next_group": ledger.next_group,
        "waited_for": sorted(number for number, group in ledger.live.items() if not group.complete),
        "leases": {lease.number: lease.task for lease in queue.leases.out.values()},
        "lag_histogram": dict(sorted(report.lag.items())),
        "lag_max": max(report.lag, default=0),
        "dropped": dict(ledger.dropped),
        "dropped_lengths": {reason: dict(sorted((+found).items())) for reason, found in report.dropped_lengths.items()},
        "trained_lengths": dict(sorted(report.trained_lengths.items())),
    }


def _unfinished(ledger: Ledger) -> Iterator[int]:
    """Groups that are live, that a rollback may bring back, or that will be issued again."""
    yield from ledger.live
    yield from ledger.provisional
    yield from (number for number, _, _ in ledger.pending)


def _bucket(length: int) -> int:
    return 1 << max(0, length - 1).bit_length() if length else 0


NAMED = 5
"""Ids named in a problem; the rest are counted."""


def account(ledger: Ledger, working: set[AttemptId], table: RowTable, leases: Leases) -> Account:
    """The ledger's balance; `working` is what producers hold or are about to get."""
    believed, held = _believed(ledger), _held(ledger, working, table)
    problems = [
        _named("the ledger has in flight but no holder does", believed - held),
        _named("a holder has but the ledger does not", held - believed),
        _leased(ledger, leases),
        *ledger.faults,
    ]
    ended = ledger.trained + sum(ledger.dropped.values())
    if ledger.issued != ended + len(held):
        problems.append(f"issued {ledger.issued} is not trained and dropped {ended} + in flight {len(held)}")
    problem = "; ".join(filter(None, problems))
    return Account(
        ledger.issued,
        ledger.trained,
        ledger.trained_without_gradient,
        dict(ledger.dropped),
        len(held),
        not problem,
        problem,
    )


def _believed(ledger: Ledger) -> set[AttemptId]:
    return {
        attempt
        for group in ledger.live.values()
        for attempt, member in group.members.items()
        if member.state is not AttemptState.DROPPED
    }


def _held(ledger: Ledger, working: set[AttemptId], table: RowTable) -> set[AttemptId]:
    """Counted from the holders: what works on it, or all its rows in the table; not what is known to have ended."""
    held = {attempt for attempt in working if not _over(ledger, attempt)}
    held.update(a for a in table.samples if table.complete(a))
    return held


def _over(ledger: Ledger, attempt: AttemptId) -> bool:
    """Whether an attempt has ended, or is sealed and so to be found in the table; holders may be late to notice."""
    group = ledger.live.get(attempt.group)
    if group is None:
        return attempt.group < ledger.next_group
    member = group.members.get(attempt)
    return attempt.attempt < group.issue if member is None else member.sealed is not None or member.reason is not None


def _leased(ledger: Ledger, leases: Leases) -> str:
    """A claimed group is in exactly one lease that trains."""
    leased = sorted(number for lease in leases.out.values() if lease.trains for number in lease.groups)
    claimed = sorted(number for number, group in ledger.live.items() if group.claimed)
    return "" if leased == claimed else f"claimed groups {claimed} are not the leased ones {leased}"


def _named(what: str, ids: Iterable[AttemptId]) -> str:
    found = sorted(ids)
    if not found:
        return ""
    names = ", ".join(f"{group}/{sample}/{attempt}" for group, sample, attempt in found[:NAMED])
    return f"{what}: {names}" + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")


@dataclass(slots=True)
class Holder:
    """One producer's newest report, and what was admitted to it since."""

    reported: frozenset[AttemptId] = frozenset()
    seen: int = 0
    admitted: int = 0
    on_the_way: deque[AttemptId] = field(default_factory=deque)


class Holders:
    """All producers by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Holder] = {}

    def admit(self, name: str, issue: Issue) -> None:
        holder = self.by_name.setdefault(name, Holder())
        holder.admitted += len(issue.attempts)
        holder.on_the_way.extend(issue.attempts)

    def report(self, name: str, attempts: frozenset[AttemptId], admitted: int) -> None:
        """Take a report unless a later one was here before it."""
        holder = self.by_name.setdefault(name, Holder())
        if admitted < holder.seen:
            return
        for _ in range(min(admitted, holder.admitted) - holder.seen):
            holder.on_the_way.popleft()
        holder.seen, holder.reported = min(admitted, holder.admitted), attempts

    def forget(self, role: str) -> None:
        """A new incarnation holds nothing yet."""
        for name in [name for name in self.by_name if belongs(name, role)]:
            del self.by_name[name]

    def attempts(self) -> set[AttemptId]:
        """All that producers hold or are about to get."""
        return set().union(*((*holder.reported, *holder.on_the_way) for holder in self.by_name.values()))
