# SPDX-License-Identifier: Apache-2.0
"""What a run's bus holds together, and how groups and leases end: the ground that puts, steps and claims stand on.

No IO, no clock. Facts to be made durable and blocks to be freed are left for whoever hosts it.
"""

from __future__ import annotations

from collections.abc import Iterable

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Account, BusSettings
from relax_core.api.outcome import DropReason
from relax_core.api.version import Version
from relax_core.bus import balance, gate
from relax_core.bus.checks import check_settings
from relax_core.bus.credits import Credits
from relax_core.bus.group import Group, State
from relax_core.bus.holders import Holders
from relax_core.bus.leases import Lease, Leases
from relax_core.bus.ledger import Ledger
from relax_core.bus.records import Record, Remembered
from relax_core.bus.report import Report
from relax_core.bus.table import Table

MAX_RETRIES = 3
"""`regenerate`: times that a late group is issued again before it is dropped."""


class Parts:
    """Ledger, table, leases, credits and holders' reports of one run, at one version."""

    def __init__(self, settings: BusSettings, version: Version, remembered: Remembered | None = None) -> None:
        remembered = remembered or Remembered()
        check_settings(settings)
        self.settings, self.version = settings, version
        self.rule = gate.Rule(settings.max_staleness, settings.groups_per_step, settings.spare_groups, settings.steps)
        self.credits = Credits(settings.max_rows, settings.max_bytes)
        self.table = Table(self.credits)
        self.ledger = Ledger(settings.group_size, remembered)
        self.leases = Leases(settings.lease_s)
        self.holders = Holders()
        self.report = Report()
        self.final_step = version.step
        self.paused = False
        self._roles = dict(remembered.roles)
        self._committed: frozenset[int] = frozenset()
        """Leases of the last step, to know a repeated commit."""
        self._overdue = False
        """Whether the coming step was claimed after its deadline."""
        self._late = False
        """Whether it was asked for after its deadline: what is ready is enough then, for whoever prepares it too."""
        self._next_key = 0

    # -- ends of groups --------------------------------------------------------------------------------------------------

    def _end(self, group: Group, reason: DropReason, again: bool = False, retry: int = 0) -> None:
        """End a live group with its leases and rows."""
        self._revoke_all(group)
        self._tell_dropped(group, group.members, reason)
        self.ledger.end(group, reason, again, retry)
        self._clean(group)

    def _clean(self, group: Group, kept: bool = False) -> None:
        """Its rows go, and no task has seen it."""
        self._revoke_all(group)
        self.table.remove(group.members, group.rows, kept)
        self.leases.forget(group.number)

    def _tell_dropped(self, group: Group, attempts: Iterable[AttemptId], reason: DropReason) -> None:
        for attempt in attempts:
            member = group.members[attempt]
            if member.state is not State.DROPPED:
                self.report.dropped(attempt, member.sealed, reason)

    def _shed(self, reason: DropReason) -> None:
        """End the fewest groups so that the others can be trained in time, as the `late` rule says."""
        if self.rule.max_staleness is None or self.settings.late == "mask":
            return
        unclaimed = [
            (group.floor + self.rule.max_staleness, group.complete, group.number)
            for group in self.ledger.live.values()
            if not group.claimed
        ]
        spare = self.rule.spare_groups
        for number in gate.victims(self.rule, self.version.step, self._claimed, unclaimed, spare):
            self._end_late(number, reason)

    def _end_late(self, number: int, reason: DropReason, most: int = MAX_RETRIES) -> None:
        """A task that is late again and again is slow itself: more of it would only take the places of others."""
        group = self.ledger.live[number]
        again = self.settings.late == "regenerate" and group.retry < most
        self._end(group, DropReason.REGENERATED if again else reason, again, retry=int(again))

    # -- ends of leases and credits --------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Take back the leases and credits whose time has passed."""
        for lease in self.leases.expired(now):
            self._revoke(lease)
        self._give_up(self.credits.overdue(now))

    def next_expiry(self) -> float | None:
        """When something is taken back next."""
        known = (self.leases.next_expiry(), self.credits.next_expiry())
        return min((at for at in known if at is not None), default=None)

    def _revoke(self, lease: Lease) -> None:
        self.leases.revoke(lease)
        for number in lease.groups if lease.trains else ():
            if (group := self.ledger.live.get(number)) is not None:
                self.ledger.claim(group, False)

    def _revoke_all(self, group: Group) -> None:
        for lease in self.leases.holding(group.number):
            self._revoke(lease)

    def _give_up(self, keys: Iterable[int]) -> None:
        """Puts that nobody will end: their credit comes back, and what they have stored goes."""
        for key in keys:
            self.credits.unreserve(key)
            self.table.freed.append(key)

    # -- what it says of itself ------------------------------------------------------------------------------------------

    @property
    def _claimed(self) -> int:
        return sum(group.claimed for group in self.ledger.live.values())

    def account(self) -> Account:
        """The balance, in flight counted from the holders and compared by id."""
        return balance.account(self.ledger, self.holders.attempts(), self.table, self.leases)

    def take_records(self) -> list[Record]:
        """Facts not yet durable, in order."""
        taken, self.ledger.records = self.ledger.records, []
        return taken

    def take_freed(self) -> list[int]:
        """Blocks whose payloads nobody needs."""
        taken, self.table.freed = self.table.freed, []
        return taken
