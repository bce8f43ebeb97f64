# SPDX-License-Identifier: Apache-2.0
"""The critic beside the other roles in virtual time: same rows, same steps, killed, saved and restored."""

import asyncio
import errno
from pathlib import Path

import pytest

from relax_core.api.errors import DeadlineExceeded, DiskFull
from relax_core.api.events import CheckpointSaved, RoleFailed, StepMeasured
from relax_core.api.run_commands import Stop
from relax_core.runners import context
from tests.unit.roles.simulated_run import SAMPLES, Happening, SimulatedRun

MODES_AND_CHECKPOINTS = pytest.mark.parametrize(("mode", "every"), [("hybrid", 0), ("async", 3)])
"""Steps between checkpoints; 0: none."""


def learnt(outcome):
    """Rows that each step of the critic was trained on, by step, in the order they were told."""
    return [(event.step, event.metrics["critic/loss"]) for event in outcome.told(StepMeasured)]


def kill_at(step: int, worker: str) -> Happening:
    """Kill a worker when the critic has learnt from this step."""

    async def kill(simulation):
        await simulation.until_event(StepMeasured, step)
        await simulation.workers.alive[worker].kill()

    return kill


@pytest.fixture(scope="module", params=["colocate", "async"])
def trained(request, tmp_path_factory):
    """The placement mode, and the outcome of seven steps with a checkpoint every third one."""
    run = SimulatedRun(tmp_path_factory.mktemp("run"), algorithm="ppo", placement=request.param, steps=7,
                       checkpoint={"every": 3})  # fmt: skip
    return request.param, run.run()


def test_the_critic_learns_once_from_each_step_of_the_actor(trained):
    _, outcome = trained
    assert [step for step, _ in learnt(outcome)] == list(range(1, 8))
    assert {rows for _, rows in learnt(outcome)} == {16.0}
    outcome.assert_whole(7, 1)


def test_values_are_of_the_steps_start_where_nothing_is_stale(tmp_path):
    simulation = SimulatedRun(tmp_path, algorithm="ppo", placement="hybrid", max_staleness=0, steps=4)
    outcome = simulation.run()
    told = [event.metrics["critic/value_mean"] for event in outcome.told(StepMeasured)]
    assert told == [0.0, 1.0, 2.0, 3.0]


def test_ranks_of_the_critic_work_only_in_turns_with_neighbours(trained):
    mode, outcome = trained
    own = outcome.of("critic-rank", "accumulate") + outcome.of("critic-rank", "forward")
    others = outcome.of("actor-rank", "accumulate")
    meets = any(one.overlaps(other) for one in own for other in others)
    assert own and meets == (mode == "async")


@pytest.mark.parametrize(("batch", "rows"), [({"updates_per_step": 2}, 8.0), ({"passes": 2}, 16.0)])
def test_several_updates_a_step_are_the_critics_too(tmp_path, batch, rows):
    outcome = SimulatedRun(tmp_path, algorithm="ppo", steps=3, batch=batch).run()
    assert learnt(outcome) == [(1, rows), (2, rows), (3, rows)]
    assert len(outcome.of("critic-rank", "finish_update")) == 6


@MODES_AND_CHECKPOINTS
def test_a_killed_critic_learns_again_what_no_checkpoint_holds(tmp_path, mode, every):
    simulation = SimulatedRun(tmp_path, algorithm="ppo", placement=mode, steps=6, checkpoint={"every": every})
    outcome = simulation.run(kill_at(4, "critic-rank-0"))
    again = [step for step, _ in learnt(outcome)]
    start = 3 if every else 0
    assert again == [1, 2, 3, 4, *range(start + 1, 7)]
    assert outcome.recovered == ["critic"]
    outcome.assert_whole(6, 1)


