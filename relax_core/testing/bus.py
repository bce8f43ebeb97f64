# SPDX-License-Identifier: Apache-2.0
"""What a bus promises: leases, fencing, credits, whole groups, sealing, drops, the account, lineage and persistence.

Every bus passes it as it stands; a subclass names the component and, where opening takes long, raises `wait_s`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from relax_core.api.batch import Ragged, RowBatch, RowId
from relax_core.api.bus import Account, BusComponent, Claim, ClaimRequest, Sealed
from relax_core.api.errors import RelaxError, StaleFence
from relax_core.api.outcome import DropReason, Outcome
from relax_core.api.version import Version
from relax_core.testing.bus_lab import FIRST, SETTINGS, START, WAIT_S, Lab, by_row, columns, token
from relax_core.testing.suite import Suite

SHORT_S = 0.05
"""How long a call waits that must come back empty-handed."""
Scenario = Callable[[Lab], Awaitable[Any]]


class BusSuite(Suite):
    """Subclass it and name the component."""

    kind: ClassVar[str] = "bus"

    @classmethod
    def exercise(cls, component: BusComponent) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            account = _run(component, directory, _two_steps, START, {})
        return dataclasses.astuple(account)

    @pytest.fixture
    def on_bus(self, made: BusComponent, tmp_path: Path) -> Callable[..., Any]:
        """Runs a scenario on a bus that is opened over one directory, and closed after it."""

        def run(scenario: Scenario, version: Version = START, **settings: Any) -> Any:
            return _run(made, str(tmp_path), scenario, version, settings)

        return run

    # -- admission ------------------------------------------------------------------------------------------------

    def test_admits_whole_groups_up_to_the_bound(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            issues = [*await lab.admit(1), *await lab.admit(9)]
            assert [issue.group for issue in issues] == [0, 1, 2, 3], "max_staleness 1: two steps' groups"
            assert all(len(issue.attempts) == 2 and issue.retry == 0 for issue in issues)
            assert await lab.admit(1, SHORT_S) == ()

        on_bus(scenario)

    def test_admits_nothing_to_an_engine_that_is_too_old_or_given_up(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            await lab.train()
            assert await lab.bus.admit("rollout", START, 9, SHORT_S) == (), "max_staleness 0, one version behind"
            other = Version("actor", 7, 1)
            assert await lab.bus.admit("rollout", other, 9, SHORT_S) == (), "another incarnation"

        on_bus(scenario, max_staleness=0)

    def test_admission_waits_for_a_step_to_end(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            await lab.produce(4)
            await lab.credit()
            waiting = asyncio.create_task(lab.bus.admit("rollout", Version("actor", 0, 1), 1, WAIT_S))
            claim = await lab.claim_step()
            await lab.bus.trained([claim], 0)
            assert [issue.group for issue in await waiting] == [4]

        on_bus(scenario)

    # -- rows -----------------------------------------------------------------------------------------------------

    def test_rows_come_back_as_they_were_put_in_claim_order(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
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

        on_bus(scenario)

    def test_columns_keep_their_dtype_and_shape(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            (issue,) = await lab.admit(1)
            ids = tuple(RowId(*attempt, 0) for attempt in issue.attempts)
            experts = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
            wide = {"experts": Ragged(experts, np.array([2, 3])), "bits": Ragged(np.arange(5, dtype=np.uint16), np.array([0, 5]))}
            sealed = [Sealed(attempt, 1, Outcome.FINISHED) for attempt in issue.attempts]
            await lab.bus.put(RowBatch(ids, {**columns(ids, 1), **wide}), sealed, WAIT_S)
            claim = await lab.bus.claim(ClaimRequest("any", ("experts",), 1), WAIT_S)
            batch = await lab.bus.read(claim, ("experts", "bits"))
            np.testing.assert_array_equal(batch.columns["experts"].values, experts)
            assert batch.columns["bits"].values.dtype == np.uint16
            assert batch.columns["bits"].lengths.tolist() == [0, 5]

        on_bus(scenario)

    def test_a_group_is_claimed_only_when_all_its_samples_are_sealed(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            (issue,) = await lab.admit(1)
            await lab.put(issue.attempts[:1])
            request = ClaimRequest("advantages", FIRST, 1)
            assert await lab.bus.claim(request, SHORT_S) is None
            waiting = asyncio.create_task(lab.bus.claim(request, WAIT_S))
            await lab.put(issue.attempts[1:])
            claim = await waiting
            assert claim.groups == (issue.group,) and set(claim.samples) == set(issue.attempts)

        on_bus(scenario)

    def test_a_sample_without_rows_is_a_member_all_the_same(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            (issue,) = await lab.admit(1)
            await lab.put(issue.attempts[:1])
            await lab.put(issue.attempts[1:], rows=0)
            await lab.credit()
            claim = await lab.claim_step()
            assert set(claim.samples) == set(issue.attempts) and len(claim.rows) == 1
            await lab.bus.trained([claim], 0)
            account = await lab.bus.account()
            assert (account.trained, account.trained_without_gradient) == (2, 1)

        on_bus(scenario)

    def test_a_put_that_is_not_whole_is_refused_and_stores_nothing(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            (issue,) = await lab.admit(1)
            ids = (RowId(*issue.attempts[0], 0),)
            with pytest.raises(RelaxError, match="rows"):
                await lab.bus.put(RowBatch(ids, columns(ids, 1)), [Sealed(issue.attempts[0], 2, Outcome.FINISHED)], WAIT_S)
            assert (await lab.bus.statistics())["rows"] == 0
            assert await lab.problem() == ""

        on_bus(scenario)

    def test_a_repeated_put_changes_nothing(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            (issue,) = await lab.admit(1)
            for _ in range(2):
                assert await lab.put(issue.attempts)
            assert (await lab.bus.statistics())["rows"] == 2
            assert await lab.problem() == ""

        on_bus(scenario)

    def test_a_producer_without_credit_waits_and_goes_on(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            issues = await lab.admit(4)
            for issue in issues[:2]:
                assert await lab.put(issue.attempts)
            assert not await lab.put(issues[2].attempts, wait_s=SHORT_S), "four rows are all there is"
            waiting = asyncio.create_task(lab.put(issues[2].attempts))
            await lab.credit()
            claim = await lab.claim_step()
            await lab.bus.trained([claim], 0)
            assert await waiting
            assert await lab.problem() == ""

        on_bus(scenario, max_rows=4)

    def test_unfinished_groups_that_fill_the_bus_can_always_be_finished(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            issues = await lab.admit(4)
            for sample in (0, 1):
                for issue in issues[:2] if sample else issues:
                    await lab.put(issue.attempts[sample : sample + 1], wait_s=SHORT_S)
            await lab.credit()
            claim = await lab.claim_step()
            assert claim is not None and claim.groups == (0, 1)

        on_bus(scenario, max_rows=2)

    # -- ends -----------------------------------------------------------------------------------------------------

    def test_a_failure_is_a_drop_and_never_a_zero(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            (issue,) = await lab.admit(1)
            await lab.put(issue.attempts[:1])
            await lab.fail(issue.attempts[1])
            claim = await lab.bus.claim(ClaimRequest("advantages", FIRST, 1), WAIT_S)
            assert set(claim.samples) == {issue.attempts[0]}
            assert (await lab.bus.account()).dropped == {DropReason.FAILED: 1}
            assert await lab.problem() == ""

        on_bus(scenario)

    def test_a_group_with_too_few_valid_samples_is_dropped_and_replaced(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            issues = await lab.admit(4)
            await lab.put(issues[0].attempts[:1])
            await lab.fail(issues[0].attempts[1])
            account = await lab.bus.account()
            assert account.dropped == {DropReason.FAILED: 1, DropReason.TOO_FEW_VALID: 1}
            assert [issue.group for issue in await lab.admit(4)] == [4], "the place is free again"
            assert await lab.problem() == ""

        on_bus(scenario, min_valid=2)

    def test_regenerating_issues_the_group_again_before_new_ones(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
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

        on_bus(scenario)

    def test_what_comes_in_for_an_ended_sample_is_ignored(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            (issue,) = await lab.admit(1)
            await lab.bus.drop(issue.attempts, DropReason.FILTERED)
            gone = await lab.bus.report_held("rollout", frozenset(lab.held), lab.admitted)
            assert gone == frozenset(issue.attempts), "the holder learns what to abort"
            assert await lab.put(issue.attempts)
            assert (await lab.bus.statistics())["rows"] == 0
            assert await lab.problem() == ""

        on_bus(scenario)

    # -- leases ---------------------------------------------------------------------------------------------------

    def test_each_task_gets_every_group_once(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            await lab.produce(2)
            groups: dict[str, list[int]] = {"one": [], "two": []}
            for task in ("one", "two", "one", "two"):
                claim = await lab.bus.claim(ClaimRequest(task, FIRST, 1), WAIT_S)
                groups[task] += claim.groups
            assert groups == {"one": [0, 1], "two": [0, 1]}
            assert await lab.bus.claim(ClaimRequest("one", FIRST, 1), SHORT_S) is None

        on_bus(scenario)

    def test_released_rows_go_to_the_next_claim(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            await lab.produce(1)
            first = await lab.bus.claim(ClaimRequest("one", FIRST, 1), WAIT_S)
            await lab.bus.release(first)
            await lab.bus.release(first)
            second = await lab.bus.claim(ClaimRequest("one", FIRST, 1), WAIT_S)
            assert second.rows == first.rows and second.fence != first.fence

        on_bus(scenario)

    def test_an_expired_lease_gives_its_rows_to_the_next_claim_and_fences_the_old_holder(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            await lab.produce(1)
            old = await lab.bus.claim(ClaimRequest("advantages", FIRST, 1), WAIT_S)
            new = await lab.bus.claim(ClaimRequest("advantages", FIRST, 1), WAIT_S)
            assert new is not None and new.rows == old.rows
            await _fenced(lab, old)

        on_bus(scenario, lease_s=0.2)

    def test_a_role_that_registers_again_fences_its_former_self(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            await lab.produce(2)
            await lab.credit()
            first = await lab.bus.register("actor")
            old = await lab.claim_step()
            second = await lab.bus.register("actor")
            assert second.incarnation > first.incarnation
            await _fenced(lab, old)
            with pytest.raises(StaleFence):
                await lab.bus.trained([old], 0)
            new = await lab.claim_step()
            assert new.rows == old.rows
            assert await lab.problem() == ""

        on_bus(scenario)

    def test_what_a_dead_producer_was_making_is_issued_again_as_the_same_work(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            await lab.bus.register("rollout")
            done, lost = await lab.admit(2)
            await lab.put(done.attempts)
            registration = await lab.bus.register("rollout")
            assert registration.reissued == 1
            lab.held.clear()
            lab.admitted = 0
            (again,) = await lab.admit(1)
            assert (again.group, again.retry) == (lost.group, lost.retry)
            assert not set(again.attempts) & set(lost.attempts)
            assert await lab.problem() == ""

        on_bus(scenario)

    def test_a_write_of_another_number_of_rows_is_refused(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            await lab.produce(1)
            claim = await lab.bus.claim(ClaimRequest("advantages", FIRST, 1), WAIT_S)
            with pytest.raises(RelaxError, match="advantages"):
                await lab.bus.write(claim, {"advantages": by_row(claim.rows[:1])})

        on_bus(scenario)

    def test_a_column_of_former_weights_is_made_again(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            await lab.produce(4)
            await lab.credit()
            forward = ClaimRequest("actor_fwd", FIRST, 4)
            ahead = await lab.bus.claim(forward, WAIT_S)
            await lab.bus.write(ahead, {"old_log_probs": by_row(ahead.rows)}, START)
            await lab.bus.acknowledge(ahead)
            claim = await lab.claim_step()
            version = await lab.bus.trained([claim], 0)
            assert await lab.claim_step(wait_s=SHORT_S) is None, "what is left has old_log_probs of the last version"
            again = await lab.bus.claim(forward, WAIT_S)
            assert again.groups == (2, 3)
            await lab.bus.write(again, {"old_log_probs": by_row(again.rows)}, version)
            assert (await lab.claim_step()).groups == (2, 3)

        on_bus(scenario, columns=("tokens", "advantages", "old_log_probs"))

    # -- training -------------------------------------------------------------------------------------------------

    def test_a_step_is_committed_once(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            claim = await lab.train()
            assert await lab.bus.trained([claim], 0) == Version("actor", 0, 1), "a repeat is harmless"
            account = await lab.bus.account()
            assert (account.trained, account.in_flight) == (4, 0)
            with pytest.raises(StaleFence):
                await lab.bus.verify(claim)
            with pytest.raises(StaleFence):
                await lab.bus.claim(ClaimRequest("actor", FIRST, 1, trains=True, step=0), SHORT_S)

        on_bus(scenario)

    def test_the_next_step_waits_for_the_groups_that_would_expire(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            issues = await lab.admit(4)
            for issue in issues[:2]:
                await lab.put(issue.attempts)
            await lab.credit()
            await lab.bus.trained([await lab.claim_step()], 0)
            await lab.produce(2)
            await lab.credit()
            assert await lab.claim_step(wait_s=SHORT_S) is None, "two older groups need both places"
            late = await lab.claim_step(overdue=True)
            assert late.groups == (4, 5), "after the deadline it takes what is ready"
            await lab.bus.trained([late], 1)
            assert (await lab.bus.account()).dropped[DropReason.EXPIRED] == 4
            lab.held.clear()
            assert await lab.problem() == ""

        on_bus(scenario)

    def test_a_step_closed_short_drops_what_no_longer_fits(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            issues = await lab.admit(2)
            await lab.put(issues[0].attempts)
            await lab.credit()
            await lab.bus.trained([await lab.claim_step(overdue=True)], 0)
            assert (await lab.bus.account()).dropped == {DropReason.DEADLINE: 2}
            gone = await lab.bus.report_held("rollout", frozenset(lab.held), lab.admitted)
            assert gone == frozenset(issues[1].attempts)

        on_bus(scenario, max_staleness=0)

    def test_spares_replace_the_slow_and_are_not_waited_for(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            slow, *quick = await lab.admit(9)
            assert len(quick) == 2
            for issue in quick:
                await lab.put(issue.attempts)
            await lab.credit()
            claim = await lab.claim_step()
            assert claim.groups == (1, 2)
            await lab.bus.trained([claim], 0)
            assert (await lab.bus.account()).dropped == {DropReason.SPARE: 2}

        on_bus(scenario, max_staleness=0, spare_groups=1)

    # -- lineage and persistence ------------------------------------------------------------------------------------

    def test_a_rollback_returns_what_the_surviving_weights_sampled(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            await lab.produce(4)
            await lab.credit()
            for step in (0, 1):
                await lab.bus.trained([await lab.claim_step()], step)
            await lab.produce(2)
            await lab.credit()
            version = await lab.bus.rollback(0)
            assert version == Version("actor", 1, 0)
            account = await lab.bus.account()
            assert (account.trained, account.in_flight, account.dropped) == (0, 8, {DropReason.ABANDONED: 4})
            back = await lab.claim_step()
            assert back.groups == (0, 1), "in the order that was recorded"
            assert (await lab.bus.read(back, ("advantages",))).columns["advantages"].values.tolist() == [0, 0, 1, 1]
            assert await lab.problem() == ""

        on_bus(scenario)

    def test_a_checkpoint_is_final_and_frees_payloads(self, on_bus: Any, tmp_path: Path) -> None:
        async def scenario(lab: Lab) -> None:
            await lab.train()
            assert (await lab.bus.statistics())["kept_bytes"] > 0
            await lab.bus.checkpoint(1, str(tmp_path / "checkpoint"))
            assert (await lab.bus.statistics())["kept_bytes"] == 0
            assert (tmp_path / "checkpoint" / "ledger.db").is_file()
            await lab.bus.rollback(1)
            assert (await lab.bus.account()).trained == 4

        on_bus(scenario)

    def test_a_run_that_is_opened_again_issues_what_was_lost_as_the_same_work(self, on_bus: Any, tmp_path: Path) -> None:
        async def before(lab: Lab) -> None:
            await lab.train()
            await lab.bus.checkpoint(1, str(tmp_path / "checkpoint"))
            await lab.train()
            await lab.admit(1)

        async def after(lab: Lab) -> None:
            account = await lab.bus.account()
            assert (account.trained, account.in_flight) == (4, 0)
            assert account.dropped == {DropReason.RESUMED: 6}
            assert await lab.bus.version() == Version("actor", 0, 1)
            issues = await lab.admit(9)
            assert [(issue.group, issue.retry) for issue in issues] == [(2, 0), (3, 0), (4, 0), (5, 0)]
            assert issues[0].attempts[0].attempt == 1 and issues[3].attempts[0].attempt == 0
            assert await lab.problem() == ""

        on_bus(before)
        on_bus(after, Version("actor", 0, 1))

    def test_samples_of_given_up_weights_are_abandoned_when_opened_again(self, on_bus: Any) -> None:
        async def before(lab: Lab) -> None:
            await lab.train()
            await lab.train()

        async def after(lab: Lab) -> None:
            assert (await lab.bus.account()).dropped == {DropReason.ABANDONED: 4, DropReason.RESUMED: 4}
            assert [issue.group for issue in await lab.admit(9)] == [0, 1, 2, 3]

        on_bus(before)
        on_bus(after, Version("actor", 1, 0))

    def test_closing_while_others_wait_lets_them_end(self, on_bus: Any) -> None:
        async def scenario(lab: Lab) -> None:
            claims = [asyncio.create_task(lab.bus.claim(ClaimRequest(t, FIRST, 1), SHORT_S)) for t in ("one", "two")]
            assert await asyncio.gather(*claims) == [None, None]

        on_bus(scenario)


async def _fenced(lab: Lab, claim: Claim) -> None:
    """No use of the claim does anything any more."""
    for use in (
        lab.bus.verify(claim),
        lab.bus.read(claim, ("tokens",)),
        lab.bus.write(claim, {"advantages": by_row(claim.rows)}),
        lab.bus.acknowledge(claim),
    ):
        with pytest.raises(StaleFence):
            await use


async def _two_steps(lab: Lab) -> Account:
    for _ in range(2):
        await lab.train()
    return await lab.bus.account()


def _run(component: BusComponent, directory: str, scenario: Scenario, version: Version, settings: dict[str, Any]) -> Any:
    async def main() -> Any:
        bus = await component.open(dataclasses.replace(SETTINGS, **settings), directory, version)
        try:
            return await scenario(Lab(bus))
        finally:
            await bus.close()

    return asyncio.run(main())
