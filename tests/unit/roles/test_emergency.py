# SPDX-License-Identifier: Apache-2.0
"""Where the bus dies under an actor whose ranks are well, what they have is saved, and the next start goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.api.errors import WorkerDied
from relax_core.bus.ledger_file import FILE, find_fault
from relax_core.roles.checkpoint import choose, complete
from relax_core.roles.emergency_checkpoint import take_up_emergency
from tests.unit.roles.simulated_run import SimulatedRun

DEATH = "the hub died"


def broken_off(folder: Path, method: str, step: int, after: bool = False, **settings: Any) -> None:
    """A run whose bus dies with a call of the actor at a step, before the call has an effect or after it."""
    simulation = SimulatedRun(folder, steps=8, checkpoint={"every": 2}, **settings)

    async def dies(run: SimulatedRun) -> None:
        call = getattr(run.bus, method)

        async def dying(first: Any, *args: Any) -> Any:
            ours = getattr(first, "task", "actor") == "actor"
            dead = ours and (await run.bus.version()).step >= step
            if dead and not after:
                raise WorkerDied(DEATH)
            answer = await call(first, *args)
            if dead:
                raise WorkerDied(DEATH)
            return answer

        setattr(run.bus, method, dying)

    with pytest.raises(ExceptionGroup, match="unhandled") as raised:
        simulation.run(dies)
    assert raised.group_contains(WorkerDied, match=DEATH)


def saved(folder: Path) -> int:
    return int(complete(folder / "checkpoints")[-1].name.removeprefix("step-"))


@pytest.mark.parametrize("mode", ["colocate", "hybrid", "async"])
def test_a_run_whose_bus_dies_goes_on_from_the_step_that_it_had_reached(tmp_path: Path, mode: str) -> None:
    broken_off(tmp_path, "claim", 5, placement=mode)
    assert saved(tmp_path) == 4
    assert "saved step 5" in take_up_emergency(tmp_path, 0, recorded=5)
    point = choose(tmp_path)
    assert point.resume.step == 5 and not point.notices
    for ledger in (tmp_path / FILE, Path(point.resume.directory) / FILE):
        assert find_fault(ledger, 5, 0) == ""
    assert take_up_emergency(tmp_path, 0, recorded=5) == "", "it is taken up once"


@pytest.mark.parametrize(
    ("method", "after", "recorded", "reason"),
    [
        ("claim", False, 4, "its metrics are not written down"),
        ("trained", False, 6, "its step was never committed"),
        ("verify", False, 6, "it is the checkpoint's own step"),
    ],
)
def test_what_a_run_can_not_answer_for_is_not_taken_up(
    tmp_path: Path, method: str, after: bool, recorded: int, reason: str
) -> None:
    broken_off(tmp_path, method, 4 if method == "verify" else 5, after)
    assert take_up_emergency(tmp_path, 0, recorded) == "", reason
    assert saved(tmp_path) == 4


def test_a_commit_without_an_answer_counts(tmp_path: Path) -> None:
    broken_off(tmp_path, "trained", 4, after=True)
    assert "saved step 5" in take_up_emergency(tmp_path, 0, recorded=5)
    assert saved(tmp_path) == 5


def test_nothing_is_saved_where_nothing_restarts(tmp_path: Path) -> None:
    broken_off(tmp_path, "claim", 5, recovery={"restarts": 0})
    assert take_up_emergency(tmp_path, 0, recorded=5) == ""
