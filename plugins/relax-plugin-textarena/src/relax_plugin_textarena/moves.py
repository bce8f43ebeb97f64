# SPDX-License-Identifier: Apache-2.0
"""Random moves from a game's templates; the game itself checks if a move is legal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from relax_plugin_textarena.games import SHOWN

if TYPE_CHECKING:  # importing TextArena takes a second
    from relax_plugin_textarena.match import Match

DRAWS = 30_000
"""Maximum number of draws before a seat counts as having no legal move: seven times the moves of the largest board."""
_PLACE = re.compile(r"<([^<>]+)>")
_SHOWN = re.compile(r"\[[^\[\]]+\]")


def made(template: str, random: Random) -> str:
    """Fill the placeholders of a template at random, from left to right."""
    text, end = "", 0
    for place in _PLACE.finditer(template):
        text += template[end : place.start()]
        text += _filled(place[1], text, random)
        end = place.end()
    return text + template[end:]


def legal_move(match: Match, templates: Sequence[str], shown_text: str, random: Random) -> str:
    """Draw a legal move of the seat whose turn it is; `shown_text` is the newest text that listed moves in brackets.

    The game checks each move on a copy, so this function needs no rules. Raises RuntimeError if no move is legal.
    """
    if tuple(templates) == (SHOWN,):
        shown = shown_moves(shown_text)
        random.shuffle(shown)
        tries = iter(shown)
    else:
        tries = (made(random.choice(templates), random) for _ in range(DRAWS))
    seen: set[str] = set()
    for move in tries:
        if move not in seen and match.allows(move):
            return move
        seen.add(move)
    raise RuntimeError(f"{match.variant} has no legal move for seat {match.seat} among {len(seen)} tried moves")


def shown_moves(text: str) -> list[str]:
    """Return the distinct texts in brackets, in order."""
    return list(dict.fromkeys(_SHOWN.findall(text)))


def _filled(place: str, before: str, random: Random) -> str:
    if place == "near":
        return "".join(chr(ord(mark) + random.choice((-1, 0, 1))) for mark in before[-2:])
    if numbers := re.fullmatch(r"(\d+)-(\d+)", place):
        return str(random.randint(int(numbers[1]), int(numbers[2])))
    if letters := re.fullmatch(r"([A-Za-z])-([A-Za-z])", place):
        return chr(random.randint(ord(letters[1]), ord(letters[2])))
    return random.choice(place.split(","))
