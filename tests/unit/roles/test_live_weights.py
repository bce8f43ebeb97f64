# SPDX-License-Identifier: Apache-2.0
"""Live weights under virtual time: the actor waits for rows, engines for weights, and neither for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from relax_core.api.events import RoleFailed, WeightsPublished
from relax_core.roles.publisher import GATHER_S
from tests.unit.roles.simulated_run import SCRIPTED, SimulatedRun, catalogue

STEPS = 8
LIVE: dict[str, Any] = {
    "steps": STEPS, "weights": "scripted-live-transport", "trainer": "scripted-live-trainer", "engine": "scripted-live-engine",
}  # fmt: skip
TWO = {"mode": "hybrid", "rollout": {"engines": 2}}


def waiting_engines() -> dict[Any, list[asyncio.Future[None]]]:
    """Return the engines that wait for a transfer, by version.

    A catalogue with one more file imports the scripted components again, so a reference that a test keeps becomes stale.
    """
    trainer = catalogue(str(SCRIPTED)).target("trainer", "scripted-live-trainer")
    return trainer.transfer.__globals__["MEETING"]  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _forget_engines_of_earlier_runs() -> None:
    waiting_engines().clear()


async def hang_engine_1(simulation: SimulatedRun) -> None:
    """Let an engine hang when the first update has ended, before its weights are sent."""
    await simulation.until_call("finish_update")
    simulation.workers.alive["engine-1"].hang()


@pytest.mark.parametrize(("placement", "staleness"), [("hybrid", 0), ("colocate", 2), (TWO, 2)])
def test_every_engine_has_every_version_from_the_trainers_memory(
    tmp_path: Path, placement: Any, staleness: int
) -> None:
    outcome = SimulatedRun(tmp_path, **LIVE, placement=placement, max_staleness=staleness).run()
    outcome.assert_whole(STEPS, staleness)
    assert [event.version.step for event in outcome.told(WeightsPublished)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(("seed", "staleness"), [(0, 0), (1, 0), (1, 1)])
def test_engines_that_die_at_any_time_are_served_while_the_actor_waits_for_rows(
    tmp_path: Path, seed: int, staleness: int
) -> None:
    """Also the only one: then the actor waits for its rows, and it for the actor's weights."""
    random, engines = Random(seed), 1 + seed % 2

    async def deaths(simulation: SimulatedRun) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.0, 9.0))
            await simulation.workers.alive[f"engine-{random.randrange(engines)}"].kill()

    placement = {"mode": "hybrid", "rollout": {"engines": engines}}
    outcome = SimulatedRun(tmp_path, **LIVE, placement=placement, max_staleness=staleness).run(deaths, at_most_s=2e3)
    outcome.assert_whole(STEPS, staleness)
    assert outcome.recovered and not any(event.fatal for event in outcome.told(RoleFailed))


def test_an_engine_that_dies_while_the_weights_come_is_replaced_and_served_alone(tmp_path: Path) -> None:
    outcome = SimulatedRun(tmp_path, **LIVE, placement=TWO, max_staleness=1).run(_kill_in_update, at_most_s=2e3)
    outcome.assert_whole(STEPS, 1)
    assert outcome.told(RoleFailed)


def test_a_receiver_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    two = {"mode": "hybrid", "rollout": {"engines": 2, "silence_s": 6.0}}
    run = SimulatedRun(tmp_path, **LIVE | {"steps": 12}, placement=two, max_staleness=2)
    outcome = run.run(hang_engine_1, at_most_s=2e3)
    outcome.assert_whole(12, 2)
    assert outcome.recovered
    back = [span.end for span in outcome.of("engine-1", "start")][-1]
    handed = [span for span in outcome.of("actor-rank", "transfer") if span.start < back]
    assert [span.end - span.start > GATHER_S for span in handed].count(True) == 1
    assert handed[-1].end - handed[-1].start < GATHER_S and len(handed) > 3
    late = [span for span in outcome.of("actor-rank", "transfer") if span.start > back]
    assert all(span.end - span.start < GATHER_S for span in late)


@pytest.mark.parametrize("silence_s", [6.0, 600.0])
def test_a_run_ends_though_an_engine_has_no_last_weights(tmp_path: Path, silence_s: float) -> None:
    """The actor has ended when the replacement of the hung engine asks for weights, or while the engine still hangs."""
    two = {"mode": "hybrid", "rollout": {"engines": 2, "silence_s": silence_s}}
    outcome = SimulatedRun(tmp_path, **LIVE, placement=two, max_staleness=2).run(hang_engine_1, at_most_s=60.0)
    outcome.assert_whole(STEPS, 2)


async def _kill_in_update(simulation: SimulatedRun) -> None:
    meeting = waiting_engines()
    for _ in range(3):
        while not any(meeting.values()):
            await asyncio.sleep(0.01)
        await simulation.workers.alive["engine-1"].kill()
        await asyncio.sleep(5.0)


def test_a_forward_role_of_its_own_takes_live_weights_too(tmp_path: Path) -> None:
    several = {
        "placement": "async",
        "batch": {"updates_per_step": 2},
        "algorithm": {"name": "grpo", "correction": "truncate"},
    }
    outcome = SimulatedRun(tmp_path, **LIVE, max_staleness=1, **several).run(at_most_s=2e3)
    outcome.assert_whole(STEPS, 1)
    assert len(outcome.of("actor-fwd", "load_published")) >= STEPS // 3
