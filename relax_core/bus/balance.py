# SPDX-License-Identifier: Apache-2.0
"""The account: what the ledger believes against what producers, rows and leases show, by id sets.

A number that happens to fit proves nothing, so a difference names the attempts that are missing or too many.
"""

from __future__ import annotations

from collections.abc import Iterable

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Account
from relax_core.bus.group import State
from relax_core.bus.leases import Leases
from relax_core.bus.ledger import Ledger
from relax_core.bus.table import Table

NAMED = 5
"""Ids named in a problem; the rest are counted."""


def account(ledger: Ledger, working: set[AttemptId], table: Table, leases: Leases) -> Account:
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
        if member.state is not State.DROPPED
    }


def _held(ledger: Ledger, working: set[AttemptId], table: Table) -> set[AttemptId]:
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
