# SPDX-License-Identifier: Apache-2.0
"""Options, seats, opponents and worth: nothing that goes wrong in the set-up becomes a reward."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError
from relax_plugin_textarena.environment import (
    TextArena,
    TextArenaOptions,
    TextArenaTeam,
    joined,
    moved,
)

from relax_core.api import Action, Step, Task
from relax_core.testing.environment import ScriptedSession
from relax_core.testing.scripted_client import ScriptedClient

TASK = Task("t1", "Play.")


def played(
    turns: list[str], task: Task = TASK, seed: int = 5, engine: Any = None, **options: Any
) -> tuple[str, list[Step]]:
    """Play until the game or the turns end; the first observation, and the steps."""

    async def play() -> tuple[str, list[Step]]:
        environment = TextArena(TextArenaOptions(**options))
        environment.engines = {"opponent": engine}
        first = await environment.reset(task, seed)
        assert first is not None
        steps: list[Step] = []
        for turn in turns:
            steps.append(await environment.step(Action(turn, ())))
            if steps[-1].done:
                break
        return str(first.content), steps

    return asyncio.run(play())


ROCK = {
    "id": "IteratedRockPaperScissors-v0",
    "opponent": "replies",
    "replies": ("[rock]",),
    "kwargs": {"num_rounds": 1},
}


@pytest.mark.parametrize(
    ("turn", "unit", "game"), [("[paper]", 1.0, 1.0), ("[rock]", 0.5, 0.0), ("[scissors]", 0.0, -1.0)]
)
@pytest.mark.parametrize("seat", [0, 1])
def test_a_game_is_worth_what_it_gives_the_policys_seat(turn: str, unit: float, game: float, seat: int) -> None:
    for reward, worth in (("unit", unit), ("game", game)):
        first, steps = played([turn], seat=seat, reward=reward, **ROCK)
        assert (steps[-1].done, steps[-1].reward) == (True, worth)
        assert f"You are Player {seat}" in first
        assert steps[-1].info["seat"] == seat


def test_only_the_end_is_rewarded() -> None:
    _, steps = played(["[paper]"] * 3, **{**ROCK, "kwargs": {"num_rounds": 3}})
    assert [step.reward for step in steps[:-1]] == [None] * (len(steps) - 1)


def test_a_refused_move_is_answered_and_a_second_loses() -> None:
    _, steps = played(["my move is 4", "still thinking"], id="TicTacToe-v0")
    assert "invalid move" in steps[0].observation
    assert not steps[0].done
    assert (steps[1].done, steps[1].reward, steps[1].info["refused"]) == (True, 0.0, 2)


def test_moves_that_a_game_would_refuse_for_ever_lose() -> None:
    _, steps = played(["?"] * 50, id="Poker-v0", max_refused=3, reward="game")
    assert (len(steps), steps[-1].reward) == (3, -1.0)


def test_only_moves_in_a_row_are_counted_as_stalling() -> None:
    options: dict[str, Any] = {
        "id": "Sokoban-v0",
        "max_refused": 2,
        "kwargs": {"max_turns": 6, "dim_room": (6, 6), "num_boxes": 3},
    }
    _, steps = played(["[up]", "?", "[down]", "?", "[left]", "?", "[right]", "?", "[down]"], **options)
    assert steps[-1].info["refused"] > 2


def test_max_turns_ends_a_game_as_lost() -> None:
    _, steps = played(["[up]", "[down]"] * 9, id="Sokoban-v0", max_turns=4, reward="game")
    assert (len(steps), steps[-1].reward) == (4, -1.0)


def test_words_in_place_of_a_reward_are_a_lost_game() -> None:
    _, steps = played(["?"] * 9, id="ThreeCardMonte-v0", reward="game")
    assert steps[-1].reward == -1.0


def test_seat_and_chance_of_a_task_are_those_of_all_its_samples() -> None:
    column = {"textarena": {"id": "GermanWhist-v0", "seed": 12, "seat": 1}}
    first = {played([], Task("t", "", metadata=column), seed)[0] for seed in range(3)}
    assert len(first) == 1
    assert "Player 1" in first.pop()
    of_task = {played([], seed=seed, id="GermanWhist-v0", seed_of="task")[0] for seed in range(3)}
    assert len(of_task) == 1
    assert played([], Task("t2", ""), id="GermanWhist-v0", seed_of="task")[0] not in of_task


def test_a_drawn_seat_is_each_of_them_in_time() -> None:
    seats = {played(["[3]"], seed=seed, seat=-1, max_turns=1)[1][0].info["seat"] for seed in range(16)}
    assert seats == {0, 1}


def test_settings_of_the_options_are_not_those_of_another_game() -> None:
    column = {"textarena": {"id": "TicTacToe-v0"}}
    assert "Tic Tac Toe" in played([], Task("t", "", metadata=column), **ROCK)[0]


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ({"id": "Wordle-v0"}, "task t9: Wordle-v0 .* downloads"),
        ({"id": "Tennis-v0"}, "task t9: .*no game 'Tennis-v0'"),
        ({"seed": -1}, "task t9: column textarena .*seed"),
        ({"name": "TicTacToe-v0"}, "task t9: column textarena .*name"),
        ("TicTacToe-v0", "task t9: column textarena"),
        ({"seats": 3}, "task t9: TicTacToe-v0 is a game for 2 players, not 3"),
        ({"seat": 2}, "task t9: TicTacToe-v0 has the seats 0 to 1"),
        ({"kwargs": {"width": 9}}, "task t9: TicTacToe-v0 does not start with .*width"),
        ({"id": "Taboo-v0"}, "task t9: .*textarena-team"),
        ({"id": "Tak-v0"}, 'task t9: .*set opponent to "replies"'),
    ],
)
def test_a_task_that_names_no_game_says_what_is_wrong(column: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        played([], Task("t9", "", metadata={"textarena": column}))


@pytest.mark.parametrize("options", [{"id": "Chess-v0"}, {"id": "Taboo-v0"}, {"seats": 5}, {"kwargs": {"x": 1}}])
def test_a_game_of_the_options_is_refused_when_the_worker_opens(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="TicTacToe-v0|Chess-v0|Taboo-v0"):
        asyncio.run(TextArena.open(TextArenaOptions(**options)))


@pytest.mark.parametrize("options", [{"replies": ["a"]}, {"opponent": "replies"}, {"seat": -2}, {"max_refused": 0}])
def test_options_without_effect_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TextArenaOptions(**options)


def test_a_scripted_opponent_never_loses_for_the_policy_by_forfeit() -> None:
    with pytest.raises(ValueError, match="refuses the move 'hello' .* correct replies"):
        played(["[4]"], opponent="replies", replies=("hello",))


def test_a_model_may_play_the_other_seat_and_forfeit() -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "[0]" if len(prompts) == 1 else "I resign"

    assert TextArena(TextArenaOptions(opponent="engine", engine="big")).needs_engines == ("big",)
    _, steps = played(["[4]", "[8]"], opponent="engine", engine=ScriptedClient("opponent", answer))
    assert "[Player 0] [4]" in prompts[0]
    assert steps[0].info["refused_of_others"] == 0
    assert (steps[1].done, steps[1].reward, steps[1].info["refused_of_others"]) == (True, 1.0, 2)
    assert "[4]" in prompts[-1], "it keeps the conversation of its seat"


def test_a_model_of_the_other_seat_is_asked_as_the_options_say() -> None:
    asked: list[tuple[str, int, float]] = []

    class Client(ScriptedClient):
        async def generate(self, prompt: Any, max_new_tokens: int = 256, **settings: Any) -> Any:
            asked.append((prompt[0].text, max_new_tokens, settings["temperature"]))
            return await super().generate(prompt, max_new_tokens, **settings)

    options = {"engine_prompt": "Play well.", "engine_max_new_tokens": 7, "engine_temperature": 0.5}
    played(["[4]"], opponent="engine", engine=Client("opponent", lambda _: "[0]"), **options)
    assert asked == [("Play well.", 7, 0.5)]


def test_the_policys_own_messages_are_not_repeated() -> None:
    _, steps = played(["my own words [4]"])
    assert "my own words" not in steps[0].observation


@pytest.mark.parametrize(
    ("text", "after", "move"),
    [
        ("[1]", "", "[1]"),
        ("<think>[1] or [2]</think>[3]", "</think>", "[3]"),
        ("</think>[1]</think> [2]", "</think>", " [2]"),
        ("<think>[1] or", "</think>", ""),
    ],
)
def test_the_move_is_the_text_after_the_last_mark(text: str, after: str, move: str) -> None:
    assert moved(text, after) == move


def test_silence_of_a_game_is_still_a_turn() -> None:
    assert joined([]) == "It is your turn."
    assert joined([("", "Round 1"), ("Player 1", "[rock]")]) == "Round 1\n[Player 1] [rock]"


def test_a_team_has_a_conversation_for_each_seat_and_one_result() -> None:
    options = TextArenaOptions(
        id="Taboo-v0-animals", opponent="replies", replies=("a clue", "[zebra]"), kwargs={"max_rounds": 2}, seat=2
    )
    session = ScriptedSession(["a clue", "[dog]"] * 20)
    asyncio.run(TextArenaTeam(options).run(Task("t", "Play."), 3, session))
    assert session.heard[0] == "'Play.'", "a root of its own for the second seat"
    assert any("Clue Giver for Team 1" in str(heard) for heard in session.heard)
    assert any("Guesser for Team 1" in str(heard) for heard in session.heard)
    rewards = [heard for heard in session.heard if isinstance(heard, float)]
    assert len(rewards) == 1
    assert rewards[0] in (0.0, 0.5, 1.0)


def test_the_teams_defaults_are_a_game() -> None:
    session = ScriptedSession([])
    asyncio.run(TextArenaTeam().run(TASK, 3, session))
    assert session.heard[-1] in (0.0, 0.5, 1.0)


def test_a_game_that_ends_before_the_policys_first_move_gives_no_sample() -> None:
    options = {
        "id": "Taboo-v0",
        "opponent": "replies",
        "replies": ("a clue", "[zebra]"),
        "kwargs": {"max_rounds": 1},
        "seat": 2,
    }
    with pytest.raises(RuntimeError, match="before the policy's first turn"):
        asyncio.run(TextArenaTeam(TextArenaOptions(**options)).run(TASK, 3, ScriptedSession([])))  # type: ignore[arg-type]
