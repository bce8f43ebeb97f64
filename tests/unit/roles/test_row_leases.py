# SPDX-License-Identifier: Apache-2.0
"""Row leases outlive any wait for devices and any computation, and end with a role that hangs."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.batch import RowBatch
from relax_core.api.events import RoleFailed
from relax_core.config.run_config import RunContext
from relax_core.roles import forward, row_leases
from relax_core.roles.forward import Filled, ForwardColumns, ForwardLoop, Reference
from relax_core.roles.rank_group import RankGroup
from tests.unit.roles.simulated_run import SimulatedRun

STEPS, GROUPS = 3, 4
LEASE_S = 10.0
SLOW = {"name": "scripted-trainer", "train_s": 33.0, "critic_s": 15.0}
"""A step of the actor is three times as long as a row lease."""


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual hours are cheap, but not free."""
    monkeypatch.setattr(row_leases, "RENEW_S", LEASE_S / 10)
    monkeypatch.setattr(forward, "DEVICE_LEASE_WAIT_S", 4 * LEASE_S)
    monkeypatch.setattr(forward, "CALL_S", 4 * LEASE_S)


def simulated(folder: Path, **settings: Any) -> SimulatedRun:
    run = SimulatedRun(folder, steps=STEPS, **settings)
    run.bus_settings = replace(run.bus_settings, lease_s=LEASE_S)
    return run


class Grants:
    """How often each group was leased, by task: a happening of a simulated run."""

    def __init__(self) -> None:
        self.by_task: dict[str, Counter[int]] = {}

    async def __call__(self, run: SimulatedRun) -> None:
        grant = run.bus.queue.leases.grant

        def counted(task: str, groups: tuple[int, ...], *args: Any) -> Any:
            self.by_task.setdefault(task, Counter()).update(groups)
            return grant(task, groups, *args)

        run.bus.queue.leases.grant = counted  # type: ignore[method-assign]
        await asyncio.Event().wait()


@pytest.mark.parametrize("mode", ["colocate", "hybrid"])
def test_rows_are_claimed_and_filled_once_behind_a_step_much_longer_than_their_lease(tmp_path: Path, mode: str) -> None:
    grants = Grants()
    reference = {"name": "grpo", "kl_coef": 0.1}
    outcome = simulated(tmp_path, max_staleness=1, placement=mode, trainer=SLOW, algorithm=reference).run(grants)
    outcome.assert_whole(STEPS, 1)
    assert set(grants.by_task["reference"].values()) == {1}
    assert len(grants.by_task["reference"]) == STEPS * GROUPS
    assert len(outcome.of("reference-rank", "forward")) <= STEPS * GROUPS


@pytest.mark.parametrize("mode", ["colocate", "async"])
def test_a_critic_that_waits_longer_than_its_lease_learns_and_values_each_row_once(tmp_path: Path, mode: str) -> None:
    grants = Grants()
    outcome = simulated(tmp_path, algorithm="ppo", max_staleness=1, placement=mode, trainer=SLOW).run(grants)
    outcome.assert_whole(STEPS, 1)
    assert set(grants.by_task["critic.values"].values()) == set(grants.by_task["critic.fit"].values()) == {1}
    assert not outcome.told(RoleFailed)


class HangsOnce(Reference):
    """A reference whose first life never ends its work on the rows of its first claim, with its process alive."""

    lives = 0

    async def run(self, context: RunContext) -> None:
        self.lives += 1
        hangs = self.lives == 1

        class Loop(ForwardLoop):
            async def fill(self, rows: RowBatch) -> Filled:
                await (asyncio.Event().wait() if hangs else asyncio.sleep(0))
                return await super().fill(rows)

        async with await RankGroup.start(context, self.name) as trainer:
            await Loop(context, self.name, ForwardColumns({"ref_log_probs": "log_probs"}), trainer).run()


def test_a_role_whose_work_on_rows_never_ends_loses_them_and_is_restarted(tmp_path: Path) -> None:
    grants = Grants()
    simulation = simulated(tmp_path, algorithm={"name": "grpo", "kl_coef": 0.1})
    simulation.plugin_roles["reference"] = HangsOnce()
    outcome = simulation.run(grants)
    (failed,) = outcome.told(RoleFailed)
    assert failed.role == "reference" and "its work on claimed rows to end" in failed.error
    assert outcome.recovered == ["reference"]
    outcome.assert_whole(STEPS, 1)
    assert max(grants.by_task["reference"].values()) == 2
    limit_s = forward.MIN_TURNS * 8 * LEASE_S
    assert limit_s < outcome.seconds < limit_s + 60
