# SPDX-License-Identifier: Apache-2.0
"""TransferQueue: the bus as one state machine. No IO, no clock, no payloads; every method that needs time takes `now`.

It composes the gate's rule, the ledger, the table of rows, leases, credits and the holders' reports (`Parts`); here are
roles, admission and claims. Methods leave facts to be made durable in `records` and payload blocks to be freed in
`freed`; whoever hosts it takes both.

What a run's bus holds together, and how groups and leases end: the ground that puts, steps and claims stand on.

No IO, no clock. Facts to be made durable and blocks to be freed are left for whoever hosts it.

How rows come to the bus: credit before they are stored, then their samples' seals; and how attempts are dropped.

How steps are committed, and undone: the version, what is trained at it, what no longer fits, what is kept for a rollback.

What a bus refuses before it changes anything: settings that can't work, and samples that do not come whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from relax_core.api.batch import AttemptId, Cut, Ragged, RowId, RowIds
from relax_core.api.bus import Account, BusSettings, Claim, ClaimRequest, Issue, Registration, Sealed
from relax_core.api.errors import ConfigError, RelaxError, StaleFence
from relax_core.api.trajectory import DropReason
from relax_core.api.weights import Version
from relax_core.bus import accounting, claims, gate
from relax_core.bus.accounting import Holders, Report
from relax_core.bus.credits import Credits
from relax_core.bus.journal import CheckpointRecord, Record, RegisteredRecord, RememberedRecord, StepRecord
from relax_core.bus.leases import Lease, Leases, belongs
from relax_core.bus.ledger import AttemptState, Group, Ledger
from relax_core.bus.packed import Samples
from relax_core.bus.store import Place, RowTable


def check_settings(settings: BusSettings) -> None:
    for name in ("group_size", "groups_per_step", "max_rows", "max_bytes"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"bus.{name}", getattr(settings, name), "give at least 1")
    if settings.max_staleness is not None and settings.max_staleness < 0:
        raise ConfigError("max_staleness", settings.max_staleness, "give 0 or more, or ask for `unbounded` by name")
    if settings.min_valid > settings.group_size:
        raise ConfigError("min_valid", settings.min_valid, f"a group has only {settings.group_size} samples")


def check_seals(ids: Iterable[RowId], sealed: Sequence[Sealed]) -> None:
    """Every sample comes whole: as many rows as its seal says, one seal a sample."""
    rows = Counter(row.attempt_id for row in set(ids))
    counts = {seal.attempt: seal.num_rows for seal in sealed}
    for attempt in rows.keys() | counts.keys():
        if counts.get(attempt) != rows[attempt]:
            raise RelaxError(
                f"bus: put of {tuple(attempt)}: got {rows[attempt]} rows, sealed with {counts.get(attempt)}; "
                "put a sample's rows together with its seal"
            )


def check_columns(claim: Claim, columns: Mapping[str, Ragged]) -> None:
    """A write fills its columns for every claimed row."""
    for name, column in columns.items():
        if len(column) != len(claim.rows):
            raise RelaxError(f"bus: write of {name}: got {len(column)} rows for a claim of {len(claim.rows)}; give all")


def check_cut(part: Cut) -> None:
    """Both ends of a span are counted from the front."""
    for name, span in (("tokens", part.tokens), ("layers", part.layers)):
        if span is not None and not 0 <= span[0] <= span[1]:
            raise RelaxError(
                f"bus: read_slice of {name}: got {list(span)}; give a start of 0 or more and a stop after it"
            )


MAX_RETRIES = 3
"""`regenerate`: times that a late group is issued again before it is dropped."""


class Parts:
    """Ledger, table, leases, credits and holders' reports of one run, at one version."""

    def __init__(self, settings: BusSettings, version: Version, remembered: RememberedRecord | None = None) -> None:
        remembered = remembered or RememberedRecord()
        check_settings(settings)
        self.settings, self.version = settings, version
        self.rule = gate.Rule(settings.max_staleness, settings.groups_per_step, settings.spare_groups, settings.steps)
        self.credits = Credits(settings.max_rows, settings.max_bytes)
        self.table = RowTable(self.credits)
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
            if member.state is not AttemptState.DROPPED:
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
        return accounting.account(self.ledger, self.holders.attempts(), self.table, self.leases)

    def take_records(self) -> list[Record]:
        """Facts not yet durable, in order."""
        taken, self.ledger.records = self.ledger.records, []
        return taken

    def take_freed(self) -> list[int]:
        """Blocks whose payloads nobody needs."""
        taken, self.table.freed = self.table.freed, []
        return taken


