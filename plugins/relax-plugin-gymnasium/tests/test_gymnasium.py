# SPDX-License-Identifier: Apache-2.0
"""Actions and observations in words, rewards by turn, ends by name, and what is refused before the first sample."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, strategies as st
from PIL import Image
from pydantic import ValidationError
from relax_plugin_gymnasium.environment import Gymnasium, GymnasiumOptions, make
from relax_plugin_gymnasium.pictures import image, marked
from relax_plugin_gymnasium.spaces import UnreadableAction, plain, read_action, unwritable_part, value_of

from relax_core.api import Action, Observation, Step, Task

MOVES = ("left", "down", "right", "up")


class Fixture(gymnasium.Env[Any, Any]):
    """Counts its steps and shows what it was made for."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(
        self, observed: str = "number", rewards: tuple[float | str, ...] = (1.0,), render_mode: str = ""
    ) -> None:
        self.render_mode = render_mode or None
        self.action_space = spaces.Discrete(2, start=5)
        pixels = spaces.Box(0, 255, (4, 6, 3), np.uint8)
        graph = spaces.Graph(spaces.Discrete(2), None)
        self.observation_space = {"number": spaces.Discrete(99), "pixels": pixels, "graph": graph}[observed]
        self.rewards = rewards

    def _seen(self) -> Any:
        return np.full((4, 6, 3), 7, np.uint8) if isinstance(self.observation_space, spaces.Box) else self.count

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._seen(), float(self.rewards[self.count - 1]), self.count == len(self.rewards), False, {}

    def render(self) -> Any:
        return np.full((4, 6, 3), 9, np.uint8)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register("Fixture-v0", entry_point=Fixture, max_episode_steps=4)
    yield
    del gymnasium.registry["Fixture-v0"]


def played(
    turns: list[str], task: Task = Task("t1", "Play."), seed: int = 3, **options: Any
) -> tuple[Observation, list[Step]]:
    async def play() -> tuple[Observation, list[Step]]:
        environment = Gymnasium(GymnasiumOptions(**options))
        await Gymnasium.open(environment.options)
        first = await environment.reset(task, seed)
        assert first is not None
        steps: list[Step] = []
        for turn in turns:
            steps.append(await environment.step(Action(turn, ())))
            if steps[-1].done:
                break
        await environment.close()
        return first, steps

    return asyncio.run(play())


LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "actions": MOVES}
WAY = ["down", "down", "right", "right", "down", "right"]


def test_frozen_lake_is_rewarded_at_the_goal() -> None:
    first, steps = played(WAY, **LAKE)
    assert first.content == (
        "[red S]FFF\nFHFH\nFFFH\nHFFG\n\nActions: left, down, right, up. End your answer with one of them in <action></action>."
    )
    assert [step.reward for step in steps] == [0.0] * 5 + [1.0]
    assert steps[-1].info == {"terminated": True, "truncated": False, "turns": 6, "unreadable": 0}
    assert isinstance(steps[0].observation, Observation)
    assert steps[0].observation.content == "  (Down)\nSFFF\n[red F]HFH\nFFFH\nHFFG"
    assert steps[0].observation.state == "4", "the cell, however it was come to"


def test_numbers_are_shown_to_as_many_digits_as_asked_for() -> None:
    shown = [played([], id="CartPole-v1", digits=digits)[0].content for digits in (1, 6)]
    few, many = (json.loads(str(text).partition("\n")[0]) for text in shown)
    assert few == [round(number, 1) + 0.0 for number in many] != many


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("left", 0),
        ("2", 2),
        ("<action>left</action> no: <action>**down**</action>", 1),
        ("left is a hole, so:\nI go right\n\n", 2),
        ("<ACTION>\n'up'\n</ACTION>\nleft", 3),
        ("I choose 1 (down).", 1),
    ],
)
def test_numbered_actions_are_read(text: str, action: int) -> None:
    assert read_action(spaces.Discrete(4), text, MOVES) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "left or right",
        "1.5",
        "<action></action> up",
        "right\nleft or so, not up",
        "¹",
    ],
)
def test_a_text_without_exactly_one_action_is_unreadable(text: str) -> None:
    with pytest.raises(UnreadableAction):
        read_action(spaces.Discrete(4), text, MOVES)


