# SPDX-License-Identifier: Apache-2.0
"""Players of the seats that the policy does not have: legal moves at random, fixed replies, or a model of `[[engines]]`.

A scripted one never forfeits: a policy would learn to win by the other's mistakes. A model may, by the game's rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from relax_core.api import Message, ModelClient
from relax_plugin_textarena.games import Game
from relax_plugin_textarena.moves import legal_move, shown_moves

if TYPE_CHECKING:  # it imports TextArena, which takes a second
    from relax_plugin_textarena.match import Match


class Opponent(ABC):
    """Player of one seat."""

    scripted: bool = True
    """True: a move that the game refuses is a fault of the set-up."""

    @abstractmethod
    async def move(self, match: Match, told: str, heard: Sequence[tuple[str, str]]) -> str:
        """Say something in the seat whose turn it is: `told` is what it heard since its last move as one text."""


class RandomMoves(Opponent):
    """Legal moves at random."""

    def __init__(self, game: Game, seed: int) -> None:
        self._game, self._random = game, Random(seed)
        self._shown = ""

    async def move(self, match: Match, told: str, heard: Sequence[tuple[str, str]]) -> str:
        own = "\n".join(text for who, text in heard if not who and shown_moves(text))
        self._shown = own or self._shown
        return legal_move(match, self._game.moves, self._shown, self._random)


class Replies(Opponent):
    """The same replies in turn, for ever."""

    def __init__(self, replies: Sequence[str]) -> None:
        self._replies, self._next = tuple(replies), 0

    async def move(self, match: Match, told: str, heard: Sequence[tuple[str, str]]) -> str:
        reply = self._replies[self._next % len(self._replies)]
        self._next += 1
        return reply


class EngineOpponent(Opponent):
    """A model that keeps the conversation of its seat."""

    scripted = False

    def __init__(self, client: ModelClient, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> None:
        self._client, self._max_new_tokens, self._temperature = client, max_new_tokens, temperature
        self._seeds = Random(seed)
        self._messages = [Message("system", prompt)] if prompt else []

    async def move(self, match: Match, told: str, heard: Sequence[tuple[str, str]]) -> str:
        self._messages.append(Message("user", told))
        said = await self._client.generate(
            tuple(self._messages), self._max_new_tokens, temperature=self._temperature, seed=self._seeds.getrandbits(31)
        )
        self._messages.append(Message("assistant", said.text))
        return said.text
