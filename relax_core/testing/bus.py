# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of buses: leases, fences, credits, whole groups, seals, drops, account, lineage, persistence.

Every bus must pass all tests. A subclass names the component. If the bus needs a cluster or service, the subclass also
overrides `exercise` and the fixture `on_bus` to start it.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from relax_core.api.batch import Ragged, RowBatch, RowId
from relax_core.api.bus import Claim, Sealed
from relax_core.api.errors import RelaxError, StaleFence
from relax_core.api.trajectory import DropReason, Outcome
from relax_core.api.weights import Version
from relax_core.testing.bus_fixture import SHORT_S, START, WAIT_S, BusFixture, by_row, columns, scenario, token
from relax_core.testing.bus_training import TrainingSuite


class BusSuite(TrainingSuite):
    """The suite of a bus; a subclass sets `component`."""

    # -- admission ------------------------------------------------------------------------------------------------

    @scenario()
    async def test_admits_whole_groups_up_to_the_bound(self, lab: BusFixture) -> None:
        issues = [*await lab.admit(1), *await lab.admit(9)]
        assert [issue.group for issue in issues] == [0, 1, 2, 3], (
            "with max_staleness 1, admit() must grant two steps' groups"
        )
        assert all(len(issue.attempts) == 2 and issue.retry == 0 for issue in issues)
        assert await lab.admit(1, SHORT_S) == ()

    @scenario(max_staleness=0)
    async def test_admits_nothing_to_an_engine_that_is_too_old_or_given_up(self, lab: BusFixture) -> None:
        await lab.train()
        assert await lab.bus.admit("rollout", START, 9, SHORT_S) == (), (
            "admit() granted groups to an engine that is too old"
        )
        other = Version("actor", 7, 1)
        assert await lab.bus.admit("rollout", other, 9, SHORT_S) == (), (
            "admit() granted groups to an unknown incarnation"
        )

    @scenario()
    async def test_admission_waits_for_a_step_to_end(self, lab: BusFixture) -> None:
        await lab.produce(4)
        await lab.credit()
        waiting = asyncio.create_task(lab.bus.admit("rollout", Version("actor", 0, 1), 1, WAIT_S))
        claim = await lab.claim_step()
        await lab.bus.trained([claim], 0)
        assert [issue.group for issue in await waiting] == [4]

    @scenario(max_staleness=0)
    async def test_admission_that_waits_continues_when_the_engine_takes_newer_weights(self, lab: BusFixture) -> None:
        await lab.train()
        waiting = asyncio.create_task(lab.bus.admit("rollout", START, 1, WAIT_S))
        await asyncio.sleep(0)
        await lab.bus.serves("rollout", Version("actor", 0, 1))
        assert [issue.group for issue in await waiting] == [2]

    # -- rows -----------------------------------------------------------------------------------------------------

    @scenario()
    async def test_rows_come_back_as_they_were_put_in_claim_order(self, lab: BusFixture) -> None:
        first, second = await lab.admit(2)
        await lab.put([second.attempts[1], first.attempts[1]], rows=2)
        await lab.put([first.attempts[0], second.attempts[0]], rows=3)
        await lab.credit()
        claim = await lab.claim_step()
        assert list(claim.rows) == sorted(claim.rows) and len(claim.rows) == 10
        batch = await lab.bus.read(claim, ("tokens", "advantages"))
        assert batch.ids == claim.rows
        for row, tokens in zip(claim.rows, batch.columns["tokens"].rows(), strict=True):
            assert tokens.tolist() == [token(row)] * (4 + row.sample)
        assert batch.columns["advantages"].values.tolist() == [row.group for row in claim.rows]

    @scenario()
    async def test_columns_keep_their_dtype_and_shape(self, lab: BusFixture) -> None:
        (issue,) = await lab.admit(1)
        ids = tuple(RowId(*attempt, 0) for attempt in issue.attempts)
        experts = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
        wide = {
            "experts": Ragged(experts, np.array([2, 3])),
            "bits": Ragged(np.arange(5, dtype=np.uint16), np.array([0, 5])),
        }
        sealed = [Sealed(attempt, 1, Outcome.FINISHED) for attempt in issue.attempts]
        await lab.bus.put(RowBatch(ids, {**columns(ids, 1), **wide}), sealed, WAIT_S)
        claim = await lab.claim("any", needs=("experts",))
        batch = await lab.bus.read(claim, ("experts", "bits"))
        np.testing.assert_array_equal(batch.columns["experts"].values, experts)
        assert batch.columns["bits"].values.dtype == np.uint16
        assert batch.columns["bits"].lengths.tolist() == [0, 5]

    @scenario()
    async def test_a_group_is_claimed_only_when_all_its_samples_are_sealed(self, lab: BusFixture) -> None:
        (issue,) = await lab.admit(1)
        await lab.put(issue.attempts[:1])
        assert await lab.nothing_for("advantages")
        waiting = asyncio.create_task(lab.claim())
        await lab.put(issue.attempts[1:])
        claim = await waiting
        assert claim.groups == (issue.group,) and set(claim.samples) == set(issue.attempts)

    @scenario()
    async def test_a_sample_without_rows_counts_as_a_member(self, lab: BusFixture) -> None:
        (issue,) = await lab.admit(1)
        await lab.put(issue.attempts[:1])
        await lab.put(issue.attempts[1:], rows=0)
        await lab.credit()
        claim = await lab.claim_step()
        assert set(claim.samples) == set(issue.attempts) and len(claim.rows) == 1
        await lab.bus.trained([claim], 0)
        account = await lab.bus.account()
        assert (account.trained, account.trained_without_gradient) == (2, 1)

    @scenario()
    async def test_a_put_that_is_not_whole_is_refused_and_stores_nothing(self, lab: BusFixture) -> None:
        (issue,) = await lab.admit(1)
        ids = (RowId(*issue.attempts[0], 0),)
        with pytest.raises(RelaxError, match="rows"):
            await lab.bus.put(RowBatch(ids, columns(ids, 1)), [Sealed(issue.attempts[0], 2, Outcome.FINISHED)], WAIT_S)
        assert (await lab.bus.statistics())["rows"] == 0
        assert await lab.problem() == ""

    @scenario()
    async def test_a_producer_keeps_its_state_with_the_ledger(self, lab: BusFixture) -> None:
        assert await lab.bus.kept("sampler") is None
        for seen in (1, 2):
            await lab.bus.keep("sampler", {"seen": seen, "rates": {"7": 0.1}})
        assert await lab.bus.kept("sampler") == {"seen": 2, "rates": {"7": 0.1}}

    @scenario()
    async def test_a_repeated_put_changes_nothing(self, lab: BusFixture) -> None:
        (issue,) = await lab.admit(1)
        for _ in range(2):
            assert await lab.put(issue.attempts)
        assert (await lab.bus.statistics())["rows"] == 2
        assert await lab.problem() == ""

    @scenario(max_rows=4)
    async def test_a_producer_without_credit_waits_and_continues(self, lab: BusFixture) -> None:
        issues = await lab.admit(4)
        for issue in issues[:2]:
            assert await lab.put(issue.attempts)
        assert not await lab.put(issues[2].attempts, wait_s=SHORT_S), "put() stored more than max_rows = 4 rows"
        waiting = asyncio.create_task(lab.put(issues[2].attempts))
        await lab.credit()
        claim = await lab.claim_step()
        await lab.bus.trained([claim], 0)
        assert await waiting
        assert await lab.problem() == ""

    @scenario(max_rows=2)
    async def test_unfinished_groups_that_fill_the_bus_can_always_be_finished(self, lab: BusFixture) -> None:
        issues = await lab.admit(4)
        for sample in (0, 1):
            for issue in issues[:2] if sample else issues:
                await lab.put(issue.attempts[sample : sample + 1], wait_s=SHORT_S)
        await lab.credit()
        assert (await lab.claim_step()).groups == (0, 1)

    # -- ends -----------------------------------------------------------------------------------------------------

    @scenario()
    async def test_a_failure_is_a_drop_and_never_a_zero(self, lab: BusFixture) -> None:
        (issue,) = await lab.admit(1)
        await lab.put(issue.attempts[:1])
        await lab.fail(issue.attempts[1])
        claim = await lab.claim()
        assert set(claim.samples) == {issue.attempts[0]}
        assert (await lab.bus.account()).dropped == {DropReason.FAILED: 1}
        assert await lab.problem() == ""

    @scenario(min_valid=2)
    async def test_a_group_with_too_few_valid_samples_is_dropped_and_replaced(self, lab: BusFixture) -> None:
        issues = await lab.admit(4)
        await lab.put(issues[0].attempts[:1])
        await lab.fail(issues[0].attempts[1])
        account = await lab.bus.account()
        assert account.dropped == {DropReason.FAILED: 1, DropReason.TOO_FEW_VALID: 1}
        assert [issue.group for issue in await lab.admit(4)] == [4], "a dropped group must make room for a new group"
        assert await lab.problem() == ""

    @scenario()
    async def test_regenerating_issues_the_group_again_before_new_ones(self, lab: BusFixture) -> None:
        issue, _ = await lab.admit(2)
        await lab.put(issue.attempts[:1])
        await lab.bus.drop(issue.attempts[1:], DropReason.FILTERED, regenerate=True)
        lab.held.difference_update(issue.attempts)
        again, new = await lab.admit(2)
        assert (again.group, again.retry, new.group) == (issue.group, 1, 2)
        assert not set(again.attempts) & set(issue.attempts)
        account = await lab.bus.account()
        assert account.dropped == {DropReason.FILTERED: 1, DropReason.REGENERATED: 1}
        assert await lab.problem() == ""

    @scenario()
    async def test_a_put_for_an_ended_sample_is_ignored(self, lab: BusFixture) -> None:
        (issue,) = await lab.admit(1)
        await lab.bus.drop(issue.attempts, DropReason.FILTERED)
        gone = await lab.bus.report_held("rollout", frozenset(lab.held), lab.admitted)
        assert gone == frozenset(issue.attempts), "report_held must return the attempts that have ended"
        assert await lab.put(issue.attempts)
        assert (await lab.bus.statistics())["rows"] == 0
        assert await lab.problem() == ""

    # -- leases ---------------------------------------------------------------------------------------------------

    @scenario()
    async def test_each_task_gets_every_group_once(self, lab: BusFixture) -> None:
        await lab.produce(2)
        groups: dict[str, list[int]] = {"one": [], "two": []}
        for task in ("one", "two", "one", "two"):
            claim = await lab.claim(task)
            groups[task] += claim.groups
        assert groups == {"one": [0, 1], "two": [0, 1]}
        assert await lab.nothing_for("one")

    @scenario()
    async def test_released_rows_go_to_the_next_claim(self, lab: BusFixture) -> None:
        await lab.produce(1)
        first = await lab.claim("one")
        await lab.bus.release(first)
        await lab.bus.release(first)
        second = await lab.claim("one")
        assert second.rows == first.rows and second.lease != first.lease

    @scenario(lease_s=0.2)
    async def test_an_expired_lease_gives_its_rows_to_the_next_claim_and_fences_the_old_holder(
        self, lab: BusFixture
    ) -> None:
        await lab.produce(1)
        old = await lab.claim()
        new = await lab.claim()
        assert new.rows == old.rows
        await _fenced(lab, old)

    @scenario()
    async def test_a_role_that_registers_again_fences_its_former_self(self, lab: BusFixture) -> None:
        await lab.produce(2)
        await lab.credit()
        first = await lab.bus.register("actor")
        old = await lab.claim_step()
        second = await lab.bus.register("actor")
        assert second > first
        await _fenced(lab, old)
        with pytest.raises(StaleFence):
            await lab.bus.trained([old], 0)
        new = await lab.claim_step()
        assert new.rows == old.rows
        assert await lab.problem() == ""

    @scenario()
    async def test_a_sample_of_weights_that_a_rollback_gave_up_is_not_taken(self, lab: BusFixture) -> None:
        restored = await lab.bus.rollback(0)
        assert not await lab.bus.abandoned(START), "abandoned() must be False for restored weights"
        assert not await lab.bus.abandoned(restored)
        assert await lab.bus.abandoned(START.next())
        (issue,) = await lab.admit(1)
        await lab.put(issue.attempts, step=1)
        (again,) = await lab.admit(1)
        assert again.group == issue.group
        assert again.attempts != issue.attempts
        await lab.put(again.attempts, step=0)
        assert (await lab.bus.account()).dropped == {"abandoned": len(issue.attempts)}
        assert await lab.problem() == ""

    @scenario()
    async def test_work_of_a_dead_producer_is_issued_again_unchanged(self, lab: BusFixture) -> None:
        await lab.bus.register("rollout")
        done, lost = await lab.admit(2)
        await lab.put(done.attempts)
        await lab.bus.register("rollout")
        lab.held.clear()
        lab.admitted = 0
        (again,) = await lab.admit(1)
        assert (again.group, again.retry) == (lost.group, lost.retry)
        assert not set(again.attempts) & set(lost.attempts)
        assert await lab.problem() == ""

    @scenario()
    async def test_a_repeated_acknowledgement_is_harmless(self, lab: BusFixture) -> None:
        await lab.produce(1)
        claim = await lab.claim()
        for _ in range(2):
            await lab.bus.acknowledge(claim)
        assert await lab.nothing_for("advantages")

    @scenario()
    async def test_a_write_of_another_number_of_rows_is_refused(self, lab: BusFixture) -> None:
        await lab.produce(1)
        claim = await lab.claim()
        with pytest.raises(RelaxError, match="advantages"):
            await lab.bus.write(claim, {"advantages": by_row(claim.rows[:1])})

    @scenario(columns=("tokens", "advantages", "old_log_probs"))
    async def test_a_column_of_former_weights_is_made_again(self, lab: BusFixture) -> None:
        await lab.produce(4)
        await lab.credit()
        ahead = await lab.claim("actor_fwd", 4)
        await lab.bus.write(ahead, {"old_log_probs": by_row(ahead.rows)}, START)
        await lab.bus.acknowledge(ahead)
        claim = await lab.claim_step()
        version = await lab.bus.trained([claim], 0)
        assert await lab.step_waits(), "the actor got rows with outdated old_log_probs"
        again = await lab.claim("actor_fwd", 4)
        assert again.groups == (2, 3)
        await lab.bus.write(again, {"old_log_probs": by_row(again.rows)}, version)
        last = await lab.claim_step()
        assert last.groups == (2, 3)
        assert last.versions == {"old_log_probs": {2: version, 3: version}}, (
            "claim.versions must name the version that computed each column"
        )


async def _fenced(lab: BusFixture, claim: Claim) -> None:
    """Assert that every use of the claim raises StaleFence."""
    for use in (
        lab.bus.verify(claim),
        lab.bus.read(claim, ("tokens",)),
        lab.bus.write(claim, {"advantages": by_row(claim.rows)}),
        lab.bus.acknowledge(claim),
    ):
        with pytest.raises(StaleFence):
            await use
