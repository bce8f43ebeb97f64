# SPDX-License-Identifier: Apache-2.0
"""Two environments with an algorithm each, through all roles: groups are outcome, credited and labelled by their task's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.api.errors import ConfigError
from tests.unit.roles.simulated_run import Asked, SimulatedRun

GAMES = '''
"""An environment of two turns that names its states, and pays the first one."""
from relax_core.api import Action, Environment, Observation, Options, Step, Task

class Twice(Environment[Options]):
    in_process = True
    gives_reward = True
    async def reset(self, task, seed):
        self.turns = 0
        return Observation(state="start")
    async def step(self, action):
        self.turns += 1
        return Step(Observation("on", state="on"), self.turns == 2, float(len(action.tokens)) if self.turns == 1 else None)
'''
TASKS = 8


def staged(folder: Path, other: str = "twice", **more: object) -> SimulatedRun:
    """Every second task is of the other environment."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"p{n}", "environment": other if n % 2 else ""} for n in range(TASKS)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "twice.py").write_text(GAMES)
    return SimulatedRun(
        folder, [str(folder / "twice.py")], data={"train": str(folder / "own.jsonl")}, steps=4,
        rollout={"groups_per_step": 4, "group_size": 4, "max_new_tokens": 8, "max_turns": 2},
        **{"environments": [{"name": "twice", "algorithm": "gigpo"}], **more},
    )  # fmt: skip


@pytest.mark.parametrize("placement", ["colocate", "async"])
def test_rows_have_the_algorithm_of_their_task_s_environment(tmp_path: Path, asked: Asked, placement: str) -> None:
    staged(tmp_path, placement=placement).run().assert_whole(4, 1)
    turned = set()
    for rows in asked.rows:
        assert not {"turns", "states", "step_rewards"} & rows.columns.keys(), "only crediting reads them"
        index, masks = rows.columns["algorithm_index"].values, rows.columns["loss_mask"].rows()
        for number, mask in zip(index, masks, strict=True):
            turns = sum(int(b) > int(a) for a, b in zip(mask, mask[1:], strict=False))
            turned.add((int(number), turns))
    assert {number for number, _ in turned} == {0, 1}
    assert {turns for number, turns in turned if number == 0} == {1}
    assert 2 in {turns for number, turns in turned if number == 1}


def test_environments_of_one_component_are_distinguished_by_their_labels(tmp_path: Path) -> None:
    labelled = [{"name": "twice", "label": "hard", "algorithm": "gigpo"}]
    staged(tmp_path, "hard", environment="twice", environments=labelled).run().assert_whole(4, 1)


def test_a_task_of_an_environment_that_the_run_has_not_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        staged(tmp_path, "thrice").run()
    assert raised.group_contains(ConfigError, match="environments.*'thrice'")
