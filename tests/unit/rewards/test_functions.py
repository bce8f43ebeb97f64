# SPDX-License-Identifier: Apache-2.0
"""Plain functions as rewards: how they are called, and what is refused before a run starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from relax_core.api import Message, Task, Trajectory
from relax_core.api.errors import ConfigError
from relax_core.api.reward import BatchReward, Reward
from relax_core.config.compose import compose
from relax_core.rewards.functions import FunctionOptions, FunctionReward, reward_of
from tests.wiring.options import CATALOGUE, MINIMAL

CHAT = (Message("system", "Be brief."), Message("user", "2+2?"))
FILE = '''
"""Rewards."""
raise RuntimeError("a plan must not run this file")

def short(task, trajectory):
    return 1.0

async def like_trl(completions, **kwargs):
    return [1.0] * len(completions)
'''


def sample(task: Task, *said: str) -> Trajectory:
    asked = (Message("user", task.prompt),) if isinstance(task.prompt, str) else task.prompt
    roles = ("assistant", "tool")
    messages = [Message(roles[place % 2], text) for place, text in enumerate(said)]
    return Trajectory((*asked, *messages), said[-1], ())


def test_a_function_of_a_sample_is_called_as_it_is() -> None:
    def length(task: Task, trajectory: Trajectory) -> float:
        return float(len(trajectory.response))

    reward = reward_of(length)
    task = Task("t", "2+2?")
    assert isinstance(reward, Reward) and reward.score is length
    assert reward.score(task, sample(task, "four")) == 4.0


def test_a_function_of_completions_gets_texts_and_columns_as_lists() -> None:
    def judge(completions: list[str], prompts: list[str], answer: list[str], level: list[int]) -> list[float]:
        return [float(c == a) * n for c, a, n in zip(completions, answer, level, strict=True)] + [len(prompts[0])]

    tasks = [Task("a", "2+2?", "4", {"level": 3, "other": 1}), Task("b", "1+1?", "2", {})]
    reward = reward_of(judge)
    assert isinstance(reward, BatchReward)
    with pytest.raises(TypeError, match="NoneType"):  # task b has no level, and the function is told so
        reward.score_batch(tasks, [sample(tasks[0], "4"), sample(tasks[1], "2")])
    assert reward.score_batch(tasks[:1], [sample(tasks[0], "4")]) == [3.0, 4]


def test_a_chat_gives_messages_and_every_column_goes_to_further_arguments() -> None:
    seen: dict[str, Any] = {}

    async def judge(completions: Any, **kwargs: Any) -> list[float]:
        seen.update(kwargs, completions=completions)
        return [0.5]

    task = Task("a", CHAT, None, {"level": 3})
    reward: Any = reward_of(judge)
    assert asyncio.run(reward.score_batch([task], [sample(task, "add", "4", "four")])) == [0.5]
    assert seen == {
        "level": [3],
        "prompts": [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]],
        "completions": [[
            {"role": "assistant", "content": "add"}, {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "four"},
        ]],
    }  # fmt: skip


def test_a_place_in_a_file_is_short_for_the_reward_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "run.toml").write_text(
        'rewards = ["mine.py:short", {name = "mine.py:like_trl", weight = 0.5}, "json:loads"]'
    )
    config = compose([MINIMAL, tmp_path / "run.toml"], (), CATALOGUE, on_disk=False).config
    assert [(one.name, one.label, one.weight) for one in config.rewards] == [
        ("function", "short", 1.0), ("function", "like-trl", 0.5), ("function", "loads", 1.0),
    ]  # fmt: skip
    assert [one.chosen.options["function"] for one in config.rewards] == [
        f"{tmp_path}/mine.py:short", f"{tmp_path}/mine.py:like_trl", "json:loads",
    ]  # fmt: skip
    assert compose([config.dump()], (), CATALOGUE, on_disk=False).config == config


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("mine.py:absent", "has no function 'absent'; it has short, like_trl"),
        ("other.py:short", "can't be read"),
        ("broken.py:short", "can't be read"),
        ("no_such_module:short", "there is no module no_such_module"),
    ],
)
def test_a_function_that_does_not_exist_is_refused_before_the_run(tmp_path: Path, place: str, reason: str) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("def short(:")
    (tmp_path / "run.toml").write_text(f'rewards = ["{place}"]')
    with pytest.raises(ConfigError, match=r"rewards\.0\.function") as caught:
        compose([MINIMAL, tmp_path / "run.toml"], (), CATALOGUE, on_disk=False)
    assert reason in str(caught.value)


def test_a_place_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"name a function as file\.py:name or module:name"):
        compose([MINIMAL, {"rewards": [{"name": "function", "function": "short"}]}], (), CATALOGUE, on_disk=False)


def test_the_component_calls_the_function_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def short(task, trajectory):\n    return 2.0\n")
    reward = FunctionReward(FunctionOptions(function=f"{tmp_path}/mine.py:short")).adapted()
    task = Task("t", "2+2?")
    assert isinstance(reward, Reward) and reward.score(task, sample(task, "4")) == 2.0
