# SPDX-License-Identifier: Apache-2.0
"""Whole plays on shared devices: nobody works there at the same time as another, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.events import RoleRecovered
from tests.unit.roles.theatre import Performance, Span, Theatre

STEPS = 6
SAMPLES = STEPS * 4 * 4
CPU = {"mode": "colocate"}
GPU = {**CPU, "rollout": {"gpus_per_engine": 1}, "actor": {"gpus_per_rank": 1}, "reference": {"gpus_per_rank": 1}}
"""There also weights sleep: engines load them, and start anew, under their own leases only."""
REFERENCE = {"algorithm": {"name": "grpo", "kl_coef": 0.1}}


def theatre(folder: Path, **settings: Any) -> Theatre:
    return Theatre(folder, steps=STEPS, **settings)


def together(one: list[Span], other: list[Span]) -> list[tuple[Span, Span]]:
    return [(a, b) for a in one for b in other if a.overlaps(b)]


def training(played: Performance) -> list[Span]:
    return [*played.of("actor-rank", "accumulate"), *played.of("actor-rank", "publish")]


@pytest.mark.parametrize("placement", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_colocated_roles_never_work_at_the_same_time(tmp_path: Path, staleness: int, placement: Any) -> None:
    played = theatre(tmp_path, placement=placement, max_staleness=staleness, **REFERENCE).play(at_most_s=1e3)
    assert played.account.trained == SAMPLES and played.account.balanced
    assert max(played.metric("lag/max")) <= staleness
    generating, reference = played.of("engine", "generate"), played.of("reference-rank", "forward")
    assert together(generating, training(played)) == []
    assert together(generating, reference) == together(reference, training(played)) == []
    assert all("memory/freed_bytes" in step.metrics for step in played.steps)


def test_partial_rollouts_are_carried_over_a_lease_of_the_trainer(tmp_path: Path) -> None:
    longest = {"engine": {"name": "puppet-engine", "longest": 64}, "rollout": {"max_new_tokens": 64}}
    played = theatre(tmp_path, placement="colocate", max_staleness=1, **longest).play(at_most_s=1e3)
    assert played.account.trained == SAMPLES and not played.account.dropped
    assert 1 in played.metric("lag/max")


@pytest.mark.parametrize(
    ("placement", "alone"),
    [("hybrid", False), ("async", True), ({"mode": "hybrid", "reference": {"share": "own"}}, True)],
)
def test_the_reference_waits_for_the_trainer_only_where_they_share(tmp_path: Path, placement: Any, alone: bool) -> None:
    played = theatre(tmp_path, placement=placement, **REFERENCE).play(at_most_s=1e3)
    assert played.account.trained == SAMPLES
    reference = played.of("reference-rank", "forward")
    assert reference and (alone or together(reference, training(played)) == [])
    assert together(played.of("engine", "generate"), training(played))
    assert ("memory/freed_bytes" in played.steps[0].metrics) is not alone


def test_an_evaluation_has_its_lease_too(tmp_path: Path) -> None:
    evaluated = {"eval": {"every": 1, "size": 4}}
    played = theatre(tmp_path, placement="colocate", max_staleness=1, **evaluated).play(at_most_s=1e3)
    assert played.account.trained == SAMPLES
    assert together(played.of("engine", "generate"), training(played)) == []


@pytest.mark.parametrize("placement", [CPU, GPU], ids=["cpu", "gpu"])
def test_an_engine_that_dies_under_its_lease_keeps_nobody_waiting(tmp_path: Path, placement: Any) -> None:
    async def kill(played: Theatre) -> None:
        while not any(span.method == "accumulate" for span in played.workers.spans):
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)
        await played.workers.alive["engine-0"].kill()

    two = {
        **placement,
        "rollout": {**placement.get("rollout", {}), "engines": 2},
        "actor": {**placement.get("actor", {}), "ranks": 2},
    }
    played = theatre(tmp_path, placement=two, max_staleness=1).play(kill, at_most_s=1e3)
    assert played.account.trained == SAMPLES
    assert any(isinstance(event, RoleRecovered) for event in played.events)


@pytest.mark.parametrize("wait_s", [0.05, 0.3, 1.1, 2.0])
def test_an_engine_that_hangs_in_or_between_leases_costs_seconds(tmp_path: Path, wait_s: float) -> None:
    """It is silent when it is to pause, to wake, to load weights or to generate."""

    async def hang(played: Theatre) -> None:
        while not any(span.method == "accumulate" for span in played.workers.spans):
            await asyncio.sleep(0.1)
        await asyncio.sleep(wait_s)
        played.workers.alive["engine-0"].hang()

    placement = {"mode": "colocate", "rollout": {"silence_s": 2.0}}
    plain = theatre(tmp_path / "plain", placement=placement, max_staleness=1).play(at_most_s=1e3)
    played = theatre(tmp_path / "hung", placement=placement, max_staleness=1).play(hang, at_most_s=1e3)
    assert played.account.trained == SAMPLES
    assert any(isinstance(event, RoleRecovered) for event in played.events)
    assert played.seconds < plain.seconds + 3 * 2.0, "silence, a question, a new one"


def test_an_actor_that_dies_under_its_lease_begins_again_in_another(tmp_path: Path) -> None:
    async def kill(played: Theatre) -> None:
        while not any(span.method == "begin_update" for span in played.workers.spans):
            await asyncio.sleep(0.1)
        await played.workers.alive["actor-rank-0"].kill()

    played = theatre(tmp_path, placement="colocate").play(kill, at_most_s=1000.0)
    assert played.account.trained == SAMPLES and played.account.balanced
    assert [event.role for event in played.events if isinstance(event, RoleRecovered)] == ["actor"]


def test_parts_sleep_and_wake_around_leases(tmp_path: Path) -> None:
    played = theatre(tmp_path, placement="colocate").play()
    asleep = played.of("actor-rank", "sleep")
    assert len(asleep) == len(played.of("actor-rank", "wake")) >= STEPS - 1
    assert len(played.of("engine", "sleep")) >= STEPS
    assert together(asleep, training(played)) == []
    assert [step.metrics["memory/freed_bytes"] for step in played.steps] == [7.0] * STEPS
    assert played.steps[-1].metrics["memory/trainer_freed_bytes"] == 5.0