class Puts(Parts):
    """What producers give."""

    def reserve(self, attempts: Sequence[AttemptId], rows: int, size_bytes: int, now: float = 0.0) -> int | None:
        """Credit for a put: the key of its block, or None for now. It comes back if the producer does not end it.

        Groups that the next step needs always get it, or a bus full of unfinished groups would never empty.
        """
        self._give_up(self.credits.overdue(now))
        if not self.credits.fits(rows, size_bytes):
            first = sorted(self.ledger.live.values(), key=claims.claim_order)[: self.settings.groups_per_step]
            if {group.number for group in first}.isdisjoint(attempt.group for attempt in attempts):
                return None
        key = self.new_key()
        holders = {group.holder for a in attempts if (group := self.ledger.live.get(a.group)) is not None}
        holder = min(holders, default="")
        self.credits.reserve(key, rows, size_bytes, holder, now + self.settings.lease_s)
        return key

    def check_put(self, key: int) -> None:
        """StaleFence where its credit has been taken back, and with it what was stored."""
        if key not in self.credits.reserved:
            raise StaleFence(f"bus: put of block {key}: its producer was given up meanwhile; put the samples again")

    def unreserve(self, key: int) -> None:
        """A put that will not end gives its credit back."""
        self.credits.unreserve(key)

    def new_key(self) -> int:
        """Names a block of payloads before it is stored."""
        self._next_key += 1
        return self._next_key

    def put(
        self, key: int, ids: Sequence[RowId], columns: Sequence[str], size_bytes: int, sealed: Sequence[Sealed]
    ) -> None:
        """A stored block of rows and the seals of their samples. What has ended meanwhile or came before is ignored."""
        rows: dict[AttemptId, list[RowId]] = {}
        for row in ids:
            rows.setdefault(row.attempt_id, []).append(row)
        check_seals(ids, sealed)
        self.credits.unreserve(key)
        taken = {seal.attempt for seal in sealed if self._seal(seal, rows.get(seal.attempt, ()), columns)}
        self.table.add(key, [row if row.attempt_id in taken else None for row in ids], columns, size_bytes)
        for number in sorted({seal.attempt.group for seal in sealed}):
            self._close_if_done(number)
        if not self._overdue:
            self._shed(DropReason.EXPIRED)

    def _seal(self, seal: Sealed, rows: Sequence[RowId], columns: Sequence[str]) -> bool:
        """Whether the rows of the sample are wanted."""
        found = self.ledger.member(seal.attempt)
        if found is None or found[1].sealed is not None:
            self.report.given_up({seal.attempt: seal.trained_tokens})
            return False
        group, member = found
        if not seal.outcome.judged:
            self.report.dropped(seal.attempt, seal, DropReason.FAILED)
            self.ledger.drop(group, member, DropReason.FAILED)
            return False
        self.ledger.seal(group, member, seal, rows, self.version.step)
        self.table.seal(seal.attempt, seal.num_rows)
        for name in columns:
            group.first_columns[name] = group.first_columns.get(name, 0) + len(rows)
        return True

    def _close_if_done(self, number: int) -> None:
        """A group whose members have all come in needs enough valid ones."""
        group = self.ledger.live.get(number)
        if group is not None and group.complete:
            valid = len(group.valid)
            if valid == 0 or valid < self.settings.min_valid:
                self._end(group, DropReason.TOO_FEW_VALID)

    def drop(self, attempts: Sequence[AttemptId], reason: DropReason, regenerate: bool = False) -> None:
        """End attempts; with `regenerate` what is left of their groups ends too and is issued as another try."""
        touched: dict[int, Group] = {}
        for attempt in attempts:
            if (found := self.ledger.member(attempt)) is None:
                continue
            group, member = found
            touched[group.number] = group
            rows = [row for row in group.rows if row.attempt_id == attempt]
            self._tell_dropped(group, [attempt], reason)
            self.ledger.drop(group, member, reason)
            for row in rows:
                _uncount(group, row, self.table.columns_of(row))
            self.table.remove([attempt], rows)
        for number in sorted(touched):
            self._revoke_all(touched[number])
            if regenerate:
                self._end(touched[number], DropReason.REGENERATED, again=True, retry=1)
            else:
                self._close_if_done(number)


