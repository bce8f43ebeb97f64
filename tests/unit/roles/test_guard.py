# SPDX-License-Identifier: Apache-2.0
"""An update that is NaN is skipped, undone with what came before it, or the end: as the configuration says, and told."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.api.errors import RelaxError
from relax_core.api.events import Logged, RolledBack
from tests.unit.roles.simulated_run import RunOutcome, SimulatedRun

STEPS = 6


def simulated(folder: Path, rule: str, *steps: int) -> RunOutcome:
    trainer = {"name": "scripted-trainer", "not_finite": list(steps)}
    optimizer = {"lr": 0.1, "not_finite": rule}
    return SimulatedRun(folder, steps=STEPS, trainer=trainer, optimizer=optimizer, checkpoint={"every": 2}).run()


def skipped(outcome: RunOutcome) -> list[int]:
    return [step.step for step in outcome.steps if step.metrics["train/skipped_updates"]]


def told(outcome: RunOutcome) -> list[int]:
    return [event.fields["step"] for event in outcome.told(Logged) if "NaN" in event.message]


def test_a_bad_update_is_skipped_counted_and_reported(tmp_path: Path) -> None:
    outcome = simulated(tmp_path, "skip", 2, 4)
    assert skipped(outcome) == told(outcome) == [2, 4]
    assert outcome.account.balanced and outcome.steps[-1].step == STEPS


def test_the_trainer_goes_back_once_and_then_skips_it(tmp_path: Path) -> None:
    outcome = simulated(tmp_path, "roll-back", 4)
    (back,) = outcome.told(RolledBack)
    assert (back.version.step, back.version.incarnation) == (2, 1) and "step 4" in back.reason
    assert [step.step for step in outcome.steps] == [1, 2, 3, 3, 4, 5, 6]
    assert skipped(outcome) == told(outcome) == [4]
    assert outcome.account.balanced and outcome.account.trained == STEPS * 16


def test_a_bad_update_stops_the_run_if_configured(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        simulated(tmp_path, "stop", 3)
    (error,) = [error for error in caught.value.exceptions if isinstance(error, RelaxError)]
    assert "step 3" in str(error) and "optimizer.not_finite is stop" in str(error)


def test_repeated_bad_updates_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        simulated(tmp_path, "skip", *range(1, 7))
    assert "as did the 5 updates before it" in str(caught.value.exceptions[0])