def test_a_checkpoint_waits_for_a_critic_that_learns_many_steps_again(tmp_path, monkeypatch):
    """Together they take longer than a step may, and longer than a quarter of an hour."""
    monkeypatch.setattr(context, "HEARTBEAT_S", 5.0)  # virtual hours cost real heartbeats
    rollout = {"groups_per_step": 4, "group_size": 4, "step_timeout_s": 400.0}
    trainer = {"name": "scripted-trainer", "critic_s": 190.0}
    simulation = SimulatedRun(tmp_path, algorithm="ppo", placement="async", steps=6, checkpoint={"every": 6},
                              rollout=rollout, trainer=trainer)  # fmt: skip
    outcome = simulation.run(kill_at(5, "critic-rank-0"))
    assert [step for step, _ in learnt(outcome)] == [*range(1, 6), *range(1, 7)]
    assert [event.step for event in outcome.told(CheckpointSaved)] == [6]
    assert "actor" not in {failed.role for failed in outcome.told(RoleFailed)}


def test_a_checkpoint_does_not_wait_for_a_critic_that_gets_no_further(tmp_path):
    rollout = {"groups_per_step": 4, "group_size": 4, "step_timeout_s": 400.0}
    simulation = SimulatedRun(tmp_path, algorithm="ppo", placement="async", steps=3, checkpoint={"every": 3},
                              rollout=rollout, trainer={"name": "scripted-trainer", "critic_s": 1e4})  # fmt: skip
    with pytest.raises(ExceptionGroup) as failed:
        simulation.run()
    assert failed.group_contains(DeadlineExceeded)


def test_a_checkpoint_holds_actor_and_critic_of_one_step(trained):
    _, outcome = trained
    saved = [Path(event.path) for event in outcome.told(CheckpointSaved)]
    assert [path.name for path in saved] == ["step-000003", "step-000006", "step-000007"]
    for path in saved[-2:]:
        steps = [int((path / part / "step").read_text()) for part in ("trainer", "critic")]
        assert steps == [int(path.name.removeprefix("step-"))] * 2


def test_a_full_disk_under_the_critics_part_is_reported_as_a_full_disk(tmp_path):
    simulation = SimulatedRun(tmp_path, algorithm="ppo", steps=4, checkpoint={"every": 2})

    async def full(stage):
        while "critic-rank-0" not in stage.workers.alive:
            await stage.clock.sleep(0.01)
        worker = stage.workers.alive["critic-rank-0"]
        called = worker.call

        async def call(name, *args, timeout_s):
            if name == "save":
                raise OSError(errno.ENOSPC, "No space left on device")
            return await called(name, *args, timeout_s=timeout_s)

        worker.call = call
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as failed:
        simulation.run(full)
    full_disk, _ = failed.value.split(DiskFull)
    assert full_disk is not None and "/critic: no space left" in str(full_disk.exceptions[0])


def test_a_stopped_run_has_both_in_its_last_checkpoint(tmp_path):
    simulation = SimulatedRun(tmp_path, algorithm="ppo", placement="async", steps=100)

    async def stop(stage):
        await stage.clock.sleep(20.0)
        for role in stage.launch.plan.roles:
            await stage.run_status.command(role, Stop())
        await asyncio.Event().wait()

    outcome = simulation.run(stop)
    (saved,) = outcome.told(CheckpointSaved)
    assert saved.step == outcome.steps[-1].step < 100
    assert int((Path(saved.path) / "critic" / "step").read_text()) == saved.step


def test_groups_covered_by_a_checkpoint_leave_the_bus(tmp_path):
    simulation = SimulatedRun(tmp_path, algorithm="ppo", steps=6, checkpoint={"every": 2})
    simulation.run()
    assert not simulation.bus.queue.ledger.provisional and not simulation.bus.queue.table.rows


@MODES_AND_CHECKPOINTS
def test_the_critic_goes_back_with_the_actor(tmp_path, mode, every):
    simulation = SimulatedRun(tmp_path, algorithm="ppo", placement=mode, steps=6, checkpoint={"every": every})
    outcome = simulation.run(kill_at(4, "actor-rank-0"))
    start, again = 3 if every else 0, [step for step, _ in learnt(outcome)]
    back = again.index(start + 1, 4) if start + 1 in again[4:] else len(again)
    assert again[:back] == list(range(1, back + 1)) and again[back:] == list(range(start + 1, 7))
    assert outcome.account.balanced and outcome.account.trained == 6 * SAMPLES
