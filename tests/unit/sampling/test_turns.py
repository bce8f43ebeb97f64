# SPDX-License-Identifier: Apache-2.0
"""Turns of a sample: which tokens are whose, the states that they began in, and what each was given."""

from __future__ import annotations

import asyncio

import numpy as np

from relax_core.api import (
    Action,
    Environment,
    Media,
    Message,
    Observation,
    Part,
    Session,
    Step,
    Task,
    Tool,
    Trajectory,
    context_key,
)
from relax_core.rewards.host import ScoredSample
from relax_core.sampling.episode import InProcess, SingleTurn
from relax_core.sampling.rows import turn_columns
from relax_core.sampling.session import state_key
from tests.unit.sampling.toy_policy import Script, driven, play


class Maze(Environment):
    """Answers with what the task's metadata says; pays for every second turn only."""

    in_process = True
    tools: tuple[Tool, ...] = ()

    async def reset(self, task: Task, seed: int) -> Observation | None:
        self._says, self._turn = list(task.metadata["says"]), 0
        return task.metadata.get("first")

    async def step(self, action: Action) -> Step:
        self._turn += 1
        return Step(self._says.pop(0), not self._says, float(self._turn) if self._turn % 2 == 0 else None)


async def maze(*says: Observation | str, first: Observation | None = None, words: str = "abcd") -> Trajectory:
    task = Task("t", (Message("user", "go"),), metadata={"says": says, "first": first})
    return await play(InProcess(Maze(), 5.0), Script(*words[: len(says)]), task)


async def test_tokens_carry_the_number_and_reward_of_their_turn() -> None:
    game = await maze("x", "y", "z", "")
    assert [node.turn for node in game.forest] == [-1, 0, -1, 1, -1, 2, -1, 3]
    assert (game.step_rewards, game.step_turns) == ((2.0, 4.0), (1, 3))
    assert game.turn_rewards == (0.0, 2.0, 0.0, 4.0)
    assert len(game.states) == 4


async def test_equal_text_is_an_equal_state_in_any_turn() -> None:
    one, other = await maze("x", "y", "x", "end"), await maze("y", "z", "end", words="qrs")
    assert one.states[0] == other.states[0], "both saw the task alone"
    assert one.states[1] == one.states[3] != one.states[2] == other.states[1]
    assert other.states[2] not in one.states


async def test_a_named_state_does_not_depend_on_the_observation() -> None:
    hall = Observation("you came from the left", state="hall")
    one = await maze(hall, "x", "")
    other = await maze("you came from the left", Observation("and back", state="hall"), "")
    assert one.states[1] == other.states[2]
    assert one.states[1] != other.states[1], "a name is no word"
    assert one.states[2] not in other.states, "the name was that turn's alone"


async def test_the_first_state_can_be_named_without_an_observation() -> None:
    start = Observation(state="start")
    games = [await maze("", first=start), await maze("", first=Observation("hello", state="start")), await maze("")]
    assert games[0].states == games[1].states != games[2].states
    assert [len(game.messages) for game in games] == [2, 3, 2]


async def test_without_observations_a_state_is_the_whole_conversation() -> None:
    silent = await maze("", "", "")
    assert len(set(silent.states)) == 3
    assert silent.states == (await maze("", "", "")).states
    assert silent.states[1:] != (await maze("", "", "", words="xyz")).states[1:]


async def test_a_single_turn_s_state_is_its_task() -> None:
    one, other = [await play(InProcess(SingleTurn(), 0.0), Script(word)) for word in ("yes", "no")]
    assert one.states == other.states == (state_key("", [Message("user", "go")], ()),)
    assert one.forest[1].turn == 0


async def test_branches_have_turns_of_their_own_and_what_they_are_given_is_their_newest_s() -> None:
    async def branching(session: Session) -> None:
        session.reward(16.0)
        await session.generate()
        left, right = session, session.fork()
        left.observe("same")
        right.observe("same")
        await asyncio.gather(left.generate(), right.generate())
        left.reward(0.25)
        right.reward(0.5)
        summary = right.restart((Message("user", "sum"),))
        summary.reward(8.0)
        await summary.generate()
        summary.reward(1.0)

    game = await play(driven(branching), Script("a", "b", "c", "d"))
    assert sorted(node.turn for node in game.forest if node.sampled) == [0, 1, 2, 3]
    assert game.states[1] == game.states[2]
    assert game.turn_rewards == (0.0, 0.25, 8.5, 1.0)
    assert game.environment_reward == 25.75, "a reward before the first turn is for the whole sample"


def test_keys_distinguish_roles_parts_and_media() -> None:
    picture = Media("image", "a.png", key="k")
    shown = [
        [Message("user", "ab")], [Message("tool", "ab")], [Message("user", "a"), Message("user", "b")],
        [Message("user", (Part("a"), Part("b")))], [Message("user", (Part(media=picture),))], [Message("user", "k")],
    ]  # fmt: skip
    keys = {state_key("", messages, ()) for messages in shown} | {state_key("ab", [], ()), state_key("", [], (1, 2))}
    assert len(keys) == len(shown) + 2
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert state_key("", [], (1, 2)) != state_key("", [], (12,))
    one, other = ([Message("tool", "ab", extra={"tool_call_id": name})] for name in "xy")
    assert state_key("", one, ()) == state_key("", other, ()), "agents give calls other ids in every sample"


async def test_turns_record_their_context_and_pass_it_to_forks_and_restarts() -> None:
    async def pair(session: Session) -> None:
        await session.generate()
        planner = session.restart((Message("user", "plan"),), context="planner")
        await planner.generate()
        await planner.fork().generate()
        await planner.restart((Message("user", "again"),)).generate()
        await planner.restart((Message("user", "no name"),), context="").generate()

    played = await play(driven(pair), Script(*"abcde"))
    assert played.contexts == ("", "planner", "planner", "planner", "")
    lengths = np.array([sum(len(node.tokens) for node, _ in path) for path in played.paths()])
    columns = turn_columns([(played.paths(), played, ScoredSample(1.0))], lengths)
    of_turn = dict(zip(columns["turns"].values.tolist(), columns["contexts"].values.tolist(), strict=True))
    key = context_key("planner")
    assert of_turn == {-1: 0, 0: 0, 1: key, 2: key, 3: key, 4: 0} and key
    assert (await maze("x", "")).contexts == ()
