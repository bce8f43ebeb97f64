# SPDX-License-Identifier: Apache-2.0
"""Guards fire on evidence that lasts, once, against the past before it; what they say is done before anybody sees the step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, strategies as st

from relax_core.api.errors import Diverged
from relax_core.api.events import CheckpointSaved, GuardFired, Logged, RoleFailed, RolledBack
from relax_core.api.run_commands import Command, Continue, Stop
from relax_core.config.guard_tables import GuardsTable
from relax_core.roles.divergence import DivergenceGuards
from relax_core.rpc import messages
from relax_core.runners.context import PERSON
from tests.unit.roles.simulated_run import SimulatedRun

OFF = {
    name: {"action": "off"}
    for name in ("ref_kl", "rollout_kl", "entropy", "reward", "mismatch", "length", "not_finite")
}
NORM = "train/grad_norm"
LEASE_S = 10.0
"""Seconds of leases of rows and devices in the tests of pauses."""


def guards(window: int = 8, rollbacks: int = 2, **grad_norm: object) -> DivergenceGuards:
    table = {**OFF, "window": window, "rollbacks": rollbacks, "grad_norm": grad_norm}
    return DivergenceGuards(GuardsTable.model_validate(table))


def fired(machine: DivergenceGuards, *values: float, metric: str = NORM, start: int = 1) -> list[int]:
    return [step for step, value in enumerate(values, start) if machine.judge(step, {metric: value})]


numbers = st.lists(st.sampled_from([0.5, 1.0, 1.5, 40.0, 90.0, math.nan, math.inf]), max_size=40)


@given(numbers, st.integers(1, 4))
def test_an_absolute_bound_fires_once_on_each_row_of_evidence_that_is_long_enough(
    values: list[float], steps: int
) -> None:
    machine, row, want = guards(limit=10.0, ratio=1e9, steps=steps), 0, []
    for step, value in enumerate(values, 1):
        if math.isfinite(value):
            row = row + 1 if value > 10.0 else 0
            want += [step] if row == steps and value > 10.0 else []
    assert fired(machine, *values) == want


@given(numbers, st.integers(1, 4), st.integers(4, 10))
def test_a_relative_bound_is_that_of_the_steps_before_the_evidence(
    values: list[float], steps: int, window: int
) -> None:
    machine = guards(window=window, ratio=20.0, least=2.0, steps=steps)
    past: list[float] = []
    row: list[float] = []
    acted = False
    for step, value in enumerate(values, 1):
        found = machine.judge(step, {NORM: value})
        middle = median(past[-window:]) if len(past[-window:]) >= window // 2 else math.inf
        if not math.isfinite(value):
            assert not found
        elif value <= middle + max(19 * middle, 2.0):
            assert not found
            past, row, acted = [*past, *row, value], [], False
        else:
            row.append(value)
            fires = not acted and len(row) == steps
            assert bool(found) == fires
            if acted or fires:
                past, row, acted = [*past, *row], [], True


def test_a_slow_collapse_does_not_move_the_median_that_it_is_compared_with() -> None:
    table = {**OFF, "window": 8, "grad_norm": {"action": "off"}, "reward": {"ratio": 0.5, "least": 0.0, "steps": 6}}
    machine = DivergenceGuards(GuardsTable.model_validate(table))
    values = [0.9] * 8 + [0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]
    assert fired(machine, *values, metric="reward/mean") == [14]
    negative = DivergenceGuards(GuardsTable.model_validate(table))
    assert fired(negative, *[-1.0] * 8, *[-1.4] * 3, *[-1.6] * 6, metric="reward/mean") == [17]


@given(st.lists(st.sampled_from(["good", "bad", "missing"]), max_size=60), st.integers(0, 3), st.integers(1, 3))
def test_rollbacks_are_within_their_budget_and_leave_nothing_of_what_they_undo(
    course: list[str], rollbacks: int, steps: int
) -> None:
    """The owner goes back to the last step without evidence; progress over the window refills the budget."""
    machine = guards(window=4, rollbacks=rollbacks, limit=10.0, ratio=1e9, steps=steps, action="roll-back")
    step, saved, furthest, spent = 0, 0, 0, 0
    for what in course:
        step += 1
        if step > furthest + 4:
            spent = 0
        found = machine.judge(step, {} if what == "missing" else {NORM: 1.0 if what == "good" else 99.0})
        if found:
            furthest, spent = max(furthest, step), spent + 1
            assert found[0].action == ("roll-back" if spent <= rollbacks else "stop")
            assert saved < found[0].since <= step
            if found[0].action == "stop":
                assert "guards.rollbacks" in found[0].reason
                return
            machine.rewind(saved)
            step = saved
            assert not machine.suspects and all(at <= saved for at, _ in machine.window)
        elif not machine.suspects:
            saved = step


def test_the_most_severe_of_several_comes_first() -> None:
    once = {"limit": 1.0, "steps": 1}
    table = {**OFF, "grad_norm": {**once, "action": "pause"}, "length": {**once, "action": "stop"}, "reward": once}
    machine = DivergenceGuards(GuardsTable.model_validate(table))
    found = machine.judge(1, {NORM: 9.0, "length/mean": 9.0, "reward/mean": 0.0})
    assert [(one.guard, one.action) for one in found] == [
        ("length", "stop"), ("grad_norm", "pause"), ("reward", "warn")
    ]  # fmt: skip


# -- the actor does what they say ---------------------------------------------------------------------------------------


def simulated(
    folder: Path, action: str, once: int = 0, explodes: tuple[int, ...] = (), steps: int = 1, placement: str = "hybrid",
    pause_timeout_s: float = 1e5,
) -> SimulatedRun:  # fmt: skip
    """A run of eight steps, with a checkpoint of every second one, whose gradients explode."""
    folder.mkdir(exist_ok=True)
    (folder / "once").write_text(str(once))
    trainer = {"name": "scripted-trainer", "explodes": list(explodes), "explodes_once": str(folder / "once")}
    guards = {"grad_norm": {"action": action, "limit": 10.0, "steps": steps}, "pause_timeout_s": pause_timeout_s}
    return SimulatedRun(folder, steps=8, trainer=trainer, guards=guards, placement=placement, checkpoint={"every": 2})


def test_a_warning_changes_nothing(tmp_path: Path) -> None:
    outcome = simulated(tmp_path, "warn", explodes=(3, 4, 6)).run()
    told = outcome.told(GuardFired)
    assert [(event.step, event.guard, event.action) for event in told] == [
        (3, "grad_norm", "warn"), (6, "grad_norm", "warn")
    ]  # fmt: skip
    assert told[0].evidence["value"] == 1000.0 and len(told[0].evidence["groups"]) == 4
    assert [one["step"] for one in told[0].evidence["window"]] == [1, 2, 3]
    assert messages.decode(messages.encode(told[0])) == told[0], "it travels between processes"
    assert [step.step for step in outcome.steps] == list(range(1, 9))


def test_a_guard_without_its_metric_is_reported_once(tmp_path: Path) -> None:
    guards = {"window": 4, "entropy": {"action": "stop"}, "ref_kl": {"action": "warn"}, "reward": {"action": "stop"}}
    outcome = SimulatedRun(tmp_path, steps=8, guards=guards).run()
    told = [event.message for event in outcome.told(Logged) if "guard" in event.message]
    assert told == ["guard entropy can't judge: no step so far reported policy/entropy"]


def test_a_step_that_exploded_is_undone_before_any_engine_has_it(tmp_path: Path) -> None:
    """Its evidence began after a checkpoint that was due within it: that one was not made."""
    outcome = simulated(tmp_path, "roll-back", once=5).run()
    (back,) = outcome.told(RolledBack)
    assert (back.version.step, back.version.incarnation) == (4, 1) and "grad_norm" in back.reason
    assert [step.step for step in outcome.steps] == list(range(1, 9)) and max(outcome.metric(NORM)) == 1.0
    assert len(outcome.of("actor", "publish")) == 8 + 1  # each step, and the checkpoint that it went back to
    assert not outcome.told(RoleFailed)
    assert outcome.account.balanced and outcome.account.trained == 8 * 16


def test_no_checkpoint_is_made_of_evidence_that_may_yet_be_undone(tmp_path: Path) -> None:
    run = simulated(tmp_path, "stop", explodes=(4, 5), steps=2)
    with pytest.raises(ExceptionGroup) as caught:
        run.run()
    (error,) = caught.value.exceptions
    assert isinstance(error, Diverged) and error.exit_code == 5 and "steps 4 to 5" in str(error)
    saved = [event.step for event in run.run_status.heard if isinstance(event, CheckpointSaved)]
    assert saved == [2] and [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    over = simulated(tmp_path / "over", "stop", explodes=(4,), steps=2).run()
    assert [event.step for event in over.told(CheckpointSaved)] == [2, 5, 6, 8]


def test_rollbacks_that_do_not_help_end_the_run(tmp_path: Path) -> None:
    run = simulated(tmp_path, "roll-back", explodes=(5,))
    with pytest.raises(ExceptionGroup) as caught:
        run.run()
    assert "guards.rollbacks allows 2" in str(caught.value.exceptions[0])
    actions = [event.action for event in run.run_status.heard if isinstance(event, GuardFired)]
    assert actions == ["roll-back", "roll-back", "stop"]


@pytest.mark.parametrize(("end", "placement"), [(Continue(), "colocate"), (Stop(), "hybrid")])
def test_a_pause_holds_the_step_until_a_person_continues_or_stops(
    tmp_path: Path, end: Command, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause that is longer than any lease loses no row, and no deadline of another role ends the run."""
    for role in ("forward", "rank_group", "rollout"):
        monkeypatch.setattr(f"relax_core.roles.{role}.DEVICE_LEASE_WAIT_S", LEASE_S)
    monkeypatch.setattr("relax_core.roles.row_leases.RENEW_S", LEASE_S / 10)
    run = simulated(tmp_path, "pause", explodes=(5,), placement=placement)
    run.bus_settings = replace(run.bus_settings, lease_s=LEASE_S)
    seen: list[tuple[int, str]] = []

    async def person(run: SimulatedRun) -> None:
        while all(beat.state != "paused" for beat in await run.run_status.heartbeats()):
            await run.clock.sleep(1.0)
        await run.clock.sleep(10 * LEASE_S)
        (actor,) = [beat for beat in await run.run_status.heartbeats() if beat.state == "paused"]
        (wait,) = actor.waits
        seen.append(((await run.bus.version()).step, wait.blocked_by))
        assert "step 5" in wait.reason and "grad_norm" in wait.reason and run.clock.now() - actor.at < 10.0
        for role in run.roles:
            await run.run_status.command(role, end)

    outcome = run.run(person, at_most_s=1e6)
    assert seen == [(4, PERSON)]
    assert [step.step for step in outcome.steps] == (list(range(1, 9)) if end == Continue() else [1, 2, 3, 4])
    assert outcome.account.balanced
    saved = [event.step for event in outcome.told(CheckpointSaved)]
    assert saved == ([2, 4, 6, 8] if end == Continue() else [2, 4])


def test_a_pause_past_its_deadline_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        simulated(tmp_path, "pause", explodes=(5,), pause_timeout_s=60.0).run()
    (error,) = caught.value.exceptions
    assert isinstance(error, Diverged) and "the run was not continued within guards.pause_timeout_s" in str(error)
