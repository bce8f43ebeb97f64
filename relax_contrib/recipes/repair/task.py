# SPDX-License-Identifier: Apache-2.0
"""The task: a repository of three modules, one of which does not do what its comment says. Pure functions of a seed.

A module has one function of two numbers. The test names the module that is wrong, and nothing else tells: neither the prompt,
which names all three, nor a look at another module. The fix follows from both lines of that module, its comment and its code.
Sets of modules that are held out are never seen in training.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from random import Random
from typing import NamedTuple

MODULES = (
    "area", "cost", "dose", "fuel", "gain", "heat", "load", "mass", "rate", "size", "span", "tax",
)  # fmt: skip
OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("sum", lambda a, b: a + b),
    "sub": ("difference", lambda a, b: a - b),
    "mul": ("product", lambda a, b: a * b),
    "mod": ("remainder", lambda a, b: a % b),
    "max": ("larger", max),
    "min": ("smaller", min),
}
"""Names in the code, with the word of the comment."""
CODE = """\
from operator import *
# {word} of a and b
def {module} ( a , b ) :
    return {operation} ( a , b )
"""
TEST = """\
import {modules}
for module, a, b, value in {cases}:
    if getattr(module, module.__name__)(a, b) != value:
        raise SystemExit(print("FAIL", module.__name__ + ".py") or 1)
print("OK")
"""
TEST_FILE = "test.py"
RUN_TEST, LOOK, EDIT, BETWEEN, IN = f"python {TEST_FILE}", "cat", "sed -i 's/", "/", "/'"
SUBMIT = "submit"
WORDS = (
    "fix", "python", TEST_FILE, "FAIL", "OK", LOOK, BETWEEN, IN, SUBMIT, "from", "operator", "import", "*", "#", "of", "a",
    "and", "b", "def", "(", ",", ")", ":", "return", *MODULES, *(f"{module}.py" for module in MODULES), *OPERATIONS,
    *(word for word, _ in OPERATIONS.values()),
)  # fmt: skip
PHRASES = (EDIT,)
SIZE = 3
"""Modules of a repository."""
HELD_OUT_SETS = 44


class Repository(NamedTuple):
    modules: tuple[str, ...]
    asked: tuple[str, ...]
    """Operations that the comments ask for, a module each."""
    broken: int
    """Place of the module that is wrong."""
    found: str
    """Operation that it has instead."""

    @property
    def question(self) -> str:
        return " ".join(["fix", *map(file_of, self.modules)])

    def operation(self, place: int) -> str:
        """Operation in the code of a module."""
        return self.found if place == self.broken else self.asked[place]

    def code(self, place: int) -> str:
        word = OPERATIONS[self.asked[place]][0]
        return CODE.format(word=word, module=self.modules[place], operation=self.operation(place))

    def files(self, random: Random) -> dict[str, str]:
        """All that is in the box: the modules and the test."""
        cases = ", ".join(f"({name}, {a}, {b}, {value})" for name, a, b, value in self.cases(1, random))
        test = TEST.format(modules=", ".join(self.modules), cases=f"[{cases}]")
        return {TEST_FILE: test} | {file_of(name): self.code(place) for place, name in enumerate(self.modules)}

    def cases(self, count: int, random: Random) -> list[tuple[str, int, int, int]]:
        """Module, two numbers and what is right, `count` of each module; no two operations have the same value."""
        pairs = [_telling(random) for _ in range(count)]
        return [
            (module, a, b, OPERATIONS[operation][1](a, b))
            for module, operation in zip(self.modules, self.asked, strict=True)
            for a, b in pairs
        ]


class Split(NamedTuple):
    train: list[Repository]
    held_out: list[Repository]


def split(seed: int, num_train: int, num_held_out: int) -> Split:
    """Draw repositories of sets of modules that are apart."""
    random = Random(f"repair {seed}")
    sets = list(combinations(MODULES, SIZE))
    random.shuffle(sets)
    parts = ((sets[HELD_OUT_SETS:], num_train), (sets[:HELD_OUT_SETS], num_held_out))
    return Split(*([_drawn(random.choice(some), random) for _ in range(count)] for some, count in parts))


def _drawn(modules: tuple[str, ...], random: Random) -> Repository:
    asked = tuple(random.sample(list(OPERATIONS), SIZE))
    broken = random.randrange(SIZE)
    found = random.choice([operation for operation in OPERATIONS if operation != asked[broken]])
    return Repository(tuple(random.sample(modules, SIZE)), asked, broken, found)


def _telling(random: Random) -> tuple[int, int]:
    pairs = list(product(range(2, 30), repeat=2))
    while True:
        a, b = random.choice(pairs)
        if len({value(a, b) for _, value in OPERATIONS.values()}) == len(OPERATIONS):
            return a, b


def file_of(module: str) -> str:
    return f"{module}.py"


def look(module: str) -> str:
    return f"{LOOK} {file_of(module)}"


def edit(module: str, old: str, new: str) -> str:
    """Spaces are between the tokens of a command, as they are between those of the code."""
    return f"{EDIT} {old} {BETWEEN} {new} {IN} {file_of(module)}"


def shown(output: str) -> str:
    """An output as the agent shows it."""
    return " ".join(output.split())
