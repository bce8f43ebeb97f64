# SPDX-License-Identifier: Apache-2.0
"""TransferQueue: the bus as one state machine. No IO, no clock, no payloads; every method that needs time takes `now`.

It composes the gate's rule, the ledger, the table of rows, leases, credits and the holders' reports (`Parts`); here are
roles, admission and claims. Methods leave facts to be made durable in `records` and payload blocks to be freed in
`freed`; whoever hosts it takes both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from relax_core.api.batch import AttemptId, RowId, RowIds
from relax_core.api.bus import Claim, ClaimRequest, Issue, Registration
from relax_core.api.errors import RelaxError, StaleFence
from relax_core.api.outcome import DropReason
from relax_core.api.version import Version
from relax_core.bus import gate, selection
from relax_core.bus.group import Group, State
from relax_core.bus.leases import belongs
from relax_core.bus.packed import Samples
from relax_core.bus.puts import Puts
from relax_core.bus.records import Registered
from relax_core.bus.steps import Steps
from relax_core.bus.table import Place


class TransferQueue(Puts, Steps):
    """Admission, rows, claims, training and lineage of one run."""

    # -- roles and holders -----------------------------------------------------------------------------------------------

    def register(self, role: str, now: float) -> Registration:
        """A role starts anew: its leases end, and what it was generating is issued again as the same work."""
        self._roles[role] = incarnation = self._roles.get(role, 0) + 1
        self.ledger.records.append(Registered(role, incarnation))
        for lease in self.leases.of_role(role):
            self._revoke(lease)
        self.holders.forget(role)
        self._give_up(self.credits.of_role(role))
        lost = [group for group in self.ledger.live.values() if group.running and belongs(group.holder, role)]
        for group in lost:
            self._end(group, DropReason.REGENERATED, again=True)
        return Registration(incarnation, len(lost))

    def report_held(
        self,
        holder: str,
        attempts: frozenset[AttemptId],
        admitted: int,
        given_up: Mapping[AttemptId, int] | None = None,
    ) -> frozenset[AttemptId]:
        """Take a holder's own count; returns those of them that have ended, which it should abort.

        `given_up` tells the tokens of those it has aborted.
        """
        self.holders.report(holder, attempts, admitted)
        self.report.given_up(given_up or {})
        ended = set()
        for attempt in attempts:
            found = self.ledger.member(attempt)
            if found is None:
                ended.add(attempt)
            elif found[1].state is State.ISSUED:
                found[1].state = State.RUNNING
        return frozenset(ended)

    # -- admission -------------------------------------------------------------------------------------------------------

    def admit(self, holder: str, version: Version, limit: int) -> tuple[Issue, ...]:
        """Whole groups that an engine at this version may start; none while paused or from abandoned weights."""
        if self.paused or version.incarnation != self.version.incarnation:
            return ()
        live = len(self.held_groups())
        issues: list[Issue] = []
        while len(issues) < limit and gate.may_grant(self.rule, self.version.step, version.step, live + len(issues)):
            group = self.ledger.issue(holder, min(version.step, self.version.step))
            issues.append(group.as_issue())
            self.holders.admit(holder, issues[-1])
        return tuple(issues)

    def withdraw(self, issues: Sequence[Issue]) -> None:
        """Issues that nobody learnt of: the same work goes to the next admission."""
        for issue in issues:
            if (group := self.ledger.live.get(issue.group)) is not None:
                self._end(group, DropReason.REGENERATED, again=True)

    def held_groups(self) -> set[int]:
        """Live groups as counted from the holders: producers, rows and leases."""
        held = self.holders.attempts()
        leased = {number for lease in self.leases.out.values() if lease.trains for number in lease.groups}
        stored = self.table.samples
        live = self.ledger.live.items()
        return {n for n, group in live if n in leased or any(i in stored or i in held for i in group.members)}

    # -- claims ----------------------------------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest, now: float) -> Claim | None:
        """A lease on whole groups whose columns are ready; None where fewer than asked for may be had now."""
        self.expire(now)
        if request.follows and request.step >= self.version.step:
            return None
        picked = self._select(request)
        left = self.settings.groups_per_step - self._claimed if request.trains else request.max_groups
        if not picked or (len(picked) < min(request.min_groups, left) and not self._late):
            return None
        picked.sort(key=lambda group: group.number)
        rows = RowIds(row for group in picked for row in group.ordered_rows())
        groups = tuple(group.number for group in picked)
        lease = self.leases.grant(request.task, groups, rows, request.trains, now)
        samples = Samples.of(m.sealed for group in picked for m in group.valid if m.sealed is not None)
        before = self._begin_training(picked, request.overdue) if request.trains else 0
        if request.follows:
            before = self._mask_before(request.step)
        names = {*request.columns, *(self.settings.columns if request.trains else ())}
        versions = {name: made for name in sorted(names) if (made := _made_by(picked, name))}
        return Claim(lease.number, lease.fence, request.task, rows, samples, groups, before, versions)

    def _select(self, request: ClaimRequest) -> list[Group]:
        if request.follows:
            return selection.trained_by(request, self.ledger.provisional.values(), self.settings.followers)
        if not request.trains:
            return selection.pick(request, self.ledger.live, self.leases.done.get(request.task, set()))
        if request.step != self.version.step:
            raise StaleFence(f"claim: got step {request.step}, the next is {self.version.step}; ask for the version")
        self._late |= request.overdue
        columns = frozenset((*request.columns, *self.settings.columns))
        live = self.ledger.live.values()
        return selection.pick_for_step(request, columns, live, self.rule, self.settings.late, self.version.step)

    def _begin_training(self, picked: Sequence[Group], overdue: bool) -> int:
        """They are claimed; returns the step before which tokens are to be masked."""
        self._overdue |= overdue
        for group in picked:
            self.ledger.claim(group, True)
        if self.settings.late != "wait":
            self._shed(DropReason.EXPIRED)
        return self._mask_before(self.version.step)

    def _mask_before(self, step: int) -> int:
        """The oldest step whose tokens this one trains; 0: any."""
        if self.settings.late != "mask" or self.rule.max_staleness is None:
            return 0
        return max(0, step - self.rule.max_staleness)

    def locate(self, claim: Claim, columns: Sequence[str], now: float) -> Mapping[str, list[Place]]:
        """Where the columns of the claimed rows lie, in claim order."""
        lease = self.leases.check(claim, now)
        try:
            return self.table.places(lease.rows, columns)
        except KeyError as error:
            raise RelaxError(
                f"bus: read of {', '.join(columns)}: got rows without {error.args[0]}; name it in the claim's columns"
            ) from None

    def check_write(self, claim: Claim, now: float) -> tuple[RowId, ...]:
        """Rows that this claim may fill; StaleFence where a group has ended or was trained."""
        lease = self.leases.check(claim, now)
        if ended := [number for number in lease.groups if number not in self.ledger.live]:
            raise StaleFence(f"lease {claim.lease} of task {claim.task}: group {ended[0]} is over; drop the claim")
        return lease.rows

    def begin_write(self, claim: Claim, now: float) -> int:
        """The key of a block of derived columns; it is freed if the writer does not end its write."""
        self.check_write(claim, now)
        key = self.new_key()
        self.credits.reserve(key, 0, 0, claim.task, now + self.settings.lease_s)
        return key

    def write(
        self, claim: Claim, key: int, columns: Sequence[str], size_bytes: int, version: Version | None, now: float
    ) -> None:
        """A stored block of derived columns of the claimed rows."""
        rows = self.check_write(claim, now)
        self.credits.unreserve(key)
        self.table.add(key, rows, columns, size_bytes)
        for number in claim.groups:
            for name in columns:
                self.ledger.live[number].derived[name] = (version, claim.task)

    def acknowledge(self, claim: Claim, now: float) -> None:
        """The consumer is done. Once is enough; a second time is harmless."""
        if self.leases.is_finished(claim):
            return
        lease = self.leases.check(claim, now)
        if lease.trains:
            raise RelaxError(f"bus: acknowledge of task {claim.task}: got a claim that trains; call trained or release")
        self.leases.finish(lease)
        if claim.task in self.settings.followers:
            self.finalize(self.final_step)

    def release(self, claim: Claim) -> None:
        """Give rows back; nothing to do where the lease is over."""
        lease = self.leases.out.get(claim.lease)
        if lease is not None and lease.fence == claim.fence:
            self._revoke(lease)


def _made_by(groups: Iterable[Group], column: str) -> dict[int, Version]:
    """By group, the weights that a derived column was computed with."""
    made = {group.number: group.derived[column][0] for group in groups if column in group.derived}
    return {number: version for number, version in made.items() if version is not None}
