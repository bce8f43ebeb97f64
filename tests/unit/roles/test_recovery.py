# SPDX-License-Identifier: Apache-2.0
"""A trainer that is lost starts again from its last checkpoint: only it, and every sample counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.api.errors import WorkerDied
from relax_core.api.events import CheckpointSaved, RoleFailed, RoleRecovered, RolledBack, StepFinished
from relax_core.roles.checkpoint import DamagedCheckpoint, choose
from tests.unit.roles.simulated_run import Happening, RunOutcome, SimulatedRun

STEPS, GROUPS = 8, 4
MODES = pytest.mark.parametrize("mode", ["colocate", "hybrid", "async"])


def kill_at(*steps: int) -> Happening:
    """The actor's rank, each time that a step is finished for the first time."""

    async def happening(simulation: SimulatedRun) -> None:
        for step in steps:
            while not any(isinstance(e, StepFinished) and e.step >= step for e in simulation.run_status.heard):
                await simulation.clock.sleep(0.01)
            await simulation.workers.alive["actor-rank-0"].kill()

    return happening


def simulated(folder: Path, *happenings: Happening, every: int = 2, **settings: Any) -> RunOutcome:
    simulation = SimulatedRun(folder, steps=STEPS, checkpoint={"every": every}, **settings)
    return simulation.run(*happenings)


def assert_whole(outcome: RunOutcome) -> None:
    """As many samples count as trained as the steps have, and none is lost."""
    account = outcome.account
    assert account.balanced and account.trained == STEPS * GROUPS * 4
    assert outcome.steps[-1].step == STEPS


@MODES
def test_a_trainer_that_dies_goes_on_from_its_checkpoint(tmp_path: Path, mode: str) -> None:
    outcome = simulated(tmp_path, kill_at(5), placement=mode)
    assert_whole(outcome)
    events = outcome.events
    (back,) = [event for event in events if isinstance(event, RolledBack)]
    assert (back.version.step, back.version.incarnation) == (4, 1)
    assert "actor-rank-0 was killed" in back.reason
    assert [e.role for e in events if isinstance(e, RoleRecovered)] == ["actor"]
    assert [e.fatal for e in events if isinstance(e, RoleFailed)] == [False]
    assert [s.step for s in outcome.steps] == [1, 2, 3, 4, 5, 5, 6, 7, 8]


def test_without_a_checkpoint_it_begins_anew(tmp_path: Path) -> None:
    outcome = simulated(tmp_path, kill_at(3), every=0)
    assert_whole(outcome)
    assert [s.step for s in outcome.steps] == [1, 2, 3, *range(1, STEPS + 1)]


def test_one_that_gets_further_may_die_again(tmp_path: Path) -> None:
    outcome = simulated(tmp_path, kill_at(1, 3, 4, 5, 6), every=1)
    assert_whole(outcome)
    assert sum(isinstance(event, RolledBack) for event in outcome.events) == 5


def test_one_that_gets_no_further_ends_the_run(tmp_path: Path) -> None:
    async def again_and_again(simulation: SimulatedRun) -> None:
        while True:
            await simulation.clock.sleep(0.05)
            if any(isinstance(event, StepFinished) and event.step >= 3 for event in simulation.run_status.heard):
                await simulation.workers.alive["actor-rank-0"].kill()

    with pytest.raises(ExceptionGroup) as caught:
        simulated(tmp_path, again_and_again)
    assert [type(error) for error in caught.value.exceptions] == [WorkerDied]


def test_a_checkpoint_that_was_asked_for_is_made_after_the_step_and_only_once(tmp_path: Path) -> None:
    async def ask(simulation: SimulatedRun) -> None:
        while not any(isinstance(event, StepFinished) and event.step == 3 for event in simulation.run_status.heard):
            await simulation.clock.sleep(0.01)
        await simulation.run_status.command("actor", "checkpoint")

    outcome = simulated(tmp_path, ask, every=0)
    asked, last = [event.step for event in outcome.events if isinstance(event, CheckpointSaved)]
    assert 3 <= asked <= 5 and last == STEPS
    assert_whole(outcome)


def test_a_damaged_checkpoint_is_not_restored_and_a_resume_goes_on_before_it(tmp_path: Path) -> None:
    """Rows of the steps up to it are freed, so only a resume can go back further."""

    async def damage(simulation: SimulatedRun) -> None:
        while not (saved := tmp_path / "checkpoints/step-000004/trainer/step").exists():
            await simulation.clock.sleep(0.01)
        saved.write_text("5")
        await kill_at(5)(simulation)

    with pytest.raises(ExceptionGroup) as caught:
        simulated(tmp_path, damage)
    (error,) = caught.value.exceptions
    assert isinstance(error, DamagedCheckpoint)
    assert "trainer/step: its checksum is not" in str(error) and "`relax resume" in str(error)
    assert choose(tmp_path).resume.step == 2
