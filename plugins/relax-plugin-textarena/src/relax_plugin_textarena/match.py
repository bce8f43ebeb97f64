# SPDX-License-Identifier: Apache-2.0
"""One game of TextArena: messages to each seat, moves, turn order and values, with a separate random state.

Games draw from Python's global random generator. Each match keeps its own state of this generator, and installs the
state only while its game runs. So matches in one process stay independent.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY

from relax_plugin_textarena.games import BARRED, GAMES, Game

FORFEIT = -1.0
"""TextArena's value of a game that ends by refused moves, used if the game returns a reason instead of a number."""


def game_of(variant: str) -> Game:
    """Return the game of a variant such as `Nim-v0-large`. Raises ValueError if the game can't be played."""
    if variant not in ENV_REGISTRY:
        raise ValueError(f"TextArena has no game {variant!r}; set a name such as TicTacToe-v0 or Nim-v0-large")
    folder = ENV_REGISTRY[variant].entry_point.split(".")[2]
    if folder in BARRED:
        raise ValueError(f"{variant} of TextArena can't be played: {BARRED[folder]}; choose another game")
    if folder not in GAMES:
        raise ValueError(f"{variant} of TextArena is not tested with Relax; choose another game")
    return GAMES[folder]


class Match:
    """A game in progress.

        made -> (heard, say) by the seat whose turn it is ... -> done -> value of each seat

    Invariants:
    - The game's code runs only inside `_alone`: with this match's random state installed, and its prints dropped.
    - Each seat gets each message once, and never its own messages.
    """

    def __init__(self, variant: str, settings: Mapping[str, Any], seats: int, seed: int) -> None:
        low, high = game_of(variant).seats
        if seats and not low <= seats <= high:
            allowed = f"{low}" if low == high else f"{low} to {high}"
            raise ValueError(f"{variant} is a game for {allowed} players, not {seats}; correct seats")
        self.seats, self.done = seats or low, False
        self.variant = variant
        small = seed % 2**32
        self._chance = random.Random(small).getstate()
        with self._alone():
            try:
                self._game = textarena.make(variant, **settings)
                self._game.reset(num_players=self.seats, seed=small)
            except TypeError as error:
                raise ValueError(f"{variant} does not start with {dict(settings)}: {error}; correct kwargs") from error
        self._rules = self._game
        while isinstance(self._rules, textarena.Wrapper):
            self._rules = self._rules.env

    @property
    def seat(self) -> int:
        """Return the seat whose turn it is."""
        return int(self._rules.state.current_player_id)

    def heard(self, seat: int) -> list[tuple[str, str]]:
        """Remove and return a seat's new messages as (player, text); the player of the game's own messages is empty."""
        state = self._rules.state
        with self._alone():
            if seat == self.seat and not self.done:
                _, messages = self._rules.get_observation()
            else:
                messages, state.observations[seat] = state.observations.get(seat, []), []
        named = state.role_mapping or {}
        return [
            ("" if who == textarena.GAME_ID else named.get(who, f"Player {who}"), text)
            for who, text, _ in messages
            if who != seat and isinstance(text, str)  # some games file an action under the wrong arguments
        ]

    def say(self, text: str) -> bool:
        """Make a move for the seat whose turn it is; return False if the game refused the move."""
        with self._alone():
            return self._say(self._game, text)

    def allows(self, text: str) -> bool:
        """Return True if the game would accept this move now; the move is tried on a copy of the game."""
        state = self._rules.state
        logs, state.logs = state.logs, []  # logs only grow and no game reads them, so they are not copied
        chance = self._chance
        try:
            with self._alone():
                return self._say(deepcopy(self._game), text)
        except Exception:  # a game that breaks on a move does not allow it
            return False
        finally:
            state.logs, self._chance = logs, chance

    def value(self, seat: int) -> float:
        """Return a seat's value, -1 to 1 (one player: mostly 0 to 1). Raises RuntimeError if it is not a number."""
        state = self._rules.state
        reward = (state.rewards or {}).get(seat)
        if isinstance(reward, str) and state.game_info[seat]["invalid_move"]:
            return FORFEIT  # four games return a reason instead of a number after too many refused moves
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise RuntimeError(f"{self.variant} ended with the rewards {state.rewards}, without seat {seat}")
        return float(reward)

    def reason(self, seat: int) -> str:
        """Return the game's own text about its end."""
        return str(self._rules.state.game_info.get(seat, {}).get("reason") or "")

    def _say(self, game: Any, text: str) -> bool:
        rules = game
        while isinstance(rules, textarena.Wrapper):
            rules = rules.env
        state, seat = rules.state, rules.state.current_player_id
        done, _ = game.step(action=text)
        if game is self._game:
            self.done = bool(done)
        return not getattr(state, "error_count", 0) and not state.game_info.get(seat, {}).get("invalid_move")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        outside = random.getstate()
        random.setstate(self._chance)
        try:
            with redirect_stdout(io.StringIO()):  # some games print as they go
                yield
        finally:
            self._chance = random.getstate()
            random.setstate(outside)
