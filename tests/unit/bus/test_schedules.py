# SPDX-License-Identifier: Apache-2.0
"""Long random schedules of the real queue lose nothing and keep the bound: by hypothesis, and longer ones from seeds."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings

from tests.unit.bus.schedule import DAMAGES, ENGINES, LEASE_S, Schedule

SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}
TestSchedules = Schedule.TestCase
TestSchedules.settings = settings(max_examples=25, stateful_step_count=30, **SETTINGS)

ACTIONS = {
    "admit": 6, "load": 3, "publish": 2, "generate": 8, "abort": 1, "rollout_dies": 0.3, "report": 1, "credit": 5,
    "claim": 5, "release": 0.3, "time_passes": 0.3, "train": 4, "checkpoint": 0.5, "trainer_dies": 0.3,
    "machine_dies": 0.2, "smooth": 0.5, "sample": 8, "leave_engine": 1,
    "end_awaited": 0.3, "ledger_is_lost": 0.2, "hear": 1, "engine_dies": 0.3,
}  # fmt: skip


def run_long(seed: int, actions: int) -> Schedule:
    """One long schedule from a seed; what must always hold is checked after every action."""
    draw = random.Random(seed)
    run = Schedule()
    late = draw.choice(["wait", "wait", "drop", "regenerate", "mask"])
    run.begin(
        draw.randint(0, 3), draw.randint(1, 3), late, draw.choice([0, 0, 1]), draw.randint(1, 2), draw.random() < 0.5
    )
    try:
        for name in draw.choices(list(ACTIONS), list(ACTIONS.values()), k=actions):
            getattr(run, name)(**_arguments(name, draw))
            run.nothing_is_lost()
            run.each_sample_is_trained_once()
            run.all_in_flight_still_fits()
            run.nothing_grows()
    finally:
        run.teardown()
    return run


def _arguments(name: str, draw: random.Random) -> dict[str, object]:
    return {
        "admit": lambda: {"limit": draw.randint(1, 4)},
        "load": lambda: {"engine": draw.randrange(ENGINES)},
        "generate": lambda: {"many": draw.randint(1, 9), "which": draw, "sick": draw.randrange(8)},
        "sample": lambda: {"many": draw.randint(1, 9), "which": draw},
        "leave_engine": lambda: {"engine": draw.randrange(ENGINES)},
        "engine_dies": lambda: {"engine": draw.randrange(ENGINES)},
        "abort": lambda: {"which": draw, "regenerate": draw.random() < 0.5},
        "rollout_dies": lambda: {"sure": 0},
        "credit": lambda: {"many": draw.randint(1, 4), "dies": draw.random() < 0.1},
        "claim": lambda: {"many": draw.randint(1, 3), "overdue": draw.random() < 0.1},
        "time_passes": lambda: {"seconds": draw.choice([1.0, LEASE_S])},
        "train": lambda: {"short": draw.random() < 0.1},
        "checkpoint": lambda: {"whole": draw.random() < 0.8},
        "ledger_is_lost": lambda: {"damage": draw.choice(DAMAGES), "back": draw.randrange(2)},
        "machine_dies": lambda: {"replays": draw.random() < 0.5, "written": draw.random() < 0.7, "sure": 0},
        "smooth": lambda: {"slow": draw.randint(0, ENGINES), "turns": draw.randint(1, 4)},
    }.get(name, dict)()


def test_long_schedules_reach_many_steps_and_lose_nothing():
    runs = [run_long(seed, 400) for seed in range(12)]
    assert sum(len(run.lineage) for run in runs) > 30, "the schedules must really train"
    mixed = [told for run in runs for told in run.tokens.values() if len({sampled for sampled, _ in told}) > 1]
    assert len(mixed) > 12, "samples must really mix versions"


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_very_long_schedules_lose_nothing(seed):
    run_long(seed, 4000)
