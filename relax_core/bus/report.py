# SPDX-License-Identifier: Apache-2.0
"""What the bus measures: lag of what was trained, length of what was dropped, and where groups stand now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Sealed
from relax_core.api.outcome import DropReason
from relax_core.bus.group import Group

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
