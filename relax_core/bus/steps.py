# SPDX-License-Identifier: Apache-2.0
"""How steps are committed, and undone: the version, what is trained at it, what no longer fits, what is kept for a rollback."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relax_core.api.batch import RowId
from relax_core.api.bus import Claim
from relax_core.api.errors import RelaxError, StaleFence
from relax_core.api.outcome import DropReason
from relax_core.api.version import Version
from relax_core.bus import selection
from relax_core.bus.parts import Parts
from relax_core.bus.records import Checkpointed, Stepped


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
        self.ledger.records.append(Stepped(self.version.step, self.version.incarnation))
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
        slow = selection.waited_for(self.ledger.live.values(), self.settings.groups_per_step)
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
        self.ledger.records.append(Checkpointed(step, self.version.incarnation))

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
