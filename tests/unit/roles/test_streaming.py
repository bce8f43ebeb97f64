# SPDX-License-Identifier: Apache-2.0
"""The actor trains on groups while others of the step are generated: the same step, sooner, however leases and stops fall."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.bus import Claim
from relax_core.api.errors import InfrastructureError, StaleFence
from relax_core.api.events import WorkRetried
from relax_core.api.run_commands import Stop
from relax_core.bus.leases import RowLease
from relax_core.roles import row_leases
from tests.unit.roles.simulated_run import SAMPLES, RunOutcome, SimulatedRun

STEPS = 6
SAME = (
    "train/loss", "tokens/trained", "length/mean", "length/max", "reward/mean", "reward/std", "lag/max", "samples/trained",
)  # fmt: skip
HALF = {"name": "scripted-engine", "straggler": 40}
"""A group often finishes long before another."""


def simulation(folder: Path, stream: bool = True, **settings: Any) -> SimulatedRun:
    rollout = {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 64}
    return SimulatedRun(folder, **{
        "steps": STEPS, "max_staleness": 0, "engine": HALF, "rollout": rollout, "batch": {"stream": stream}, **settings,
    })  # fmt: skip


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> RunOutcome:
    return simulation(tmp_path_factory.mktemp("streamed")).run()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunOutcome:
    return simulation(tmp_path_factory.mktemp("whole"), stream=False).run()


def waiting(outcome: SimulatedRun) -> RowLease | None:
    """The first lease of a step that still lacks groups."""
    leases = [lease for lease in outcome.bus.queue.leases.out.values() if lease.trains]
    claimed = sum(len(lease.groups) for lease in leases)
    return leases[0] if 0 < claimed < 4 else None


def chunks(outcome: RunOutcome) -> int:
    return len(outcome.of("actor-rank", "accumulate"))


def updates(outcome: RunOutcome) -> int:
    return len(outcome.of("actor-rank", "finish_update"))


def trains_while_engines_generate(outcome: RunOutcome) -> bool:
    generating = outcome.of("engine", "generate")
    return any(one.overlaps(other) for one in outcome.of("actor-rank", "accumulate") for other in generating)


def test_a_streamed_step_is_the_whole_one_sooner(streamed: RunOutcome, whole: RunOutcome) -> None:
    """Samples depend on their seeds alone, so both runs train on the same rows."""
    assert trains_while_engines_generate(streamed) and not trains_while_engines_generate(whole)
    for name in SAME:
        assert streamed.metric(name) == pytest.approx(whole.metric(name), abs=1e-6), name
    assert (chunks(whole), updates(whole), updates(streamed)) == (STEPS, STEPS, STEPS)
    assert chunks(streamed) > 1.5 * STEPS
    assert streamed.seconds < whole.seconds
    streamed.assert_whole(STEPS, 0)


def test_phases_of_a_streamed_step_add_up_to_it(streamed: RunOutcome) -> None:
    for step in streamed.steps:
        row = step.metrics
        assert row["time/step_s"] == pytest.approx(
            row["time/wait_rows_s"] + row["time/train_s"] + row["time/publish_s"]
        )
    trained = sum(span.end - span.start for span in streamed.of("actor-rank", "accumulate"))
    assert sum(streamed.metric("time/train_s")) == pytest.approx(trained, abs=0.1 * STEPS)


def test_credit_and_reference_do_not_wait_for_the_whole_step_either(tmp_path: Path) -> None:
    """The reference works on the first groups before the last one is generated, or the actor could not."""
    outcome = simulation(tmp_path, algorithm={"name": "grpo", "kl_coef": 0.1}, placement="async").run()
    assert len(outcome.of("reference", "forward")) > STEPS
    assert chunks(outcome) > 1.5 * STEPS


def test_the_bound_holds_however_early_a_group_is_claimed(tmp_path: Path) -> None:
    simulation(tmp_path, max_staleness=2).run().assert_whole(STEPS, 2)


def test_a_lease_lost_between_chunks_costs_work_and_trains_nothing_twice(tmp_path: Path, whole: RunOutcome) -> None:
    lost: list[int] = []

    async def expiry(outcome: SimulatedRun) -> None:
        while len(lost) < 2:
            await asyncio.sleep(0.5)
            if (lease := waiting(outcome)) is not None and lease.number not in lost:
                lease.expires = 0.0
                lost.append(lease.number)
                await asyncio.sleep(9.0)

    harmed = simulation(tmp_path).run(expiry)
    assert len(harmed.of("actor-rank", "abort_update")) == len(lost) == 2
    retries = [(retry.role, retry.what, retry.count) for retry in harmed.told(WorkRetried)]
    assert retries == [("actor", "steps", 1)] * 2
    assert updates(harmed) == STEPS
    harmed.assert_whole(STEPS, 0)
    assert harmed.metric("train/loss") == pytest.approx(whole.metric("train/loss"), abs=1e-6)


def test_a_lease_that_is_lost_again_and_again_ends_the_run(tmp_path: Path) -> None:
    async def expiry(outcome: SimulatedRun) -> None:
        while True:
            await asyncio.sleep(0.1)
            for lease in outcome.bus.queue.leases.out.values():
                if lease.trains:
                    lease.expires = 0.0

    with pytest.raises(BaseExceptionGroup) as failed:
        simulation(tmp_path).run(expiry, at_most_s=1e4)
    assert failed.group_contains(StaleFence)


def test_a_lease_that_cannot_be_renewed_is_an_error(tmp_path: Path) -> None:
    """The step was trained all the same, but a bus that answers so is not to be trusted."""

    async def silence(outcome: SimulatedRun) -> None:
        verify = outcome.bus.verify

        async def broken(claim: Claim) -> None:
            if waiting(outcome) is not None:
                raise InfrastructureError("no answer")
            await verify(claim)

        outcome.bus.verify = broken  # type: ignore[method-assign]

    slow = {**HALF, "token_s": 10.0}
    with pytest.raises(BaseExceptionGroup) as failed:
        simulation(tmp_path, engine=slow).run(silence)
    assert failed.group_contains(InfrastructureError, match="no answer")


def test_a_stop_between_chunks_gives_the_rows_back(tmp_path: Path) -> None:
    told = []

    async def stop(outcome: SimulatedRun) -> None:
        while not told:
            await asyncio.sleep(0.5)
            if outcome.bus.queue.version.step > 2 and waiting(outcome) is not None:
                told.append(outcome.bus.queue.version.step)
                for role in ("actor", "advantages", "rollout"):
                    await outcome.run_status.command(role, Stop())

    outcome = simulation(tmp_path).run(stop)
    assert [step.step for step in outcome.steps] == list(range(1, told[0] + 1)) and 0 < told[0] < STEPS
    assert outcome.of("actor-rank", "abort_update")
    assert len(outcome.of("actor-rank", "begin_update")) == updates(outcome) + 1 == told[0] + 1
    assert outcome.account.trained == told[0] * SAMPLES and outcome.account.balanced


def test_leases_last_as_long_as_groups_are_waited_for_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first group of a step waits longer than a lease for the last one, and training takes longer than a lease."""
    lease_s = 10.0
    monkeypatch.setattr(row_leases, "RENEW_S", lease_s / 10)
    slow = {"engine": {"name": "scripted-engine", "token_s": 1.0, "longest": 60}, "max_staleness": 1,
            "trainer": {"name": "scripted-trainer", "train_s": 30.0}, "steps": 2}  # fmt: skip
    run = simulation(tmp_path, **slow)
    run.bus_settings = replace(run.bus_settings, lease_s=lease_s)
    outcome = run.run(at_most_s=1e4)
    assert max(outcome.metric("time/wait_rows_s")) > lease_s and max(outcome.metric("time/train_s")) > lease_s
    assert not outcome.of("actor-rank", "abort_update")
    outcome.assert_whole(2, 1)


def test_past_its_deadline_a_streamed_step_closes_with_what_it_has(tmp_path: Path) -> None:
    rollout = {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 400, "step_timeout_s": 4.0}
    engine = {"name": "scripted-engine", "straggler": 200}
    outcome = simulation(tmp_path, rollout=rollout, engine=engine).run()
    assert outcome.seconds < STEPS * 7.0
    assert updates(outcome) == STEPS and chunks(outcome) > STEPS
    assert outcome.account.trained < STEPS * SAMPLES and outcome.account.dropped.keys() == {"deadline"}
    assert outcome.account.balanced


def test_chunks_are_no_smaller_than_a_fraction_of_the_step(tmp_path: Path) -> None:
    """Sixteen groups a step: each call of the trainer but the last brings two or more."""
    rollout = {"groups_per_step": 16, "group_size": 4, "max_new_tokens": 64}
    outcome = simulation(tmp_path, rollout=rollout, steps=4).run()
    assert 4 < chunks(outcome) <= 4 * 8
