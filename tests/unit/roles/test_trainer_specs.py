# SPDX-License-Identifier: Apache-2.0
"""The specs of trainers: the critic's own optimizer, and the temperature that tokens were drawn at.

`test_every_setting.py` shows that the actor's spec has what the configuration says.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.unit.roles.simulated_run import Asked, SimulatedRun
from tests.unit.roles.test_row_source import simulation

ROLLOUT = {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 8, "temperature": 0.7}
OPTIMIZER = {
    "lr": 1e-3, "schedule": "cosine", "warmup_steps": 3, "betas": [0.8, 0.9], "weight_decay": 0.1, "grad_clip": 0.5,
}  # fmt: skip


def test_a_critic_without_a_rate_has_ten_times_the_actors_and_begins_before_the_actor(
    tmp_path: Path, asked: Asked
) -> None:
    SimulatedRun(tmp_path, algorithm="ppo", steps=2, optimizer=OPTIMIZER, critic={"warmup_steps": 1}).run()
    actor, critic = asked.trainers["actor"].optimizer, asked.trainers["critic"].optimizer
    assert critic == replace(actor, lr=10 * actor.lr, first_step=0)
    assert actor.first_step == 1


def test_a_reference_scores_at_the_temperature_that_tokens_were_drawn_at(tmp_path: Path, asked: Asked) -> None:
    SimulatedRun(tmp_path, algorithm={"name": "grpo", "kl_coef": 0.1}, steps=2, rollout=ROLLOUT).run()
    assert {role: spec.temperature for role, spec in asked.trainers.items()} == {"actor": 0.7, "reference": 0.7}


def test_rows_that_were_given_were_drawn_at_no_temperature(tmp_path: Path, asked: Asked) -> None:
    simulation(tmp_path, "sft", steps=2, rollout=ROLLOUT).run()
    assert asked.trainers["actor"].temperature == 1.0
