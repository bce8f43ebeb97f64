# SPDX-License-Identifier: Apache-2.0
"""The task: questions about people in a corpus. Pure functions of a seed.

Training and held-out tasks ask about different people, and the facts about a person are random, so only a search gives
the answer. People share first and last names, so a query needs both.
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
"""Beginning and end of every call, one token each: the policy learns the query, not the JSON."""
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
    """The people of training and held-out tasks; the corpus contains all people."""

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
    """Return a turn that searches, in the form that the warm start teaches."""
    return f"{CALL} {query} {CLOSE}"
