# SPDX-License-Identifier: Apache-2.0
"""TransferQueue: the bus of one run as a single state machine, without IO, clock or payloads.

Methods that need the time take `now`. Records that must become durable are left for `take_records`, and keys of
unneeded payload blocks for `take_freed`. `bus.service` takes both, and does the waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap

from relax_core.api.batch import AttemptId, RowId
from relax_core.api.bus import Account, BusSettings, BusStatistics, Claim, ClaimRequest, Issue, Sealed
from relax_core.api.errors import ConfigError, RelaxError, StaleFence
from relax_core.api.trajectory import DropReason
from relax_core.api.weights import Version
from relax_core.bus import gate
from relax_core.bus.journal import (
    CheckpointRecord,
    FinalRecord,
    Record,
    RegisteredRecord,
    RememberedRecord,
    StepRecord,
)
from relax_core.bus.late import LATE_RULES, Backlog, Ended
from relax_core.bus.leases import Credits, Holders, RowLease, RowLeases, belongs
from relax_core.bus.ledger import AttemptState, Group, Ledger, Lineage
from relax_core.bus.store import Place, RowTable, Samples, check_seals

MAX_NAMED = 5
"""Largest number of ids named in a problem of the account; further ids are only counted."""


class TransferQueue:
    """Admission, rows, claims, training and lineage of one run, at one version of the actor.

    Life cycle of an attempt: `issued -> running -> scored -> claimed -> trained | dropped`. Admission issues the
    attempt, its producer's report makes it running, a put with its seal makes it scored, the actor's claim makes it
    claimed (and a lease that expires or is released makes it scored again), and a committed step makes it trained.
    Training is provisional until a checkpoint covers the step: a rollback makes the attempt scored again, or drops it
    and issues its group once more.

    Invariants:
    - Every issued attempt is trained, dropped, or found with a holder: a producer, the table of rows, or a lease.
    - A group is claimed exactly while it is in one lease that trains; a lease holds whole groups.
    - The late rule (`bus.late`) is asked after every change, and the groups that it names are ended. Unless the rule is
      `mask`, the unclaimed groups, except spare ones, can then be trained before they become stale. While a claim is
      overdue, this is deferred to the commit of its step.
    - No token of a live group is of weights outside the `lineage`. A put with such a token ends its group, and a
      rollback ends the groups whose tokens fall outside.
    - `credits` counts the rows and bytes that are stored and not yet trained, and those of puts in progress.
    """

    def __init__(self, settings: BusSettings, version: Version, remembered: RememberedRecord | None = None) -> None:
        for name in ("group_size", "groups_per_step", "max_rows", "max_bytes"):
            if getattr(settings, name) < 1:
                raise ConfigError(f"bus.{name}", getattr(settings, name), "give at least 1")
        if settings.max_staleness is not None and settings.max_staleness < 0:
            raise ConfigError("max_staleness", settings.max_staleness, 'give 0 or more, or "unbounded"')
        if settings.min_valid > settings.group_size:
            raise ConfigError("min_valid", settings.min_valid, f"a group has only {settings.group_size} samples")
        remembered = remembered or RememberedRecord()
        self.settings, self.version = settings, version
        self.rule = gate.Rule(settings.max_staleness, settings.groups_per_step, settings.spare_groups, settings.steps)
        self.late_rule = LATE_RULES[settings.late](self.rule)
        self.credits = Credits(settings.max_rows, settings.max_bytes)
        self.table = RowTable(self.credits)
        self.ledger = Ledger(settings.group_size, remembered)
        self.lineage = Lineage(version)
        self.leases = RowLeases(settings.lease_s)
        self.holders = Holders()
        self.final_step = version.step
        self.paused = False
        self._roles = dict(remembered.roles)
        self._committed: frozenset[int] = frozenset()
        """Leases of the last committed step, so that a repeated commit is recognised."""
        self._overdue = False
        """True if groups of the coming step were claimed after its deadline."""
        self._late = False
        """True if the coming step was requested after its deadline; claims then ignore their `min_groups`."""
        self._last_key = 0

    # -- roles, holders and admission ----------------------------------------------------------------------------

    def register(self, role: str, now: float) -> int:
        """Register a role anew: revoke its leases, and issue its unfinished groups again, unchanged."""
        self._roles[role] = registration = self._roles.get(role, 0) + 1
        self.ledger.records.append(RegisteredRecord(role, registration))
        for lease in [lease for lease in self.leases.out.values() if belongs(lease.task, role)]:
            self._revoke(lease)
        self.holders.forget(role)
        self._cancel_puts([key for key, put in self.credits.reserved.items() if belongs(put.holder, role)])
        for group in [g for g in self.ledger.live.values() if g.running and belongs(g.holder, role)]:
            self._end(group, DropReason.REGENERATED, again=True)
        return registration

    def registration(self, name: str) -> int:
        """Return the number of times that the role of this task or holder has registered."""
        return next((number for role, number in self._roles.items() if belongs(name, role)), 0)

    def admit(self, holder: str, version: Version, limit: int) -> tuple[Issue, ...]:
        """Issue whole groups that an engine at this version may start; none while paused or for an old incarnation."""
        if self.paused or version.incarnation != self.version.incarnation:
            return ()
        live = len(self.held_groups())
        issues: list[Issue] = []
        while len(issues) < limit and gate.may_grant(self.rule, self.version.step, version.step, live + len(issues)):
            group = self.ledger.issue(holder, min(version.step, self.version.step))
            issues.append(Issue(group.number, tuple(group.members), group.retry))
            self.holders.admit(holder, issues[-1])
        return tuple(issues)

    def held_groups(self) -> set[int]:
        """Return the live groups that a holder has: a producer, the table of rows, or a lease that trains."""
        held = self.holders.attempts()
        leased = {number for lease in self.leases.out.values() if lease.trains for number in lease.groups}
        stored = self.table.samples
        live = self.ledger.live.items()
        return {n for n, group in live if n in leased or any(i in stored or i in held for i in group.members)}

    def withdraw(self, issues: Sequence[Issue]) -> None:
        """Take back issues that no producer received; the next admission gets the same work."""
        for issue in issues:
            if (group := self.ledger.live.get(issue.group)) is not None:
                self._end(group, DropReason.REGENERATED, again=True)

    def report_held(
        self,
        holder: str,
        attempts: frozenset[AttemptId],
        admitted: int,
        given_up: Mapping[AttemptId, int] | None = None,
    ) -> frozenset[AttemptId]:
        """Store the attempts that a producer reports as held; return the ended ones, which the producer should abort.

        `given_up` maps each attempt that the producer has aborted to its number of tokens.
        """
        self.holders.report(holder, attempts, admitted)
        self.ledger.histograms.given_up(given_up or {})
        ended = set()
        for attempt in attempts:
            found = self.ledger.member(attempt)
            if found is None:
                ended.add(attempt)
            elif found[1].state is AttemptState.ISSUED:
                found[1].state = AttemptState.RUNNING
        return frozenset(ended)

    # -- puts ----------------------------------------------------------------------------------------------------

    def reserve(self, attempts: Sequence[AttemptId], rows: int, size_bytes: int, now: float = 0.0) -> int | None:
        """Reserve credit for a put and return the key of its block; None if the credit does not suffice now.

        Groups that the next step needs always get credit, because a bus full of unfinished groups would never empty. If
        all of the attempts have ended, the put does not need credit, because it will be ignored when it arrives.
        """
        self._cancel_puts([key for key, put in self.credits.reserved.items() if put.expires <= now])
        if all(attempt.group not in self.ledger.live for attempt in attempts):
            rows = size_bytes = 0
        if not self.credits.has_room(rows, size_bytes):
            first = sorted(self.ledger.live.values(), key=Group.claim_order)[: self.settings.groups_per_step]
            if {group.number for group in first}.isdisjoint(attempt.group for attempt in attempts):
                return None
        key = self.new_key()
        holders = {group.holder for a in attempts if (group := self.ledger.live.get(a.group)) is not None}
        self.credits.reserve(key, rows, size_bytes, min(holders, default=""), now + self.settings.lease_s)
        return key

    def new_key(self) -> int:
        """Return a new key for a block of payloads."""
        self._last_key += 1
        return self._last_key

    def check_reserved(self, key: int) -> None:
        """Raise StaleFence if the credit of a put was taken back; its stored block is then freed."""
        if key not in self.credits.reserved:
            raise StaleFence(
                f"bus: block {key}: its reservation has expired, or its role has registered again; put the rows again"
            )

    def put(
        self, key: int, ids: Sequence[RowId], columns: Sequence[str], size_bytes: int, sealed: Sequence[Sealed]
    ) -> None:
        """Accept a stored block of rows with their samples' seals; ignore samples that have ended or are sealed."""
        rows: dict[tuple[int, ...], list[RowId]] = {}
        for row in ids:
            rows.setdefault(row[:3], []).append(row)
        check_seals(ids, sealed)
        self.credits.unreserve(key)
        if not all(starmap(self.lineage.has, {pair for seal in sealed for pair in seal.newest.items()})):
            for seal in sealed:
                survives = all(starmap(self.lineage.has, seal.newest.items()))
                if not survives and (outside := self.ledger.member(seal.attempt)) is not None:
                    self._end(outside[0], DropReason.ABANDONED, again=True)
        taken: set[tuple[int, ...]] = set()
        counts = Counter[int]()
        for seal in sealed:
            found = self.ledger.member(seal.attempt)
            if found is None or found[1].sealed is not None:
                self.ledger.histograms.given_up({seal.attempt: seal.trained_tokens})
                continue
            group, member = found
            if not seal.outcome.judged:
                self.ledger.drop(group, member, DropReason.FAILED, seal)
                continue
            theirs = rows.get(seal.attempt, ())
            self.ledger.seal(group, member, seal, theirs, self.version.step)
            self.table.samples[seal.attempt] = seal.num_rows
            counts[group.number] += len(theirs)
            taken.add(seal.attempt)
        for number, count in counts.items():
            first_columns = self.ledger.live[number].first_columns
            for name in columns:
                first_columns[name] = first_columns.get(name, 0) + count
        kept = ids if len(taken) == len(sealed) else [row if row[:3] in taken else None for row in ids]
        self.table.add(key, kept, columns, size_bytes)
        for number in sorted({seal.attempt.group for seal in sealed}):
            self._end_if_too_few_valid(number)
        if not self._overdue:
            self._end_late(self.late_rule.after_put(self._backlog()))

    def drop(self, attempts: Sequence[AttemptId], reason: DropReason, regenerate: bool = False) -> None:
        """Drop attempts; with `regenerate`, end their groups too and issue these groups again as another retry."""
        touched: dict[int, Group] = {}
        for attempt in attempts:
            if (found := self.ledger.member(attempt)) is None:
                continue
            group, member = found
            touched[group.number] = group
            rows = [row for row in group.rows if row.attempt_id == attempt]
            self.ledger.drop(group, member, reason)
            for row in rows:
                for name in self.table.first_columns(row):
                    if name in group.first_columns:
                        group.first_columns[name] -= 1
            self.table.remove([attempt], rows)
        for number in sorted(touched):
            self._revoke_all(touched[number])
            if regenerate:
                self._end(touched[number], DropReason.REGENERATED, again=True, retry=1)
            else:
                self._end_if_too_few_valid(number)

    # -- claims --------------------------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest, now: float) -> Claim | None:
        """Lease whole groups whose columns are ready; None if fewer than `min_groups` are available now."""
        self.expire(now)
        if request.follows and request.step >= self.version.step:
            return None
        if request.follows:
            picked = self._trained_by_step(request)
        elif request.trains:
            picked = self._ready_for_step(request)
        else:
            columns = frozenset(request.columns)
            unseen = sorted(self.ledger.live.keys() - self.leases.done.get(request.task, set()))
            groups = (self.ledger.live[number] for number in unseen)
            ready = (group for group in groups if group.complete and group.has(columns))
            picked = [group for group, _ in zip(ready, range(request.max_groups), strict=False)]
        left = self.settings.groups_per_step - self._num_claimed if request.trains else request.max_groups
        if not picked or (len(picked) < min(request.min_groups, left) and not self._late):
            return None
        picked.sort(key=lambda group: group.number)
        rows = tuple(row for group in picked for row in sorted(group.rows))
        numbers = tuple(group.number for group in picked)
        lease = self.leases.grant(request.task, numbers, rows, request.trains, now)
        samples = Samples.of(member.sealed for group in picked for member in group.valid if member.sealed is not None)
        if request.trains:
            self._overdue |= request.overdue
            for group in picked:
                self.ledger.claim(group, True)
            self._end_late(self.late_rule.after_claim(self._backlog()))
        mask_before = self.late_rule.mask_before(request.step) if request.trains or request.follows else 0
        versions: dict[str, Mapping[int, Version]] = {}
        for name in sorted({*request.columns, *(self.settings.columns if request.trains else ())}):
            derived = {group.number: group.derived[name][0] for group in picked if name in group.derived}
            if made := {number: version for number, version in derived.items() if version is not None}:
                versions[name] = made
        return Claim(lease.number, request.task, rows, samples, numbers, mask_before, versions)

    def _trained_by_step(self, request: ClaimRequest) -> list[Group]:
        """Return all groups that a step trained. Raises RelaxError if rows are gone or `followers` lacks the task."""
        task, step = request.task, request.step
        if task not in self.settings.followers:
            raise RelaxError(f"bus: claim of task {task}: the task is not in BusSettings.followers; add it there")
        found = [group for group in self.ledger.provisional.values() if group.trained_to == step + 1]
        if not found or not all(group.rows_kept for group in found):
            raise RelaxError(f"bus: rows of step {step} are no longer kept; resume from the newest checkpoint")
        return found

    def _ready_for_step(self, request: ClaimRequest) -> list[Group]:
        """Return ready groups that may join the coming step, in claim order."""
        version = self.version.step
        if request.step != version:
            raise StaleFence(f"bus: claim: got step {request.step}, the next is {version}; call version() first")
        self._late |= request.overdue
        columns = frozenset((*request.columns, *self.settings.columns))
        claimed = self._num_claimed
        k = self.rule.max_staleness or 0
        due = Counter(group.floor + k for group in self.ledger.live.values() if not group.claimed)
        picked: list[Group] = []
        for group in sorted(self.ledger.live.values(), key=Group.claim_order):
            if len(picked) == request.max_groups:
                break
            if not group.complete or group.claimed or group.newest > version or not group.has(columns):
                continue
            if self.late_rule.may_claim(version, claimed + len(picked), due, group.floor, request.overdue):
                picked.append(group)
                due[group.floor + k] -= 1
        return picked

    def locate(self, claim: Claim, columns: Sequence[str], now: float) -> Mapping[str, list[Place]]:
        """Return, for each column, where the claimed rows are stored, in claim order."""
        lease = self.leases.check(claim, now)
        try:
            return self.table.places(lease.rows, columns)
        except KeyError as error:
            raise RelaxError(
                f"bus: read of {', '.join(columns)}: got rows without {error.args[0]}; name it in the claim's columns"
            ) from None

    def begin_write(self, claim: Claim, now: float) -> int:
        """Return the key for a block of derived columns; the block is freed unless `write` follows within `lease_s`."""
        self._writable_rows(claim, now)
        key = self.new_key()
        self.credits.reserve(key, 0, 0, claim.task, now + self.settings.lease_s)
        return key

    def write(
        self, claim: Claim, key: int, columns: Sequence[str], size_bytes: int, version: Version | None, now: float
    ) -> None:
        """Accept a stored block of derived columns of the claimed rows."""
        rows = self._writable_rows(claim, now)
        self.credits.unreserve(key)
        self.table.add(key, rows, columns, size_bytes)
        for number in claim.groups:
            for name in columns:
                self.ledger.live[number].derived[name] = (version, claim.task)

    def _writable_rows(self, claim: Claim, now: float) -> tuple[RowId, ...]:
        """Return the rows that a claim may fill. Raises StaleFence if one of its groups has ended or was trained."""
        lease = self.leases.check(claim, now)
        if ended := [number for number in lease.groups if number not in self.ledger.live]:
            raise StaleFence(
                f"row lease {claim.lease} of task {claim.task}: group {ended[0]} has ended or was trained; drop the claim"
            )
        return lease.rows

    def acknowledge(self, claim: Claim, now: float) -> None:
        """End a lease whose consumer has finished; a repeated call changes nothing."""
        if claim.lease in self.leases.finished:
            return
        lease = self.leases.check(claim, now)
        if lease.trains:
            raise RelaxError(f"bus: acknowledge of task {claim.task}: got a claim that trains; call trained or release")
        self.leases.finish(lease)
        if claim.task in self.settings.followers:
            self.finalize(self.final_step)

    def release(self, claim: Claim) -> None:
        """Give the rows of a claim back; do nothing if its lease has ended."""
        if (lease := self.leases.out.get(claim.lease)) is not None:
            self._revoke(lease)

    def expire(self, now: float) -> None:
        """Revoke the leases and cancel the reservations that have expired."""
        for lease in [lease for lease in self.leases.out.values() if lease.expires <= now]:
            self._revoke(lease)
        self._cancel_puts([key for key, put in self.credits.reserved.items() if put.expires <= now])

    def next_expiry(self) -> float | None:
        """Return the time at which the next lease or reservation expires; None without leases and reservations."""
        leases = [lease.expires for lease in self.leases.out.values()]
        return min((*leases, *(put.expires for put in self.credits.reserved.values())), default=None)

    # -- steps: commit, deadline ---------------------------------------------------------------------------------

    def trained(self, claims: Sequence[Claim], step: int, without_gradient: Iterable[RowId], now: float) -> Version:
        """Commit a step: mark its samples trained, advance the version, and end the groups that no longer fit."""
        numbers = frozenset(claim.lease for claim in claims)
        if step == self.version.step - 1 and numbers == self._committed:
            return self.version
        if step != self.version.step:
            raise StaleFence(f"bus: trained: got step {step}, the next is {self.version.step}; call version()")
        leases = [self.leases.check(claim, now) for claim in claims]
        if other := [lease.task for lease in leases if not lease.trains]:
            raise RelaxError(
                f"bus: trained: got a claim of task {other[0]} that does not train; claim with trains = True"
            )
        skipped = frozenset(without_gradient)
        groups = [self.ledger.live[number] for lease in leases for number in lease.groups]
        for group in groups:
            self.ledger.train(group, step + 1, skipped)
            self.table.retire(group.members, group.rows)
        for lease in leases:
            self.leases.finish(lease)
        for lease in [lease for lease in self.leases.out.values() if lease.trains]:
            self._revoke(lease)
        short, late = self._overdue or len(groups) < self.rule.groups_per_step, self._late
        self._committed, self._overdue, self._late = numbers, False, False
        self.version = self.version.next()
        self.ledger.records.append(StepRecord(self.version.step, self.version.incarnation))
        self._forget_stale_columns()
        self._end_late(self.late_rule.after_step(self._backlog(), short, late))
        wanted = self._unacknowledged()
        for group in self.ledger.provisional.values():  # a rollback issues groups again whose rows are removed here
            if self.credits.kept_bytes <= self.credits.max_bytes:
                break
            if group.number not in wanted:
                self.table.remove(group.members, group.rows, kept=True)
                group.rows = {}
        return self.version

    def _forget_stale_columns(self) -> None:
        """Forget columns computed with earlier weights of the actor, so that their tasks compute them again."""
        for group in self.ledger.live.values():
            for name, (version, task) in list(group.derived.items()):
                if version is not None and version.model == self.version.model and version != self.version:
                    del group.derived[name]
                    self.leases.done.get(task, set()).discard(group.number)

    def end_awaited(self, step: int) -> tuple[int, ...]:
        """End the incomplete groups that keep this step waiting past its deadline; return their numbers.

        Only the `groups_per_step` unclaimed groups that come first in claim order are considered.
        """
        if step != self.version.step:
            raise StaleFence(f"bus: end_awaited: got step {step}, the next is {self.version.step}; call version()")
        unclaimed = sorted((g for g in self.ledger.live.values() if not g.claimed), key=Group.claim_order)
        slow = tuple(g.number for g in unclaimed[: self.settings.groups_per_step] if not g.complete)
        self._end_late(Ended(slow, DropReason.DEADLINE), empty=True)
        self._late = False
        return slow

    # -- checkpoints and rollbacks -------------------------------------------------------------------------------

    def cover(self, step: int) -> None:
        """Record that a checkpoint of version `step` is being made, so that its copy of the ledger contains it."""
        if step > self.version.step:
            raise RelaxError(
                f"bus: checkpoint: got step {step}, the actor is at {self.version.step}; commit the step first"
            )
        self.ledger.records.append(CheckpointRecord(step, self.version.incarnation))

    def finalize(self, step: int) -> None:
        """Free the payloads of samples trained up to version `step`; this version's checkpoint makes training final."""
        if step > self.final_step:
            self.final_step = step
            self.ledger.records.append(FinalRecord(step))
        for group in self.ledger.finalize(step, self._unacknowledged()):
            self._remove(group, kept=True)

    def _unacknowledged(self) -> set[int]:
        """Return the trained groups that a follower has not acknowledged."""
        held = {number for lease in self.leases.out.values() for number in lease.groups}
        return {
            number
            for number in self.ledger.provisional
            for task in self.settings.followers
            if number in held or number not in self.leases.done.get(task, ())
        }

    def rollback(self, step: int, incarnation: int) -> Version:
        """Undo the steps after version `step`, at which the trainer was restored."""
        if step > self.version.step:
            raise RelaxError(
                f"bus: rollback: got step {step}, the actor is at {self.version.step}; restore an earlier checkpoint"
            )
        followers = self.settings.followers
        for lease in [lease for lease in self.leases.out.values() if lease.trains or lease.task in followers]:
            self._revoke(lease)
        returned, undone, unfinished = self.ledger.rollback(step, incarnation, moved=step < self.version.step)
        for group in returned:
            self.table.restore([member.sealed for member in group.valid if member.sealed], group.rows)
            for task in followers:
                self.leases.done.get(task, set()).discard(group.number)
        for group in undone:
            self._remove(group, kept=True)
        for group in unfinished:
            self._remove(group)
        self.version = Version(self.version.model, incarnation, step)
        self.lineage.rollback(step, incarnation)
        self._committed, self._overdue, self._late = frozenset(), False, False
        self._forget_stale_columns()
        return self.version

    # -- ends of groups, leases and puts -------------------------------------------------------------------------

    def _end(self, group: Group, reason: DropReason, again: bool = False, retry: int = 0) -> None:
        """End a live group with its leases and rows; `again` issues it once more, with `retry` added to its retries."""
        self.ledger.end(group, reason, again, retry)
        self._remove(group)

    def _end_if_too_few_valid(self, number: int) -> None:
        """End a complete group that has fewer than `min_valid` valid members, or no valid member."""
        group = self.ledger.live.get(number)
        if group is not None and group.complete and len(group.valid) < max(1, self.settings.min_valid):
            self._end(group, DropReason.TOO_FEW_VALID)

    def _backlog(self) -> Backlog:
        k = self.rule.max_staleness or 0
        groups = [(g.floor + k, g.complete, g.number) for g in self.ledger.live.values() if not g.claimed]
        return Backlog(self.version.step, self._num_claimed, groups)

    def _end_late(self, ended: Ended, empty: bool = False) -> None:
        """End late groups; the late rule decides which are issued again. `empty`: the step has no ready group."""
        for number in ended.groups:
            group = self.ledger.live[number]
            again = self.late_rule.issues_again(group.retry, empty)
            self._end(group, DropReason.REGENERATED if again else ended.reason, again, retry=int(again))

    def _remove(self, group: Group, kept: bool = False) -> None:
        """Remove the rows and leases of a group, and forget which tasks have claimed it."""
        self._revoke_all(group)
        self.table.remove(group.members, group.rows, kept)
        for done in self.leases.done.values():
            done.discard(group.number)

    def _revoke_all(self, group: Group) -> None:
        for lease in [lease for lease in self.leases.out.values() if group.number in lease.groups]:
            self._revoke(lease)

    def _revoke(self, lease: RowLease) -> None:
        self.leases.revoke(lease)
        for number in lease.groups if lease.trains else ():
            if (group := self.ledger.live.get(number)) is not None:
                self.ledger.claim(group, False)

    def _cancel_puts(self, keys: Iterable[int]) -> None:
        """Take back the credit of puts that were given up, and free the blocks that these puts have stored."""
        for key in keys:
            self.credits.unreserve(key)
            self.table.freed.append(key)

    # -- reports -------------------------------------------------------------------------------------------------

    @property
    def _num_claimed(self) -> int:
        return sum(group.claimed for group in self.ledger.live.values())

    def account(self) -> Account:
        """Return the ledger's balance, compared id by id with the attempts of producers, rows and leases.

        Equal totals do not prove that ids agree. The problem names the attempts that are missing or unexpected.
        """
        ledger = self.ledger
        members = (item for group in ledger.live.values() for item in group.members.items())
        believed = {attempt for attempt, member in members if member.state is not AttemptState.DROPPED}
        held = {attempt for attempt in self.holders.attempts() if not ledger.has_left_producer(attempt)}
        held.update(attempt for attempt in self.table.samples if self.table.complete(attempt))
        leased = sorted(number for lease in self.leases.out.values() if lease.trains for number in lease.groups)
        claimed = sorted(number for number, group in ledger.live.items() if group.claimed)
        ended = ledger.trained + sum(ledger.dropped.values())
        problems = []
        if lost := believed - held:
            problems.append(f"attempts in flight in the ledger without a holder: {_names(lost)}")
        if unknown := held - believed:
            problems.append(f"attempts of a holder that are not in flight in the ledger: {_names(unknown)}")
        if leased != claimed:
            problems.append(f"claimed groups {claimed} differ from leased groups {leased}")
        problems += ledger.faults
        if ledger.issued != ended + len(held):
            problems.append(f"issued {ledger.issued} differs from trained and dropped {ended} + in flight {len(held)}")
        return Account(
            ledger.issued, ledger.trained, ledger.trained_without_gradient, dict(ledger.dropped), len(held),
            not problems, "; ".join(problems),
        )  # fmt: skip

    def statistics(self) -> BusStatistics:
        """Return statistics for metrics and `relax why`."""
        ledger, histograms, live = self.ledger, self.ledger.histograms, self.ledger.live
        states = Counter("claimed" if g.claimed else "ready" if g.complete else "running" for g in live.values())
        pending = [number for number, _, _ in ledger.pending]
        return {
            "version": self.version.step,
            "rows": self.credits.rows,
            "bytes": self.credits.bytes,
            "kept_bytes": self.credits.kept_bytes,
            "groups": {"pending": len(ledger.pending), "provisional": len(ledger.provisional), **states},
            "oldest_group": min((*live, *ledger.provisional, *pending), default=ledger.next_group),
            "oldest_open": min((*live, *pending), default=ledger.next_group),
            "next_group": ledger.next_group,
            "waited_for": sorted(number for number, group in live.items() if not group.complete),
            "leases": {lease.number: lease.task for lease in self.leases.out.values()},
            "lag_histogram": dict(sorted(histograms.lag.items())),
            "lag_max": max(histograms.lag, default=0),
            "dropped": dict(ledger.dropped),
            "dropped_lengths": {reason: dict(sorted((+n).items())) for reason, n in histograms.dropped_lengths.items()},
            "trained_lengths": dict(sorted(histograms.trained_lengths.items())),
        }

    def take_records(self) -> list[Record]:
        """Return the records that are not yet durable, in order, and clear them here."""
        taken, self.ledger.records = self.ledger.records, []
        return taken

    def take_freed(self) -> list[int]:
        """Return the keys of blocks whose payloads can be freed, and clear them here."""
        taken, self.table.freed = self.table.freed, []
        return taken


def _names(ids: Iterable[AttemptId]) -> str:
    found = sorted(ids)
    names = ", ".join(f"{group}/{sample}/{attempt}" for group, sample, attempt in found[:MAX_NAMED])
    return names + (f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else "")
