# SPDX-License-Identifier: Apache-2.0
"""Generations longer than a step continue under newer weights, within the bound, through deaths and pauses of engines.

The length of what is dropped is told.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from relax_core.api.bus import Sealed
from relax_core.api.errors import InfrastructureError
from relax_core.api.events import RoleFailed, SamplesScored
from tests.unit.roles.simulated_run import SAMPLES, SimulatedRun
from tests.unit.roles.test_schedule import stragglers

STEPS, K = 8, 2
KINDS = {"scripted-engine": False, "scripted-letting-engine": False, "scripted-keeping-engine": True}


def long(engine: str, **settings: Any) -> dict[str, Any]:
    """Return settings of two engines whose generations take up to several steps."""
    return {
        "steps": STEPS, "max_staleness": K, "engine": {"name": engine, "longest": 60},
        "placement": {"mode": "async", "rollout": {"engines": 2}},
        "rollout": {
            "groups_per_step": 4, "group_size": 4, "max_new_tokens": 80, "kv_across_versions": KINDS[engine], **settings
        },
    }  # fmt: skip


async def seals(simulation: SimulatedRun, seen: list[Sealed]) -> None:
    """Keep what is told of every sample."""
    queue = simulation.bus.queue
    put = queue.put

    def telling(key: Any, ids: Any, columns: Any, size: Any, sealed: Any) -> None:
        seen.extend(sealed)
        put(key, ids, columns, size, sealed)

    queue.put = telling
    await asyncio.Future()


def spread(seen: list[Sealed]) -> int:
    """Count the samples whose tokens are of more than one version."""
    return sum(max(seal.newest.values(), default=0) > seal.floor for seal in seen)


@pytest.mark.parametrize("engine", KINDS)
def test_samples_longer_than_a_step_mix_versions_within_the_bound(tmp_path: Path, engine: str) -> None:
    seen: list[Sealed] = []
    simulation = SimulatedRun(tmp_path, **long(engine))
    outcome = simulation.run(lambda t: seals(t, seen))
    outcome.assert_whole(STEPS, K)
    assert not any(outcome.metric("samples/dropped"))
    assert spread(seen) > STEPS
    told = simulation.bus.queue.statistics()
    assert sum(told["lag_histogram"].values()) == STEPS * SAMPLES
    assert max(told["lag_histogram"]) == K


@pytest.mark.parametrize("engine", KINDS)
def test_deaths_and_pauses_with_partial_samples_lose_nothing(tmp_path: Path, engine: str) -> None:
    random = Random(1)

    async def deaths(simulation: SimulatedRun) -> None:
        while True:
            await asyncio.sleep(random.uniform(2.0, 12.0))
            await simulation.workers.alive[f"engine-{random.randrange(2)}"].kill()

    async def pauses(simulation: SimulatedRun) -> None:
        while True:
            await asyncio.sleep(random.uniform(1.0, 6.0))
            pool = simulation.roles["rollout"]._worker.pool
            await pool.supervisor.pause()
            await asyncio.sleep(random.uniform(0.0, 3.0))  # a publish may land meanwhile
            await pool.supervisor.resume()

    seen: list[Sealed] = []
    outcome = SimulatedRun(tmp_path, **long(engine)).run(deaths, pauses, lambda t: seals(t, seen))
    outcome.assert_whole(STEPS, K)
    assert not any(outcome.metric("samples/dropped"))
    assert spread(seen) > 0
    assert outcome.recovered and not any(event.fatal for event in outcome.told(RoleFailed))


def test_a_rollout_that_is_restarted_begins_what_it_carried_again(tmp_path: Path) -> None:
    async def strike(simulation: SimulatedRun) -> None:
        await asyncio.sleep(12.0)
        simulation.roles["rollout"]._failed.set_exception(InfrastructureError("struck"))

    outcome = SimulatedRun(tmp_path, **long("scripted-engine")).run(strike)
    outcome.assert_whole(STEPS, K)
    assert set(outcome.account.dropped) == {"regenerated"}


@pytest.mark.parametrize(("rule", "reason"), [("wait", "deadline"), ("drop", "stale"), ("regenerate", "regenerated")])
def test_the_lengths_of_samples_dropped_during_generation_are_reported(tmp_path: Path, rule: str, reason: str) -> None:
    simulation = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1, **stragglers(rule))
    outcome = simulation.run()
    assert all(count % 4 == 0 for count in outcome.account.dropped.values()), "whole groups"
    lengths = simulation.bus.queue.statistics()["dropped_lengths"][reason]
    assert sum(lengths.values()) == outcome.account.dropped[reason]
    assert lengths.get(-1, 0) <= 8, "but for what the end of the run left no time to tell"
    assert max(lengths) >= 32 > min(length for length in lengths if length > 0), "the long were dropped with the short"


def test_a_slow_verdict_holds_back_only_its_own_group(tmp_path: Path) -> None:
    slow = {"rewards": ["scripted-slow-reward"], "max_staleness": "unbounded", "algorithm": {"name": "grpo"}}
    outcome = SimulatedRun(tmp_path, steps=STEPS, **slow).run()
    assert outcome.account.balanced
    scored = [record["group_id"] for event in outcome.told(SamplesScored) for record in event.samples]
    assert scored != sorted(scored), "groups of a later start came first"
    plain = SimulatedRun(tmp_path / "plain", steps=STEPS, max_staleness="unbounded").run()
    assert outcome.seconds < plain.seconds + 15.0, "verdicts are awaited beside each other"
