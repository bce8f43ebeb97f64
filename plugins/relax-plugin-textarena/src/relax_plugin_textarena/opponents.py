# SPDX-License-Identifier: Apache-2.0
"""Players of the opponents' seats: random legal moves, fixed replies, or a model of `[[engines]]`.

If the game refuses a move of a scripted opponent, that is an error, because a policy would learn to win by such
mistakes. A model may lose by a refused move, as the game's rules say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from relax_core.api import Message, ModelClient
from relax_plugin_textarena.games import Game
from relax_plugin_textarena.moves import legal_move, shown_moves

if TYPE_CHECKING:  # importing TextArena takes a second
    from relax_plugin_textarena.match import Match


class Opponent(ABC):
    """The player of one seat."""

    scripted: bool = True
    """True if a move that the game refuses is a fault of the configuration."""

    @abstractmethod
    async def move(self, match: Match, text: str, heard: Sequence[tuple[str, str]]) -> str:
        """Return a move for the active seat. `text` joins `heard`, the messages since the seat's last move."""


class RandomMoves(Opponent):
    """An opponent that makes random legal moves."""

    def __init__(self, game: Game, seed: int) -> None:
        self._game, self._random = game, Random(seed)
        self._shown = ""

    async def move(self, match: Match, text: str, heard: Sequence[tuple[str, str]]) -> str:
        own = "\n".join(text for who, text in heard if not who and shown_moves(text))
        self._shown = own or self._shown
        return legal_move(match, self._game.moves, self._shown, self._random)


class Replies(Opponent):
    """An opponent that repeats a list of replies."""

    def __init__(self, replies: Sequence[str]) -> None:
        self._replies, self._next = tuple(replies), 0

    async def move(self, match: Match, text: str, heard: Sequence[tuple[str, str]]) -> str:
        reply = self._replies[self._next % len(self._replies)]
        self._next += 1
        return reply


class EngineOpponent(Opponent):
    """A model of an engine pool as opponent; the model sees the whole conversation of its seat."""

    scripted = False

    def __init__(self, client: ModelClient, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> None:
        self._client, self._max_new_tokens, self._temperature = client, max_new_tokens, temperature
        self._seeds = Random(seed)
        self._messages = [Message("system", prompt)] if prompt else []

    async def move(self, match: Match, text: str, heard: Sequence[tuple[str, str]]) -> str:
        self._messages.append(Message("user", text))
        said = await self._client.generate(
            tuple(self._messages), self._max_new_tokens, temperature=self._temperature, seed=self._seeds.getrandbits(31)
        )
        self._messages.append(Message("assistant", said.text))
        return said.text