def test_actions_begin_where_their_space_does_and_names_may_have_spaces() -> None:
    shifted = spaces.Discrete(3, start=-1)
    assert read_action(shifted, "-1", ()) == -1
    assert read_action(shifted, "I turn left now", ("left", "turn left", "stay")) == 0
    with pytest.raises(UnreadableAction):
        read_action(shifted, "2", ())


@pytest.mark.parametrize(
    ("space", "text", "value"),
    [
        (spaces.Box(-2, 2, (1,)), "I push: [0.5]", [0.5]),
        (spaces.Box(-2, 2, (2, 2)), "<action>[[1, 2],\n[0, -1]]</action>", [[1, 2], [0, -1]]),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Text(4)), '{"b": "x", "a": 1}', {"a": 1, "b": "x"}),
        (spaces.Text(8), "<action>go</action>", "go"),
    ],
)
def test_actions_of_other_spaces_are_json(space: spaces.Space[Any], text: str, value: Any) -> None:
    read = read_action(space, text, ())
    assert space.contains(read)
    assert plain(space, read, 6) == value


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Box(-2, 2, (1,)), "0.5"),
        (spaces.Box(-2, 2, (1,)), "[3]"),
        (spaces.Box(-2, 2, (1,)), "[true]"),
        (spaces.Box(-2, 2, (1,)), '["1"]'),
        (spaces.Box(-2, 2, (1,)), "[0.1, 0.2]"),
        (spaces.Box(-np.inf, np.inf, (1,)), "[NaN]"),
        (spaces.Box(-np.inf, np.inf, (1,)), "[1e999]"),
        (spaces.Box(0, 9, (1,), np.int64), "[1.5]"),
        (spaces.MultiDiscrete([2, 3]), "[2, 0]"),
        (spaces.MultiDiscrete([2, 3]), f"[{10**30}, 0]"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))), "[1]"),
        (spaces.Dict(a=spaces.Discrete(2)), '{"a": 1, "b": 2}'),
        (spaces.Text(2), "<action>longer</action>"),
        pytest.param(spaces.Box(-2, 2, (1,)), "[" * 100_000, id="brackets"),
        pytest.param(spaces.Box(-2, 2, (1,)), "<action>" * 10_000, id="tags"),
    ],
)
def test_json_of_no_action_is_unreadable(space: spaces.Space[Any], text: str) -> None:
    with pytest.raises(UnreadableAction):
        read_action(space, text, ())


@given(st.text(), st.booleans())
def test_no_response_raises_anything_else(text: str, tagged: bool) -> None:
    said = f"<action>{text}</action>" if tagged else text
    for space in (spaces.Discrete(4), spaces.Box(-1, 1, (2,)), spaces.Tuple((spaces.MultiBinary(2), spaces.Text(3)))):
        with suppress(UnreadableAction):
            assert space.contains(read_action(space, said, ()))


SPACES = st.recursive(
    st.sampled_from(
        [spaces.Discrete(5, start=-2), spaces.Box(-9, 9, (2, 2)), spaces.Box(0, 9, (3,), np.int32), spaces.MultiBinary(4),
         spaces.MultiDiscrete([3, 4]), spaces.Text(5)]
    ),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
    | st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict),
    max_leaves=4,
)  # fmt: skip


@given(SPACES, st.integers(0, 2**31))
def test_a_described_value_of_a_space_is_read_back(space: spaces.Space[Any], seed: int) -> None:
    space.seed(seed)
    told = plain(space, space.sample(), 4)
    assert unwritable_part(space) == ""
    assert plain(space, value_of(space, json.loads(json.dumps(told))), 4) == told