def _uncount(group: Group, row: RowId, columns: Iterable[str]) -> None:
    for name in columns:
        if name in group.first_columns:
            group.first_columns[name] -= 1


class Steps(Parts):
    """The actor's steps."""

    def trained(self, claims: Sequence[Claim], step: int, without_gradient: Iterable[RowId], now: float) -> Version:
        """Commit a step: its samples are trained, the version advances, what no longer fits ends."""
        numbers = frozenset(claim.lease for claim in claims)
        if step == self.version.step - 1 and numbers == self._committed:
            return self.version
        if step != self.version.step:
            raise StaleFence(f"trained: got step {step}, the next is {self.version.step}; ask for the version")
        leases = [self.leases.check(claim, now) for claim in claims]
        if other := [lease.task for lease in leases if not lease.trains]:
            raise RelaxError(
                f"bus: trained: got a claim of task {other[0]} that does not train; claim with trains = True"
            )
        skipped = frozenset(without_gradient)
        groups = [self.ledger.live[number] for lease in leases for number in lease.groups]
        for group in groups:
            self.report.trained(group, self.version.step)
            self.ledger.train(group, step + 1, skipped)
            self.table.retire(group.members, group.rows)
        for lease in leases:
            self.leases.finish(lease)
        self._next_version(numbers, short=self._overdue or len(groups) < self.rule.groups_per_step)
        self._evict()
        return self.version

    def _next_version(self, committed: frozenset[int], short: bool) -> None:
        for lease in [lease for lease in self.leases.out.values() if lease.trains]:
            self._revoke(lease)
        late, self._committed, self._overdue, self._late = self._late, committed, False, False
        self.version = self.version.next()
        self.ledger.records.append(StepRecord(self.version.step, self.version.incarnation))
        self._forget_stale_columns()
        if late and self.settings.late == "mask":
            self._shed_unfinished()
        elif short and self.settings.late == "wait":
            self._shed(DropReason.DEADLINE)
        else:
            self._shed(DropReason.SPARE if self.rule.spare_groups else DropReason.EXPIRED)

    def _forget_stale_columns(self) -> None:
        """Columns that the actor's own weights gave belong to the step that starts at them; others make them again."""
        for group in self.ledger.live.values():
            for name, (version, task) in list(group.derived.items()):
                if version is not None and version.model == self.version.model and version != self.version:
                    del group.derived[name]
                    self.leases.done.get(task, set()).discard(group.number)

    def _evict(self) -> None:
        """Payloads kept for a rollback have a budget; without them a rollback issues the groups again."""
        wanted = self._to_follow()
        for group in self.ledger.provisional.values():
            if not self.credits.over_kept:
                return
            if group.number in wanted:
                continue
            self.table.remove(group.members, group.rows, kept=True)
            group.rows = {}

    def _shed_unfinished(self) -> None:
        """`mask`: what is too old is trained with less of it, but a step that it kept waiting does not wait for it again."""
        k = self.rule.max_staleness
        live = () if k is None else tuple(self.ledger.live.values())
        for group in [group for group in live if not group.complete and group.floor + (k or 0) < self.version.step]:
            self._end_late(group.number, DropReason.DEADLINE)

    def let_go(self, step: int) -> tuple[int, ...]:
        """End the groups that keep this step waiting past its deadline: what is not complete of those that come first."""
        if step != self.version.step:
            raise StaleFence(f"let_go: got step {step}, the next is {self.version.step}; ask for the version")
        slow = claims.waited_for(self.ledger.live.values(), self.settings.groups_per_step)
        for number in slow:
            self._end_late(number, DropReason.DEADLINE, most=1)
        self._late = False
        return slow

    # -- checkpoints and rollbacks ---------------------------------------------------------------------------------------

    def rollback(self, step: int, incarnation: int) -> Version:
        """The trainer was restored at version `step`: undo what came later."""
        if step > self.version.step:
            raise RelaxError(
                f"bus: rollback: got step {step}, the actor is at {self.version.step}; restore an earlier one"
            )
        for lease in [
            lease for lease in self.leases.out.values() if lease.trains or lease.task in self.settings.followers
        ]:
            self._revoke(lease)
        moved = step < self.version.step
        returned, undone, unfinished = self.ledger.rollback(step, incarnation, moved)
        for group in returned:
            self.table.revive([m.sealed for m in group.valid if m.sealed], group.rows)
            for task in self.settings.followers:
                self.leases.done.get(task, set()).discard(group.number)
        for group in undone:
            self._clean(group, kept=True)
        for group in unfinished:
            self._clean(group)
        self.version = Version(self.version.model, incarnation, step)
        self._committed, self._overdue, self._late = frozenset(), False, False
        self._forget_stale_columns()
        return self.version

    def cover(self, step: int) -> None:
        """Say that a checkpoint of version `step` is being made, so that its copy of the ledger knows."""
        if step > self.version.step:
            raise RelaxError(
                f"bus: checkpoint: got step {step}, the actor is at {self.version.step}; commit the step first"
            )
        self.ledger.records.append(CheckpointRecord(step, self.version.incarnation))

    def finalize(self, step: int) -> None:
        """A checkpoint of version `step` exists: nothing brings its samples back, their payloads go."""
        self.final_step = max(self.final_step, step)
        for group in self.ledger.finalize(step, self._to_follow()):
            self._clean(group, kept=True)

    def _to_follow(self) -> set[int]:
        """Trained groups that some follower has not acknowledged."""
        held = {number for lease in self.leases.out.values() for number in lease.groups}
        return {
            number
            for number in self.ledger.provisional
            for task in self.settings.followers
            if number in held or number not in self.leases.done.get(task, ())
        }


class TransferQueue(Puts, Steps):
    """Admission, rows, claims, training and lineage of one run."""

    # -- roles and holders -----------------------------------------------------------------------------------------------

    def register(self, role: str, now: float) -> Registration:
        """A role starts anew: its leases end, and what it was generating is issued again as the same work."""
        self._roles[role] = incarnation = self._roles.get(role, 0) + 1
        self.ledger.records.append(RegisteredRecord(role, incarnation))
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
            elif found[1].state is AttemptState.ISSUED:
                found[1].state = AttemptState.RUNNING
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
            return claims.trained_by(request, self.ledger.provisional.values(), self.settings.followers)
        if not request.trains:
            return claims.pick(request, self.ledger.live, self.leases.done.get(request.task, set()))
        if request.step != self.version.step:
            raise StaleFence(f"claim: got step {request.step}, the next is {self.version.step}; ask for the version")
        self._late |= request.overdue
        columns = frozenset((*request.columns, *self.settings.columns))
        live = self.ledger.live.values()
        return claims.pick_for_step(request, columns, live, self.rule, self.settings.late, self.version.step)

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
