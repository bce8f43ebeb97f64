# SPDX-License-Identifier: Apache-2.0
"""The judge's task: is a response the answer? Pure functions of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from relax_contrib.recipes.quickstart.task import Item

RIGHT, WRONG = "y", "n"
SHARE_RIGHT = 0.4
"""Share of questions with the right answer on purpose. Mistakes leave some answers right too: in all, about 0.43."""


def questions(items: Sequence[Item], random: Random, count: int) -> list[Item]:
    """Draw questions to the judge, with the verdict as the answer."""
    return [_question(random.choice(items).answer, random) for _ in range(count)]


def _question(answer: str, random: Random) -> Item:
    response = answer if random.random() < SHARE_RIGHT else _mistaken(answer, random)
    return Item(f"{answer}:{response}?", RIGHT if response == answer else WRONG)


def _mistaken(answer: str, random: Random) -> str:
    """Return the answer with a mistake as a policy makes it: another order, digit or length."""
    digits, place = list(answer), random.randrange(len(answer))
    match random.choice(("order", "neighbours", "digit", "length")):
        case "order":
            random.shuffle(digits)
        case "neighbours":
            digits[place - 1], digits[place] = digits[place], digits[place - 1]
        case "digit":
            digits[place] = random.choice("0123456789")
            digits.sort()
        case "length":
            digits[place : place + 1] = random.choice(([], [digits[place]] * 2))
    return "".join(digits)