def test_an_unreadable_action_is_answered_and_costs_a_turn() -> None:
    _, steps = played(["?", "right"], max_steps=9, invalid_reward=-0.5, **LAKE)
    assert steps[0] == Step(
        "No action: '?' names no action. Actions: left, down, right, up.", False, -0.5,
        {"terminated": False, "truncated": False, "turns": 1, "unreadable": 1},
    )  # fmt: skip
    assert isinstance(steps[1].observation, Observation)
    assert steps[1].observation.state == "1", "the environment stood still"


def test_an_unreadable_action_may_end_the_episode() -> None:
    _, steps = played(["?", "right"], invalid="end", invalid_reward=-1.0, **LAKE)
    assert [(step.done, step.reward) for step in steps] == [(True, -1.0)]


@pytest.mark.parametrize("turns", [["right"] * 9, ["?"] * 9])
def test_max_steps_cuts_off(turns: list[str]) -> None:
    _, steps = played(turns, max_steps=3, **LAKE)
    assert len(steps) == 3
    assert (steps[-1].info["terminated"], steps[-1].info["truncated"]) == (False, True)


def test_an_end_at_the_last_step_is_an_end() -> None:
    _, steps = played(WAY, max_steps=6, **LAKE)
    assert (steps[-1].info["terminated"], steps[-1].info["truncated"]) == (True, False)


def test_the_environments_own_limit_is_reported_as_truncation() -> None:
    _, steps = played(["5"] * 9, id="Fixture-v0", kwargs={"rewards": (1.0,) * 9})
    assert (len(steps), steps[-1].info["terminated"], steps[-1].info["truncated"]) == (4, False, True)
    assert [step.reward for step in steps] == [1.0] * 4


def test_a_reward_that_is_not_a_number_is_an_error_and_no_reward() -> None:
    with pytest.raises(RuntimeError, match="Fixture-v0.* finite"):
        played(["5"], id="Fixture-v0", kwargs={"rewards": ("nan", 1.0)})


def test_samples_of_one_seed_are_the_same_and_of_others_not() -> None:
    def hands(seed: int, **more: Any) -> str:
        return str(played(["0"], seed=seed, id="Blackjack-v1", **more))

    assert hands(1) == hands(1)
    assert len({hands(seed) for seed in range(6)}) > 3
    assert hands(1, seed_of="task") == hands(2, seed_of="task")
    assert hands(2**63 - 1), "seeds of the core have 63 bits"


