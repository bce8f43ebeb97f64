# SPDX-License-Identifier: Apache-2.0
"""A stateless role whose loop fails restarts with fresh workers; no sample is lost or trained twice."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.errors import WorkerDied
from relax_core.api.events import RoleFailed
from relax_core.roles.rollout import Rollout
from tests.unit.roles.simulated_run import SAMPLES, Happening, SimulatedRun

STEPS = 8
ASYNC = {
    "placement": {"mode": "async", "rollout": {"engines": 2}}, "batch": {"updates_per_step": 2},
    "algorithm": {"name": "grpo", "kl_coef": 0.1, "correction": "truncate"},
}  # fmt: skip


def failing(role: str, *times: float) -> Happening:
    """Let a role lose the hub for a moment at these times."""

    async def fail(simulation: SimulatedRun) -> None:
        run_status = simulation.run_status
        real, cut = run_status.heartbeat, False

        async def heartbeat(one: Any) -> None:
            nonlocal cut
            if cut and one.role == role and one.state not in ("failed", "starting"):
                cut = False
                raise WorkerDied("hub died during heartbeat")
            await real(one)

        run_status.heartbeat = heartbeat  # type: ignore[method-assign]
        for at in times:
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            cut = True

    return fail


@pytest.mark.parametrize(
    ("role", "workers"),
    [("rollout", ("engine-0", "engine-1")), ("reference", ("reference-rank-0",)), ("actor-fwd", ("actor-fwd-rank-0",))],
)
def test_a_role_whose_loop_fails_restarts_with_its_workers(tmp_path: Path, role: str, workers: tuple[str, ...]) -> None:
    outcome = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1, **ASYNC).run(failing(role, 3.3, 8.9))
    outcome.assert_whole(STEPS, 1)
    assert outcome.recovered == [role] * 2
    assert [len(outcome.of(worker, "start")) for worker in workers] == [3] * len(workers)


def test_engines_that_share_devices_restart_with_their_role(tmp_path: Path) -> None:
    outcome = SimulatedRun(tmp_path, steps=STEPS, placement="colocate").run(failing("rollout", 5.1, 11.7))
    outcome.assert_whole(STEPS, 0)
    assert len(outcome.of("engine-0", "start")) == 3


def test_a_rollout_restarts_while_the_actor_goes_back(tmp_path: Path) -> None:
    """The trainer has no checkpoint, so the run goes back to its start while the rollout starts again."""

    async def strike(simulation: SimulatedRun) -> None:
        await asyncio.sleep(8.0)
        await simulation.workers.alive["actor-rank-0"].kill()

    outcome = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1).run(strike, failing("rollout", 7.9, 8.6))
    assert outcome.account.trained == STEPS * SAMPLES and outcome.account.balanced
    assert all(0 <= lag <= 1 for lag in outcome.metric("lag/max"))
    assert {event.role for event in outcome.told(RoleFailed)} == {"actor", "rollout"}


class FailsTwiceAtOnce(Rollout):
    """A rollout of which a loop and a task that a loop has begun fail in the same iteration of the event loop."""

    failed = False

    async def _attend(self) -> None:
        if not self.failed:
            self.failed = True
            task = asyncio.create_task(self._lost())
            self._deliveries.add(task)
            task.add_done_callback(self._note_failure)
            await self._lost()
        await super()._attend()

    async def _lost(self) -> None:
        await asyncio.sleep(5.0)
        raise WorkerDied("the bus was lost")


def test_of_two_failures_at_once_one_ends_the_role_and_the_other_is_not_printed_as_unretrieved(tmp_path: Path) -> None:
    unretrieved: list[dict[str, Any]] = []

    async def listen(_: SimulatedRun) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: unretrieved.append(told))

    simulation = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1)
    simulation.plugin_roles = {"rollout": FailsTwiceAtOnce()}
    outcome = simulation.run(listen)
    gc.collect()  # a future that holds an error tells of it when it is gone
    outcome.assert_whole(STEPS, 1)
    assert [event.role for event in outcome.told(RoleFailed)] == ["rollout"]
    assert unretrieved == []
