# SPDX-License-Identifier: Apache-2.0
"""Every game that is not barred starts, takes moves and nonsense, ends, is worth something, and is the same again."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from relax_plugin_textarena.environment import TextArena, TextArenaOptions
from relax_plugin_textarena.games import BARRED, GAMES, SHOWN
from relax_plugin_textarena.match import Match, game_of
from relax_plugin_textarena.moves import made, shown_moves
from relax_plugin_textarena.opponents import RandomMoves
from textarena.envs.registration import ENV_REGISTRY

from relax_core.api import Action, Task


def folder_of(variant: str) -> str:
    return str(ENV_REGISTRY[variant].entry_point).split(".")[2]


FIRST = {folder_of(variant): variant for variant in reversed(ENV_REGISTRY)}
"""A variant of each game, the one that TextArena names first."""
VARIANTS = [name for name in ENV_REGISTRY if folder_of(name) in GAMES and not re.search("-(raw|train)", name)]
MOVES, TURNS = 12, 60
NONSENSE = ("garbage [", "", "I think [[", "[xyzzy]", "[-1 999 q]", "\x00 �")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note, and refuse, whatever wants to reach a network: a game may swallow the refusal."""
    reached: list[str] = []

    def refuse(*args: Any, **named: Any) -> None:
        reached.append(repr(args))
        raise OSError("this test has no network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield reached
    assert reached == []


def options(name: str, **more: Any) -> TextArenaOptions:
    scripted = {} if GAMES[name].moves else {"opponent": "replies", "replies": ("Hello.",)}
    return TextArenaOptions(id=FIRST[name], **{**scripted, **more})


async def episode(name: str, seed: int, moves: int) -> list[Any]:
    """What the policy saw and earned that made so many moves from the game's templates, and nonsense from then on."""
    game, chance = GAMES[name], Random(seed)
    environment = TextArena(options(name))
    observation = await environment.reset(Task("t", "Play."), seed)
    assert observation is not None
    seen: list[Any] = [observation.content]
    for turn in range(TURNS):
        shown = next(
            filter(None, map(shown_moves, reversed([text for text in seen if isinstance(text, str)]))), ["[0]"]
        )
        if turn >= moves or not game.moves:
            said = chance.choice(NONSENSE)
        else:
            said = chance.choice(shown) if game.moves == (SHOWN,) else made(chance.choice(game.moves), chance)
        step = await environment.step(Action(said, ()))
        seen.append(step.observation)
        if step.done:
            return [*seen, step.reward, dict(step.info)]
    raise AssertionError(f"{name} did not end in {TURNS} turns")


PLAYED = sorted(name for name, game in GAMES.items() if not game.team and name != "Tak")


def digest(played: list[Any]) -> str:
    return hashlib.md5(repr(played).encode()).hexdigest()


@pytest.fixture(scope="module")
def played_elsewhere() -> dict[str, str]:
    """Play every game in another process, whose order of hashes is another one; return the digests by game."""
    code = (
        "import asyncio, random, sys; random.seed(1); sys.path.insert(0, sys.argv[1]); import test_games as t\n"
        "for n in t.PLAYED: print(n, t.digest(asyncio.run(t.episode(n, 5, t.MOVES))))"
    )
    command = [sys.executable, "-c", code, __file__.rpartition("/")[0]]
    environment = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.rsplit(" ", 1) for line in told)


@pytest.mark.parametrize("name", PLAYED)
def test_a_game_ends_with_a_reward_and_is_the_same_after_another_and_in_another_process(
    name: str, played_elsewhere: dict[str, str]
) -> None:
    """The other process has another chance and plays no nonsense first, so a game that depends on either differs."""
    random.seed(2)
    np.random.seed(2)
    nonsense, moves = (asyncio.run(episode(name, 5, count)) for count in (0, MOVES))
    assert digest(moves) == played_elsewhere[name]
    for played in (nonsense, moves):
        assert 0.0 <= played[-2] <= 1.0
        assert played[0].strip(), "the first observation tells the rules"


def test_parallel_games_and_other_code_do_not_share_random_numbers() -> None:
    async def alone(name: str) -> list[Any]:
        return await episode(name, 3, MOVES)

    async def together() -> list[Any]:
        random.seed(7)
        np.random.seed(7)
        played = await asyncio.gather(*map(alone, names))
        assert (random.random(), float(np.random.rand())) == outside
        return played

    random.seed(7)
    np.random.seed(7)
    outside = random.random(), float(np.random.rand())
    names = ("Blackjack", "Sokoban", "PigDice", "KuhnPoker")
    assert asyncio.run(together()) == [asyncio.run(alone(name)) for name in names]


def test_another_seed_is_another_game() -> None:
    cards = {asyncio.run(episode("GermanWhist", seed, 0))[0] for seed in range(4)}
    assert len(cards) == 4


def test_every_game_of_textarena_is_offered_or_barred_with_a_reason() -> None:
    folders = set(FIRST)
    assert set(GAMES) | set(BARRED) == folders
    assert not set(GAMES) & set(BARRED)
    assert len(GAMES) >= 60
    for name in BARRED:
        with pytest.raises(ValueError, match="can't be played: "):
            game_of(FIRST[name])


def test_the_readme_counts_the_games_and_names_what_is_barred() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    table = readme.partition("| games | reason |\n|---|---|\n")[2].partition("\n\n")[0]
    assert {name for row in table.split("\n") for name in row.split("|")[1].strip().split(", ")} == set(BARRED)
    alone = sum(game.seats == (1, 1) for game in GAMES.values())
    assert f"Train on {len(GAMES)} games of" in readme
    assert (
        f"{len(VARIANTS)} with their variants: {alone} for one player, {len(GAMES) - alone} against opponents" in readme
    )


@pytest.mark.faults  # a search through all games
@pytest.mark.parametrize("name", sorted(name for name, game in GAMES.items() if game.seats[0] > 1 and game.moves))
def test_random_moves_are_never_refused(name: str) -> None:
    """Eight of them in each variant: games against nobody but them. Templates must fit the largest board, and the smallest."""

    async def moves(variant: str) -> None:
        match = Match(variant, {}, 0, 11)
        players = [RandomMoves(GAMES[name], seat) for seat in range(match.seats)]
        for _ in range(8):
            if match.done:
                break
            heard = match.heard(match.seat)
            assert match.say(await players[match.seat].move(match, "", heard))

    for variant in VARIANTS:
        if folder_of(variant) == name:
            asyncio.run(moves(variant))


def test_a_team_wins_and_loses_as_one() -> None:
    for name in (name for name, game in GAMES.items() if game.team):
        for seats in (4, 6):
            match, chance = Match(FIRST[name], {"max_rounds": 1}, seats, 1), Random(seats)
            while not match.done:
                match.heard(match.seat)
                match.say(chance.choice(("something", "[dog]", "[cat]", "[car]")))
            values = [match.value(seat) for seat in range(seats)]
            assert len(set(values[: seats // 2])) == 1
            assert len(set(values[seats // 2 :])) == 1
