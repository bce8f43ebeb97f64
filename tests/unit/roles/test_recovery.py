# SPDX-License-Identifier: Apache-2.0
"""A trainer that is lost starts again from its last checkpoint: only it, and every sample counts once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.batch import AttemptId, RowBatch
from relax_core.api.bus import Claim
from relax_core.api.errors import WorkerDied
from relax_core.api.events import CheckpointSaved, EvalFinished, RoleFailed, RoleRecovered, RolledBack, StepFinished
from relax_core.api.role import WorkerSpec
from relax_core.api.run_commands import SaveCheckpoint, Stop
from relax_core.api.weights import Version
from relax_core.roles.checkpoint import DamagedCheckpoint, choose
from tests.unit.roles.scripted_components import SAMPLED
from tests.unit.roles.simulated_run import SAMPLES, Happening, RunOutcome, SimulatedRun, SimulatedWorker

STEPS = 8
MODES = pytest.mark.parametrize("mode", ["colocate", "hybrid", "async"])


def kill_at(*steps: int) -> Happening:
    """The actor's rank, each time that a step is finished for the first time."""

    async def happening(simulation: SimulatedRun) -> None:
        for step in steps:
            await simulation.until_event(StepFinished, step)
            await simulation.workers.alive["actor-rank-0"].kill()

    return happening


def simulated(folder: Path, *happenings: Happening, every: int = 2, **settings: Any) -> RunOutcome:
    simulation = SimulatedRun(folder, steps=STEPS, checkpoint={"every": every}, **settings)
    return simulation.run(*happenings)


def assert_whole(outcome: RunOutcome) -> None:
    """As many samples count as trained as the steps have, and none is lost."""
    assert outcome.account.balanced and outcome.account.trained == STEPS * SAMPLES
    assert outcome.steps[-1].step == STEPS


def went_back(outcome: RunOutcome) -> RolledBack:
    """Return the only rollback of a run."""
    (back,) = outcome.told(RolledBack)
    return back


@MODES
def test_a_dead_trainer_continues_from_its_checkpoint(tmp_path: Path, mode: str) -> None:
    outcome = simulated(tmp_path, kill_at(5), placement=mode)
    assert_whole(outcome)
    back = went_back(outcome)
    assert (back.version.step, back.version.incarnation) == (4, 1)
    assert "actor-rank-0 was killed" in back.reason
    assert outcome.recovered == ["actor"]
    assert [failed.fatal for failed in outcome.told(RoleFailed)] == [False]
    assert [s.step for s in outcome.steps] == [1, 2, 3, 4, 5, 5, 6, 7, 8]


@pytest.mark.parametrize(("mode", "every", "restored"), [("colocate", 4, 4), ("async", 0, 0)])
def test_an_actor_whose_process_dies_continues_in_another_one(
    tmp_path: Path, mode: str, every: int, restored: int
) -> None:
    async def dies(simulation: SimulatedRun) -> None:
        await simulation.until_event(StepFinished, 5)
        await simulation.lose_role("actor")

    outcome = simulated(tmp_path, dies, every=every, placement=mode)
    assert_whole(outcome)
    back = went_back(outcome)
    assert (back.version.step, back.version.incarnation, back.reason) == (restored, 1, "the process of actor died")
    assert [(event.role, event.detail) for event in outcome.told(RoleRecovered)] == [("actor", "restarted")]
    assert [s.step for s in outcome.steps] == [1, 2, 3, 4, 5, *range(restored + 1, STEPS + 1)]


def test_a_trainer_without_a_checkpoint_starts_again_from_step_zero(tmp_path: Path) -> None:
    outcome = simulated(tmp_path, kill_at(3), every=0)
    assert_whole(outcome)
    assert [s.step for s in outcome.steps] == [1, 2, 3, *range(1, STEPS + 1)]


def test_progress_refills_the_restart_budget(tmp_path: Path) -> None:
    outcome = simulated(tmp_path, kill_at(1, 3, 4, 5, 6), every=1)
    assert_whole(outcome)
    assert len(outcome.told(RolledBack)) == 5


def test_restarts_without_progress_end_the_run(tmp_path: Path) -> None:
    async def again_and_again(simulation: SimulatedRun) -> None:
        await simulation.until_event(StepFinished, 3)
        while True:
            await simulation.clock.sleep(0.05)
            await simulation.workers.alive["actor-rank-0"].kill()

    with pytest.raises(ExceptionGroup) as caught:
        simulated(tmp_path, again_and_again)
    assert [type(error) for error in caught.value.exceptions] == [WorkerDied]


