# SPDX-License-Identifier: Apache-2.0
"""Whole plays on shared devices: nobody works there at the same time as another, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unit.roles.simulated_run import Happening, RunOutcome, SimulatedRun, Span

STEPS = 4
CPU = {"mode": "colocate"}
GPU = {**CPU, "rollout": {"gpus_per_engine": 1}, "actor": {"gpus_per_rank": 1}, "reference": {"gpus_per_rank": 1}}
"""There also weights sleep: engines load them, and start anew, under their own leases only."""
REFERENCE = {"algorithm": {"name": "grpo", "kl_coef": 0.1}}


def simulation(folder: Path, **settings: Any) -> SimulatedRun:
    return SimulatedRun(folder, steps=STEPS, **settings)


def together(one: list[Span], other: list[Span]) -> list[tuple[Span, Span]]:
    return [(a, b) for a in one for b in other if a.overlaps(b)]


def training(outcome: RunOutcome) -> list[Span]:
    return [*outcome.of("actor-rank", "accumulate"), *outcome.of("actor-rank", "publish")]


def harm_engine(how: str, after_s: float) -> Happening:
    """Kill or hang the engine some seconds after the first accumulation."""

    async def harm(simulation: SimulatedRun) -> None:
        await simulation.until_call("accumulate")
        await asyncio.sleep(after_s)
        engine = simulation.workers.alive["engine-0"]
        engine.hang() if how == "hang" else await engine.kill()

    return harm


@pytest.mark.parametrize(("placement", "staleness"), [(CPU, 2), (GPU, 0), (GPU, 1)], ids=["cpu-2", "gpu-0", "gpu-1"])
def test_colocated_roles_never_work_at_the_same_time(tmp_path: Path, placement: Any, staleness: int) -> None:
    outcome = simulation(tmp_path, placement=placement, max_staleness=staleness, **REFERENCE).run(at_most_s=1e3)
    outcome.assert_whole(STEPS, staleness)
    generating, reference = outcome.of("engine", "generate"), outcome.of("reference-rank", "forward")
    assert together(generating, training(outcome)) == []
    assert together(generating, reference) == together(reference, training(outcome)) == []
    assert all("memory/freed_bytes" in step.metrics for step in outcome.steps)


def test_partial_rollouts_are_carried_over_a_lease_of_the_trainer(tmp_path: Path) -> None:
    longest = {"engine": {"name": "scripted-engine", "longest": 64}, "rollout": {"max_new_tokens": 64}}
    outcome = simulation(tmp_path, placement="colocate", max_staleness=1, **longest).run(at_most_s=1e3)
    outcome.assert_whole(STEPS, 1)
    assert not outcome.account.dropped
    assert 1 in outcome.metric("lag/max")


@pytest.mark.parametrize(
    ("placement", "alone"),
    [("hybrid", False), ("async", True), ({"mode": "hybrid", "reference": {"share": "own"}}, True)],
)
def test_the_reference_waits_for_the_trainer_only_where_they_share(tmp_path: Path, placement: Any, alone: bool) -> None:
    outcome = simulation(tmp_path, placement=placement, **REFERENCE).run(at_most_s=1e3)
    outcome.assert_whole(STEPS, 1)
    reference = outcome.of("reference-rank", "forward")
    assert reference and (alone or together(reference, training(outcome)) == [])
    assert together(outcome.of("engine", "generate"), training(outcome))
    assert ("memory/freed_bytes" in outcome.steps[0].metrics) is not alone


def test_an_evaluation_has_its_lease_too(tmp_path: Path) -> None:
    evaluated = {"eval": {"every": 1, "size": 4}}
    outcome = simulation(tmp_path, placement="colocate", max_staleness=1, **evaluated).run(at_most_s=1e3)
    outcome.assert_whole(STEPS, 1)
    assert together(outcome.of("engine", "generate"), training(outcome)) == []


def test_an_engine_that_dies_under_its_lease_keeps_no_role_waiting(tmp_path: Path) -> None:
    two = {**GPU, "rollout": {"gpus_per_engine": 1, "engines": 2}, "actor": {"gpus_per_rank": 1, "ranks": 2}}
    outcome = simulation(tmp_path, placement=two, max_staleness=1).run(harm_engine("kill", 2.0), at_most_s=1e3)
    outcome.assert_whole(STEPS, 1)
    assert outcome.recovered


@pytest.fixture(scope="module")
def undisturbed_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Virtual seconds of a run without faults."""
    return simulation(tmp_path_factory.mktemp("plain"), placement="colocate", max_staleness=1).run().seconds


@pytest.mark.parametrize("after_s", [0.05, 0.3, 1.1, 2.0])
def test_an_engine_that_hangs_in_or_between_leases_costs_seconds(
    tmp_path: Path, undisturbed_s: float, after_s: float
) -> None:
    """The engine is silent when it is to pause, to wake, to load weights or to generate."""
    placement = {"mode": "colocate", "rollout": {"silence_s": 2.0}}
    run = simulation(tmp_path, placement=placement, max_staleness=1)
    outcome = run.run(harm_engine("hang", after_s), at_most_s=1e3)
    outcome.assert_whole(STEPS, 1)
    assert outcome.recovered
    assert outcome.seconds < undisturbed_s + 3 * 2.0, "silence, a question, a new engine"


def test_parts_sleep_and_wake_around_leases(tmp_path: Path) -> None:
    outcome = simulation(tmp_path, placement="colocate").run()
    offloads = outcome.of("actor-rank", "offload")
    assert len(offloads) == len(outcome.of("actor-rank", "onload")) >= STEPS - 1
    assert len(outcome.of("engine", "offload")) >= STEPS
    assert together(offloads, training(outcome)) == []
    assert [step.metrics["memory/freed_bytes"] for step in outcome.steps] == [7.0] * STEPS
    assert outcome.steps[-1].metrics["memory/trainer_freed_bytes"] == 5.0
