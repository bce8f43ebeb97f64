# SPDX-License-Identifier: Apache-2.0
"""One game of TextArena between seats, with its own chance: what each seat is told, what it says, who is next, who won.

Games draw from Python's global generator. Each match keeps a state of it for itself and puts that in its place only while its
game works, so that the many matches of a process do not touch each other.
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
"""TextArena's own worth of a game that ends by moves that it refuses, where the game names none."""


def game_of(variant: str) -> Game:
    """Return the game that a variant, such as `Nim-v0-large`, is of. Raises ValueError where that can't be played."""
    if variant not in ENV_REGISTRY:
        raise ValueError(f"TextArena has no game {variant!r}; its names are such as TicTacToe-v0 and Nim-v0-large")
    folder = ENV_REGISTRY[variant].entry_point.split(".")[2]
    if folder in BARRED:
        raise ValueError(f"{variant} of TextArena can't be played: {BARRED[folder]}; choose another game")
    if folder not in GAMES:
        raise ValueError(f"{variant} of TextArena was never tried with Relax; choose another game")
    return GAMES[folder]


class Match:
    """One game.

        made -> (heard, say) by the seat whose turn it is ... -> done -> value of each seat

    Invariants:
    - The game is only ever touched inside `_alone`: with this match's chance in place, and its printing thrown away.
    - A message is heard once by each seat; a seat does not hear itself.
    """

    def __init__(self, variant: str, settings: Mapping[str, Any], seats: int, seed: int) -> None:
        low, high = game_of(variant).seats
        if seats and not low <= seats <= high:
            allowed = f"{low}" if low == high else f"{low} to {high}"
            raise ValueError(f"{variant} is a game for {allowed}, not {seats}; set seats")
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
        """The seat whose turn it is."""
        return int(self._rules.state.current_player_id)

    def heard(self, seat: int) -> list[tuple[str, str]]:
        """Take what a seat was told since it last heard: (who, text), the game's own under an empty name."""
        state = self._rules.state
        with self._alone():
            if seat == self.seat and not self.done:
                _, told = self._rules.get_observation()
            else:
                told, state.observations[seat] = state.observations.get(seat, []), []
        named = state.role_mapping or {}
        return [
            ("" if who == textarena.GAME_ID else named.get(who, f"Player {who}"), text)
            for who, text, _ in told
            if who != seat and isinstance(text, str)  # some games file an action under the wrong arguments
        ]

    def say(self, text: str) -> bool:
        """Let the seat whose turn it is say something; return False where the game refused it as a move."""
        with self._alone():
            return self._say(self._game, text)

    def allows(self, text: str) -> bool:
        """Tell whether the game would take this as a move of the seat whose turn it is, by trying it on a copy."""
        state = self._rules.state
        logs, state.logs = state.logs, []  # they only grow, and nothing of a game reads them
        chance = self._chance
        try:
            with self._alone():
                return self._say(deepcopy(self._game), text)
        except Exception:  # a game that breaks on a move does not allow it
            return False
        finally:
            state.logs, self._chance = logs, chance

    def value(self, seat: int) -> float:
        """Worth of the game to a seat, as the game says it: -1 to 1, alone mostly 0 to 1."""
        state = self._rules.state
        reward = (state.rewards or {}).get(seat)
        if isinstance(reward, str) and state.game_info[seat]["invalid_move"]:
            return FORFEIT  # four games give a reason in its place when they have refused too many moves
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise RuntimeError(f"{self.variant} ended with the rewards {state.rewards}, none for seat {seat}")
        return float(reward)

    def reason(self, seat: int) -> str:
        """The game's own words for how it ended."""
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
