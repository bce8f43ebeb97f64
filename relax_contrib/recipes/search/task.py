# SPDX-License-Identifier: Apache-2.0
"""The task: questions about people whom only the corpus knows. Pure functions of a seed.

Nobody who is asked about in training is asked about in the held-out tasks, and what is known of a person is drawn at random:
an answer can be had by a search alone. First and last names are shared, so that a search has to name both.
"""

from __future__ import annotations

from itertools import product
from random import Random
from typing import NamedTuple

FIRST = (
    "ada", "ben", "cleo", "dan", "eva", "finn", "gia", "hugo", "ida", "jon", "kim", "leo", "mia", "ned", "olga", "paul",
    "rosa", "sam",
)  # fmt: skip
LAST = (
    "adams", "baker", "clark", "davis", "evans", "fisher", "green", "hill", "irwin", "jones", "king", "lopez", "moore",
    "nash", "owens", "price", "reed", "stone",
)  # fmt: skip
FACTS = {
    "city": ("oslo", "rome", "paris", "cairo", "lima", "tokyo"),
    "pet": ("cat", "dog", "fish", "bird", "mouse", "snake"),
    "tree": ("oak", "elm", "fir", "ash", "yew", "pine"),
}
ASKS = "of"
CALL, CLOSE = '<tool_call>{"name":"search","arguments":{"query":"', '"}}</tool_call>'
"""Tokens of their own: what a call says is learnt, how JSON is written is not the lesson."""
NOTHING = "nothing"
WORDS = (*FIRST, *LAST, *FACTS, *(word for known in FACTS.values() for word in known), ASKS, "?", CALL, CLOSE, NOTHING)
HELD_OUT = 86


class Person(NamedTuple):
    name: str
    facts: dict[str, str]

    @property
    def text(self) -> str:
        return " ".join([self.name, *(f"{kind} {value}" for kind, value in self.facts.items())])

    def question(self, kind: str) -> str:
        return f"{kind} {ASKS} {self.name} ?"


class People(NamedTuple):
    """Everybody is in the corpus."""

    train: list[Person]
    held_out: list[Person]


def people(seed: int) -> People:
    random = Random(f"search {seed}")
    everybody = [_person(f"{first} {last}", random) for first, last in product(FIRST, LAST)]
    random.shuffle(everybody)
    return People(everybody[HELD_OUT:], everybody[:HELD_OUT])


def _person(name: str, random: Random) -> Person:
    kinds = random.sample(list(FACTS), len(FACTS))
    return Person(name, {kind: random.choice(FACTS[kind]) for kind in kinds})


def call(query: str) -> str:
    """A turn that searches, as the warm start shows it."""
    return f"{CALL} {query} {CLOSE}"