def before_each_rank_call(act: Callable[[SimulatedRun, SimulatedWorker, str], Awaitable[None]]) -> Happening:
    """Await `act` at the beginning of each call of the actor's ranks, whichever of its processes is asked."""

    async def happening(simulation: SimulatedRun) -> None:
        start = simulation.workers.start

        async def started(specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[SimulatedWorker, ...]:
            made = await start(specs, timeout_s)
            for worker in made:
                if worker.name.startswith("actor-rank"):
                    worker.call = partial(call, worker, worker.call)  # type: ignore[method-assign]
            return made

        async def call(worker: SimulatedWorker, called: Any, method: str, *args: Any, timeout_s: float) -> Any:
            await act(simulation, worker, method)
            return await called(method, *args, timeout_s=timeout_s)

        simulation.workers.start = started  # type: ignore[method-assign]

    return happening


def dies_in(*methods: str, after: int = 3) -> Happening:
    """The actor's rank, each time at the beginning of the next of these calls, from the end of a step on."""
    left = list(methods)

    async def act(simulation: SimulatedRun, worker: SimulatedWorker, method: str) -> None:
        heard = simulation.run_status.heard
        armed = any(isinstance(event, StepFinished) and event.step == after for event in heard)
        if armed and left and method == left[0]:
            left.pop(0)
            await worker.kill()

    return before_each_rank_call(act)


@pytest.mark.parametrize(
    "methods",
    [("accumulate", "load", "publish"), ("snapshot", "start"), ("saved",), ("export", "export")],
)
def test_a_trainer_that_dies_in_recovery_in_a_save_or_in_the_export_is_started_again(
    tmp_path: Path, methods: tuple[str, ...]
) -> None:
    outcome = simulated(tmp_path, dies_in(*methods))
    assert_whole(outcome)
    assert [failed.fatal for failed in outcome.told(RoleFailed)] == [False] * len(methods)
    assert outcome.recovered
    assert len(outcome.of("actor-rank", "export")) == 1 + methods.count("export")


def test_a_death_in_the_last_steps_save_ends_the_run_for_a_resume(tmp_path: Path) -> None:
    """Nobody prepares rows any more: an actor that went back would wait for them in vain."""
    with pytest.raises(ExceptionGroup) as caught:
        simulated(tmp_path, dies_in("snapshot", after=STEPS), every=3)
    (error,) = caught.value.exceptions
    assert "was killed during snapshot, then `relax resume" in str(error)
    assert choose(tmp_path).resume.step == 6


@pytest.mark.parametrize("method", ["start", "export"])
def test_repeated_deaths_in_the_same_save_end_the_run(tmp_path: Path, method: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        simulated(tmp_path, dies_in("export", *[method] * 10))
    (error,) = caught.value.exceptions
    assert isinstance(error, WorkerDied) and f"was killed during {method}" in str(error)


def test_a_trainer_that_dies_while_a_run_is_stopped_is_not_started_again(tmp_path: Path) -> None:
    """A start would spend the time of a stop on what the last checkpoint has already."""

    async def stop(simulation: SimulatedRun) -> None:
        await simulation.until_event(StepFinished, 5)
        await dies_in_present(simulation, "snapshot")
        for role in simulation.roles:
            await simulation.run_status.command(role, Stop())

    outcome = simulated(tmp_path, stop, every=4)
    assert outcome.steps[-1].step in (5, 6)
    assert [failed.fatal for failed in outcome.told(RoleFailed)] == [False]
    assert not outcome.recovered
    assert choose(tmp_path).resume.step == 4


async def dies_in_present(simulation: SimulatedRun, method: str) -> None:
    worker = simulation.workers.alive["actor-rank-0"]
    called = worker.call

    async def call(name: str, *args: Any, timeout_s: float) -> Any:
        if name == method:
            await worker.kill()
        return await called(name, *args, timeout_s=timeout_s)

    worker.call = call  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("finished", [7, 8])
def test_a_lease_that_is_lost_once_weights_have_changed_restores_those_of_the_last_checkpoint(
    tmp_path: Path, finished: int
) -> None:
    """Between the updates of step 4, and between its last update and its commit."""
    lost: list[int] = []

    async def expiry(simulation: SimulatedRun) -> None:
        def expire() -> None:
            done = [span for span in simulation.workers.spans if span.method == "finish_update"]
            if len(done) == finished and not lost:
                for lease in simulation.bus.queue.leases.out.values():
                    if lease.trains:
                        lease.expires = 0.0
                        lost.append(lease.number)

        bus, verify, trained = simulation.bus, simulation.bus.verify, simulation.bus.trained

        async def verified(claim: Claim) -> None:
            if finished == 7:
                expire()
            await verify(claim)

        async def committed(*args: Any) -> Version:
            expire()
            return await trained(*args)

        bus.verify, bus.trained = verified, committed  # type: ignore[method-assign,assignment]

    several: dict[str, Any] = {
        "batch": {"updates_per_step": 2},
        "algorithm": {"name": "grpo", "correction": "truncate"},
    }
    outcome = simulated(tmp_path, expiry, **several)
    assert lost
    assert_whole(outcome)
    back = went_back(outcome)
    assert (back.version.step, back.version.incarnation) == (2, 1) and "lease" in back.reason
    assert [step.step for step in outcome.steps] == [1, 2, 3, *range(3, STEPS + 1)]


def test_a_requested_checkpoint_is_made_once_after_the_step(tmp_path: Path) -> None:
    async def ask(simulation: SimulatedRun) -> None:
        await simulation.until_event(StepFinished, 3)
        await simulation.run_status.command("actor", SaveCheckpoint())

    outcome = simulated(tmp_path, ask, every=0)
    asked, last = [event.step for event in outcome.told(CheckpointSaved)]
    assert 3 <= asked <= 5 and last == STEPS
    assert_whole(outcome)


def test_a_damaged_checkpoint_is_not_restored_and_a_resume_continues_before_it(tmp_path: Path) -> None:
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
    assert "trainer/step has a different checksum" in str(error) and "`relax resume" in str(error)
    assert choose(tmp_path).resume.step == 2


def trained_tokens(told: dict[tuple[int, int], set[tuple[int, int]]]) -> Happening:
    """By (incarnation, step) that was reached: (incarnation, step) of the weights that really sampled the trained tokens."""

    async def happening(simulation: SimulatedRun) -> None:
        bus, rows = simulation.bus, dict[AttemptId, set[tuple[int, int]]]()
        put, train = bus.put, bus.queue.ledger.train

        async def telling(batch: RowBatch, sealed: Any, wait_s: float) -> bool:
            columns = (batch.columns[name].rows() for name in ("tokens", "loss_mask", "weight_versions"))
            for row, tokens, mask, versions in zip(batch.ids, *columns, strict=True):
                rows[row.attempt_id] = {
                    (SAMPLED.index(token), version)
                    for token, trained, version in zip(tokens.tolist(), mask.tolist(), versions.tolist(), strict=True)
                    if trained and token in SAMPLED
                }
            return await put(batch, sealed, wait_s)

        def trains(group: Any, step: int, without_gradient: Any) -> None:
            tokens = told.setdefault((bus.queue.version.incarnation, step), set())
            tokens.update(*(rows[attempt] for attempt in group.members))
            train(group, step, without_gradient)

        bus.put, bus.queue.ledger.train = telling, trains  # type: ignore[method-assign]

    return happening


@pytest.mark.parametrize(("engine", "longest"), [("scripted-letting-engine", 40), ("scripted-keeping-engine", 40)])
def test_an_engine_that_is_slow_to_load_after_a_rollback_gives_no_token_that_is_trained(
    tmp_path: Path, engine: str, longest: int
) -> None:
    told: dict[tuple[int, int], set[tuple[int, int]]] = {}
    outcome = simulated(
        tmp_path, trained_tokens(told), kill_at(5), max_staleness=1, engine={
            "name": engine, "longest": longest, "slow": "engine-1", "slow_s": 12.0
        }, placement={"mode": "async", "rollout": {"engines": 2}}, eval={"every": 5, "size": 2},
        rollout={"groups_per_step": 4, "group_size": 4, "max_new_tokens": 48,
                 "kv_across_versions": engine == "scripted-keeping-engine"},
    )  # fmt: skip
    assert_whole(outcome)
    back = went_back(outcome)
    assert (back.version.step, back.version.incarnation) == (4, 1)
    assert "engine" not in {failed.role for failed in outcome.told(RoleFailed)}
    after = {token for (incarnation, _), tokens in told.items() if incarnation == 1 for token in tokens}
    assert {step for incarnation, step in after if incarnation == 1} >= {5, 6}
    assert [token for token in after if token[0] == 0 and token[1] > 4] == [], "abandoned weights sampled them"
    slow = [span for span in outcome.of("engine-1", "update_weights") if span.end - span.start >= 12.0]
    assert len(slow) == 1
    after_it = outcome.events[outcome.events.index(back) :]
    evaluated = [event.step for event in after_it if isinstance(event, EvalFinished)]
    assert evaluated == [5, STEPS], "the weights of step 5 are others than before"
