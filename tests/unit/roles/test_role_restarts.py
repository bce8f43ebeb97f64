# SPDX-License-Identifier: Apache-2.0
"""A stateless role whose loop fails restarts with fresh workers; no sample is lost or trained twice."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.errors import WorkerDied
from relax_core.api.events import RoleFailed, RoleRecovered
from relax_core.roles.rollout import Rollout
from tests.unit.roles.simulated_run import RunOutcome, SimulatedRun
from tests.unit.roles.test_schedule import STEPS, whole

ASYNC = {
    "placement": {"mode": "async", "rollout": {"engines": 2}}, "batch": {"updates_per_step": 2},
    "algorithm": {"name": "grpo", "kl_coef": 0.1, "correction": "truncate"},
}  # fmt: skip


def failing(role: str, *times: float) -> list[object]:
    """Let the hub be lost to a role at these times, for a moment."""

    async def fail(simulation: SimulatedRun) -> None:
        run_status = simulation.run_status
        real, cut = run_status.heartbeat, False

        async def heartbeat(one: object) -> None:
            nonlocal cut
            if cut and one.role == role and one.state not in ("failed", "starting"):  # type: ignore[attr-defined]
                cut = False
                raise WorkerDied("hub died during heartbeat")
            await real(one)  # type: ignore[arg-type]

        run_status.heartbeat = heartbeat  # type: ignore[method-assign, assignment]
        for at in times:
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            cut = True

    return [fail]


def starts(outcome: RunOutcome, worker: str) -> int:
    return len(outcome.of(worker, "start"))


@pytest.mark.parametrize(
    ("role", "workers"),
    [("rollout", ("engine-0", "engine-1")), ("reference", ("reference-rank-0",)), ("actor-fwd", ("actor-fwd-rank-0",))],
)
def test_a_role_whose_loop_fails_restarts_with_its_workers(tmp_path: Path, role: str, workers: tuple[str, ...]) -> None:
    simulation = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1, **ASYNC)
    outcome = simulation.run(*failing(role, 3.3, 8.9, 14.2))  # type: ignore[arg-type]
    whole(outcome)
    assert [event.role for event in outcome.events if isinstance(event, RoleRecovered)] == [role] * 3
    assert [starts(outcome, worker) for worker in workers] == [4] * len(workers)
    assert outcome.account.trained == STEPS * 16, "none was lost, none was trained twice"


def test_engines_that_share_devices_restart_with_their_role(tmp_path: Path) -> None:
    outcome = SimulatedRun(tmp_path, steps=STEPS, placement="colocate").run(*failing("rollout", 5.1, 11.7))  # type: ignore[arg-type]
    whole(outcome, staleness=0)
    assert starts(outcome, "engine-0") == 3


def test_a_rollout_restarts_while_the_actor_goes_back(tmp_path: Path) -> None:
    """The trainer has no checkpoint, so that the run goes back to its start while the rollout is begun anew."""

    async def strike(simulation: SimulatedRun) -> None:
        await asyncio.sleep(8.0)
        await simulation.workers.alive["actor-rank-0"].kill()

    simulation = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1)
    outcome = simulation.run(strike, *failing("rollout", 7.9, 8.6))  # type: ignore[arg-type]
    assert outcome.account.trained == STEPS * 16 and outcome.account.balanced
    assert all(0 <= lag <= 1 for lag in outcome.metric("lag/max"))
    assert {event.role for event in outcome.events if isinstance(event, RoleFailed)} == {"actor", "rollout"}


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
    whole(outcome)
    assert [event.role for event in outcome.events if isinstance(event, RoleFailed)] == ["rollout"]
    assert unretrieved == []