def test_a_task_names_its_environment_and_beginning() -> None:
    task = Task("t", "", metadata={"gymnasium": {"id": "Blackjack-v1", "kwargs": {"sab": True}, "seed": 2}})
    first = {str(played([], task, seed, **LAKE)[0].content) for seed in range(4)}
    assert len(first) == 1
    assert "a number from 0 to 1" in first.pop(), "names of other actions are not for it"
    seeded = Task("t", "", metadata={"gymnasium": {"seed": 2}})
    assert "Actions: left" in str(played([], seeded, **LAKE)[0].content)


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ({"id": "Nowhere-v0"}, "task t9: Gymnasium can't make Nowhere-v0"),
        ({"kwargs": {"width": 3}}, "task t9: Gymnasium can't make FrozenLake-v1 .*width"),
        ({"seed": "one"}, "task t9: column gymnasium .*seed"),
        ({"env": "Taxi-v4"}, "task t9: column gymnasium .*env"),
        (["Taxi-v4"], "task t9: column gymnasium"),
        ({"actions": ["a", "b"]}, "task t9: .*2 names"),
    ],
)
def test_a_task_without_an_environment_is_refused_with_the_reason(column: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        played([], Task("t9", "", metadata={"gymnasium": column}), **LAKE)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "Fixture-v0", "kwargs": {"observed": "graph"}}, "Graph.* can't be written"),
        ({"id": "Fixture-v0", "kwargs": {"observed": "pixels"}, "show": "render"}, "can't render text"),
        ({"id": "Fixture-v0", "image": "observation"}, "not pixels"),
        ({"id": "Pendulum-v1", "actions": MOVES}, "has 4 names"),
        ({"id": "no_such_module_of_mine:Fixture-v0"}, "can't make"),
    ],
)
def test_a_space_that_cannot_be_written_as_text_is_refused_at_the_start(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        asyncio.run(Gymnasium.open(GymnasiumOptions(**options)))


def test_large_observations_are_refused_by_their_space() -> None:
    assert unwritable_part(spaces.Box(0, 255, (210, 160, 3), np.uint8)).startswith("Box(0, 255, (210, 160, 3), uint8)")
    assert "Graph" in unwritable_part(
        spaces.Dict(a=spaces.Tuple((spaces.Discrete(2), spaces.Graph(spaces.Discrete(2), None))))
    )
    assert "Sequence" in unwritable_part(spaces.Sequence(spaces.Discrete(2)))


@pytest.mark.parametrize(
    "options", [{"template": "{board}"}, {"actions": ["a", "A"]}, {"max_steps": -1}, {"opening": "{}{x}"}]
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GymnasiumOptions(**options)


def test_places_of_the_template_are_filled_once() -> None:
    _, steps = played(
        ["5"], id="Fixture-v0", template="{turn}: {value} {reward} {actions} {}", kwargs={"rewards": (0.5, 1.0)}
    )
    assert isinstance(steps[0].observation, Observation)
    assert steps[0].observation.content == "1: 1 0.5 a number from 5 to 6 {}"


@pytest.mark.parametrize(("shown", "level"), [("observation", 7), ("render", 9)])
def test_pixels_are_an_image_before_the_text(shown: str, level: int) -> None:
    first, _ = played([], id="Fixture-v0", kwargs={"observed": "pixels"}, image=shown, opening="Look.")
    picture, text = first.content
    assert (picture.media.kind, text.text) == ("image", "Look.")  # type: ignore[union-attr]
    data = picture.media.source.removeprefix("data:image/png;base64,")  # type: ignore[union-attr]
    with Image.open(io.BytesIO(base64.b64decode(data))) as png:
        assert (png.size, png.getpixel((0, 0))) == ((6, 4), (level,) * 3)


def test_only_bytes_are_pixels() -> None:
    for pixels in (np.zeros((2, 2, 3)), np.zeros((2, 2, 4), np.uint8), np.zeros(3, np.uint8)):
        with pytest.raises(ValueError, match="bytes"):
            image(pixels)
    assert image(np.zeros((2, 2), np.uint8)) == image(np.zeros((2, 2, 1), np.uint8))


@pytest.mark.parametrize(
    ("render", "text"),
    [
        ("\n\x1b[41mS\x1b[0mFF\n", "[red S]FF"),
        ("\x1b[34;1mR\x1b[0m|\x1b[43m \x1b[0m", "[blue R]|[yellow  ]"),
        ("\x1b[35m\x1b[43mY\x1b[0m\x1b[0m.", "[magenta yellow Y]."),
        ("\x1b[1mbold\x1b[0m \x1b[2Jclear", "bold clear"),
        ("\x1b[31mto the end", "[red to the end]"),
    ],
)
def test_colours_become_marks(render: str, text: str) -> None:
    assert marked(render) == text


def test_a_taxi_over_its_destination_is_still_seen() -> None:
    cells = [str(played([], seed=seed, id="Taxi-v4")[0].content) for seed in range(30)]
    assert all("yellow" in cell for cell in cells)


def test_an_environment_renders_only_if_the_rendering_is_shown() -> None:
    options = GymnasiumOptions(show="value")
    assert make("FrozenLake-v1", {}, (), options).render_mode is None
    assert make("FrozenLake-v1", {}, (), GymnasiumOptions()).render_mode == "ansi"
