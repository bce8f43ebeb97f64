# SPDX-License-Identifier: Apache-2.0
"""Conformance checks of a bus over several steps: commits, waits, drops, rollbacks and restarts."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from relax_core.api.bus import Account, BusComponent, ClaimRequest
from relax_core.api.errors import StaleFence
from relax_core.api.trajectory import DropReason
from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.testing.bus_fixture import FIRST, SHORT_S, START, WAIT_S, BusFixture, Open, Scenario, run_on, scenario
from relax_core.testing.suite import Suite


class TrainingSuite(Suite):
    """The part of `BusSuite` that checks steps, lineage and persistence."""

    kind: ClassVar[str] = "bus"

    @classmethod
    def opens(cls, component: BusComponent) -> Open:
        """Return the function that opens the bus; override it if roles reach the bus from separate processes."""
        return partial(open_bus, component)

    @classmethod
    def exercise(cls, component: BusComponent) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            account = run_on(cls.opens(component), directory, _two_steps, START, {})
        return dataclasses.astuple(account)

    @pytest.fixture
    def on_bus(self, made: BusComponent, tmp_path: Path) -> Callable[..., Any]:
        """Return a function that runs a scenario on a bus. All calls of the function use the same directory."""

        def run(scenario: Scenario, version: Version = START, **settings: Any) -> Any:
            return run_on(self.opens(made), str(tmp_path), scenario, version, settings)

        return run

    # -- training -------------------------------------------------------------------------------------------------

    @scenario()
    async def test_a_step_is_committed_once(self, lab: BusFixture) -> None:
        claim = await lab.train()
        assert await lab.bus.trained([claim], 0) == Version("actor", 0, 1), "a repeated commit must change nothing"
        account = await lab.bus.account()
        assert (account.trained, account.in_flight) == (4, 0)
        with pytest.raises(StaleFence):
            await lab.bus.verify(claim)
        with pytest.raises(StaleFence):
            await lab.bus.claim(ClaimRequest("actor", FIRST, 1, trains=True, step=0), SHORT_S)

    @scenario()
    async def test_the_next_step_waits_for_the_groups_that_would_become_stale(self, lab: BusFixture) -> None:
        issues = await lab.admit(4)
        for issue in issues[:2]:
            await lab.put(issue.attempts)
        await lab.credit()
        await lab.bus.trained([await lab.claim_step()], 0)
        await lab.produce(2)
        await lab.credit()
        assert await lab.step_waits(), "the step must wait for two older groups, which would become stale"
        late = await lab.claim_step(overdue=True)
        assert late.groups == (4, 5), "an overdue step must take the ready groups"
        await lab.bus.trained([late], 1)
        assert (await lab.bus.account()).dropped == {DropReason.DEADLINE: 4}
        lab.held.clear()
        assert await lab.problem() == ""

    @scenario(max_staleness=0)
    async def test_a_step_closed_short_drops_what_no_longer_fits(self, lab: BusFixture) -> None:
        issues = await lab.admit(2)
        await lab.put(issues[0].attempts)
        await lab.credit()
        await lab.bus.trained([await lab.claim_step(overdue=True)], 0)
        assert (await lab.bus.account()).dropped == {DropReason.DEADLINE: 2}
        gone = await lab.bus.report_held("rollout", frozenset(lab.held), lab.admitted)
        assert gone == frozenset(issues[1].attempts)

    @scenario(max_staleness=0, spare_groups=1)
    async def test_spares_replace_the_slow_and_are_not_waited_for(self, lab: BusFixture) -> None:
        _slow, *quick = await lab.admit(9)
        assert len(quick) == 2
        for issue in quick:
            await lab.put(issue.attempts)
        await lab.credit()
        claim = await lab.claim_step()
        assert claim.groups == (1, 2)
        await lab.bus.trained([claim], 0)
        assert (await lab.bus.account()).dropped == {DropReason.SPARE: 2}

    @scenario(late="mask")
    async def test_masking_does_not_wait_and_marks_stale_tokens(self, lab: BusFixture) -> None:
        slow = await lab.admit(1)
        for step in range(2):
            issues = await lab.admit(1)
            await lab.put(issues[0].attempts)
            await lab.credit()
            claim = await lab.claim_step()
            assert claim.mask_before == 0
            await lab.bus.trained([claim], step)
        await lab.put(slow[0].attempts, step=0)
        await lab.credit()
        late = await lab.claim_step()
        assert late.groups == (slow[0].group,) and late.mask_before == 1
        assert await lab.problem() == ""

    def test_dropping_ends_stale_groups_at_once_and_regenerating_issues_them_again(self, on_bus: Any) -> None:
        async def checked(lab: BusFixture) -> list[int]:
            slow, quick = await lab.admit(2)
            await lab.put(quick.attempts)
            await lab.credit()
            await lab.bus.trained([await lab.claim_step()], 0)
            gone = await lab.bus.report_held("rollout", frozenset(lab.held), lab.admitted)
            assert gone == frozenset(slow.attempts)
            lab.held.clear()
            return [issue.group for issue in await lab.admit(2)]

        assert on_bus(checked, max_staleness=0, late="regenerate") == [0, 2]

    @pytest.mark.parametrize("late", ["wait", "mask", "drop", "regenerate"])
    def test_a_step_past_its_deadline_ends_the_groups_that_delay_it(self, on_bus: Any, late: str) -> None:
        async def checked(lab: BusFixture) -> None:
            stuck = await lab.admit(4)
            assert await lab.bus.end_awaited(0) == (0, 1), "the oldest groups must end, as many as a step needs"
            gone = await lab.bus.report_held("rollout", frozenset(lab.held), lab.admitted)
            assert gone == {attempt for issue in stuck[:2] for attempt in issue.attempts}
            lab.held -= gone
            for issue in await lab.admit(4):
                assert (issue.group in (0, 1), issue.retry) == ((True, 1) if late == "regenerate" else (False, 0))
                await lab.put(issue.attempts)
            await lab.credit()
            assert len((await lab.claim_step(overdue=True)).groups) == 2
            assert await lab.bus.end_awaited(0) == (2, 3), "end_awaited must not end groups that the step has"
            assert await lab.problem() == ""

        on_bus(checked, late=late)

    def test_a_task_that_is_late_again_and_again_is_issued_no_more(self, on_bus: Any) -> None:
        async def checked(lab: BusFixture) -> list[tuple[int, int]]:
            tries = []
            for step in range(6):
                slow, *_ = issues = await lab.admit(2)
                tries.append((slow.group, slow.retry))
                await lab.put(issues[1].attempts)
                await lab.credit()
                await lab.bus.trained([await lab.claim_step()], step)
                lab.held.clear()
            return tries

        tries = on_bus(checked, late="regenerate", max_staleness=0)
        assert tries[:4] == [(0, 0), (0, 1), (0, 2), (0, 3)] and 0 not in dict(tries[4:])

    @scenario()
    async def test_a_step_that_is_overdue_is_prepared_with_what_is_ready(self, lab: BusFixture) -> None:
        await lab.produce(1)
        request = ClaimRequest("advantages", FIRST, 2, min_groups=2)
        assert await lab.bus.claim(request, SHORT_S) is None
        assert await lab.bus.claim(await lab.step_request(True), SHORT_S) is None
        claim = await lab.bus.claim(request, WAIT_S)
        assert claim is not None and claim.groups == (0,)

    # -- lineage and persistence ------------------------------------------------------------------------------------

    @scenario()
    async def test_a_rollback_returns_what_the_surviving_weights_sampled(self, lab: BusFixture) -> None:
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
        assert back.groups == (0, 1), "a rollback must return groups in their recorded order"
        assert (await lab.bus.read(back, ("advantages",))).columns["advantages"].values.tolist() == [0, 0, 1, 1]
        assert await lab.problem() == ""

    def test_a_checkpoint_is_final_and_frees_payloads(self, on_bus: Any, tmp_path: Path) -> None:
        async def checked(lab: BusFixture) -> None:
            await lab.train()
            assert (await lab.bus.statistics())["kept_bytes"] > 0
            await lab.bus.checkpoint(1, str(tmp_path / "checkpoint"))
            assert (await lab.bus.statistics())["kept_bytes"] == 0
            assert (tmp_path / "checkpoint" / "ledger.db").is_file()
            await lab.bus.rollback(1)
            assert (await lab.bus.account()).trained == 4

        on_bus(checked)

    def test_a_run_that_is_opened_again_issues_what_was_lost_as_the_same_work(
        self, on_bus: Any, tmp_path: Path
    ) -> None:
        async def before(lab: BusFixture) -> None:
            await lab.train()
            await lab.bus.checkpoint(1, str(tmp_path / "checkpoint"))
            await lab.train()
            await lab.admit(1)

        async def after(lab: BusFixture) -> None:
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
        async def before(lab: BusFixture) -> None:
            await lab.train()
            await lab.train()

        async def after(lab: BusFixture) -> None:
            assert (await lab.bus.account()).dropped == {DropReason.ABANDONED: 4, DropReason.RESUMED: 4}
            assert [issue.group for issue in await lab.admit(9)] == [0, 1, 2, 3]

        on_bus(before)
        on_bus(after, Version("actor", 1, 0))


async def _two_steps(lab: BusFixture) -> Account:
    for _ in range(2):
        await lab.train()
    return await lab.bus.account()
