# SPDX-License-Identifier: Apache-2.0
"""What trainers are started with: each role's own optimizer, and the temperature that its tokens were drawn at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.trainer import TrainerSpec
from tests.unit.roles import simulated_run
from tests.unit.roles.simulated_run import SimulatedRun, SimulatedWorker
from tests.unit.roles.test_row_source import simulation

ROLLOUT = {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 8, "temperature": 0.7}
OPTIMIZER = {
    "lr": 1e-3, "schedule": "cosine", "warmup_steps": 3, "betas": [0.8, 0.9], "weight_decay": 0.1, "grad_clip": 0.5,
}  # fmt: skip


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> dict[str, TrainerSpec]:
    """What each role's trainer was started with."""
    specs = dict[str, TrainerSpec]()
    call = SimulatedWorker.call

    async def listening(self: SimulatedWorker, method: str, *args: Any, timeout_s: float) -> Any:
        if args and isinstance(args[0], TrainerSpec):
            specs[args[0].role] = args[0]
        return await call(self, method, *args, timeout_s=timeout_s)

    monkeypatch.setattr(simulated_run.SimulatedWorker, "call", listening)
    return specs


def test_actor_and_critic_have_the_tables_optimizer_and_the_critic_its_own_rate(
    tmp_path: Path, specs: dict[str, TrainerSpec]
) -> None:
    SimulatedRun(
        tmp_path, algorithm="ppo", steps=4, optimizer=OPTIMIZER, critic={"lr": 5e-3}, rollout=ROLLOUT, seed=11
    ).run()
    actor, critic = specs["actor"].optimizer, specs["critic"].optimizer
    assert (actor.lr, critic.lr) == (1e-3, 5e-3)
    for optimizer in (actor, critic):
        assert (optimizer.schedule, optimizer.warmup_steps, optimizer.total_steps) == ("cosine", 3, 4)
        assert (optimizer.betas, optimizer.weight_decay, optimizer.grad_clip) == ((0.8, 0.9), 0.1, 0.5)
    assert {spec.seed for spec in specs.values()} == {11}
    assert specs["actor"].temperature == 0.7


def test_a_critic_without_a_rate_has_ten_times_the_actors_and_begins_before_the_actor(
    tmp_path: Path, specs: dict[str, TrainerSpec]
) -> None:
    SimulatedRun(tmp_path, algorithm="ppo", steps=2, optimizer=OPTIMIZER, critic={"warmup_steps": 1}).run()
    actor, critic = specs["actor"].optimizer, specs["critic"].optimizer
    assert critic == replace(actor, lr=10 * actor.lr, first_step=0)
    assert actor.first_step == 1


def test_a_reference_scores_at_the_temperature_that_tokens_were_drawn_at(
    tmp_path: Path, specs: dict[str, TrainerSpec]
) -> None:
    SimulatedRun(tmp_path, algorithm={"name": "grpo", "kl_coef": 0.1}, steps=2, rollout=ROLLOUT).run()
    assert {role: spec.temperature for role, spec in specs.items()} == {"actor": 0.7, "reference": 0.7}


def test_rows_that_were_given_were_drawn_at_no_temperature(tmp_path: Path, specs: dict[str, TrainerSpec]) -> None:
    simulation(tmp_path, "sft", steps=2, rollout=ROLLOUT).run()
    assert specs["actor"].temperature == 1.0
