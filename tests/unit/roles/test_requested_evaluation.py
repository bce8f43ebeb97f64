# SPDX-License-Identifier: Apache-2.0
"""An evaluation on request: once for a request, beside the scheduled ones, and without a change to what is trained."""

from __future__ import annotations

from pathlib import Path

from relax_core.api.events import EvalFinished, StepFinished
from relax_core.api.run_commands import Continue, Evaluate, Pause
from tests.unit.roles.simulated_run import RunOutcome, SimulatedRun
from tests.unit.roles.test_row_source import simulation

STEPS = 6
EVAL = {"every": 4, "size": 2, "at_start": False}


async def ask(run: SimulatedRun) -> None:
    """Send what the controller sends for one request."""
    for role in ("actor", "rollout"):
        await run.run_status.command(role, Evaluate())


async def ask_in_a_pause(run: SimulatedRun) -> None:
    """Pause the actor, ask, and continue once the rollout has evaluated."""
    await run.until_event(StepFinished, 1)
    await run.run_status.command("actor", Pause())
    while all(beat.state != "paused" for beat in await run.run_status.heartbeats()):
        await run.clock.sleep(0.1)
    await ask(run)
    await run.until_event(EvalFinished, 1)
    await run.run_status.command("actor", Continue())


def requested(outcome: RunOutcome) -> list[int]:
    """Return the evaluated steps that no schedule names; check that the scheduled ones were evaluated once each."""
    steps = [event.step for event in outcome.told(EvalFinished)]
    scheduled = [step for step in steps if step in (4, STEPS)]
    assert scheduled == [4, STEPS]
    return [step for step in steps if step not in scheduled]


def test_a_rollout_evaluates_on_request_while_the_actor_is_paused(tmp_path: Path) -> None:
    outcome = SimulatedRun(tmp_path, steps=STEPS, eval=EVAL).run(ask_in_a_pause)
    outcome.assert_whole(STEPS, 1)
    assert len(requested(outcome)) == 1


def test_a_run_on_given_rows_evaluates_after_its_step(tmp_path: Path) -> None:
    async def ask_after_a_step(run: SimulatedRun) -> None:
        await run.until_event(StepFinished, 1)
        await run.run_status.command("actor", Evaluate())

    outcome = simulation(tmp_path, "sft", steps=STEPS, eval=EVAL).run(ask_after_a_step)
    assert len(requested(outcome)) == 1 and len(outcome.steps) == STEPS


def test_a_run_without_evaluation_sets_ignores_a_request(tmp_path: Path) -> None:
    async def ask_at_once(run: SimulatedRun) -> None:
        await run.until_event(StepFinished, 1)
        await ask(run)

    outcome = SimulatedRun(tmp_path, steps=2).run(ask_at_once)
    assert outcome.told(EvalFinished) == [] and len(outcome.steps) == 2
