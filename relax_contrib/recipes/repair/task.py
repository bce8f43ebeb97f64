# SPDX-License-Identifier: Apache-2.0
"""The task: one of three modules contradicts its comment; find and repair this module. Pure functions of a seed.

A module has one function of two numbers. Only the test shows which module is wrong: the prompt names all three, and a
right module does not reveal the wrong one. The fix follows from the wrong module's comment and code. Held-out sets of
modules never occur in training.
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
"""Word in the comment and function of each operation, by the operation's name in the code."""
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
"""Number of modules in a repository."""
HELD_OUT_SETS = 44


class Repository(NamedTuple):
    modules: tuple[str, ...]
    asked: tuple[str, ...]
    """Correct operation of each module, in order; the module's comment states it."""
    broken: int
    """Index of the wrong module."""
    found: str
    """Operation in the code of the wrong module."""

    @property
    def question(self) -> str:
        return " ".join(["fix", *map(file_of, self.modules)])

    def operation(self, place: int) -> str:
        """Return the operation in the code of the module at index `place`."""
        return self.found if place == self.broken else self.asked[place]

    def code(self, place: int) -> str:
        word = OPERATIONS[self.asked[place]][0]
        return CODE.format(word=word, module=self.modules[place], operation=self.operation(place))

    def files(self, random: Random) -> dict[str, str]:
        """Return the contents of the box's files, by name: the modules and the test."""
        cases = ", ".join(f"({name}, {a}, {b}, {value})" for name, a, b, value in self.cases(1, random))
        test = TEST.format(modules=", ".join(self.modules), cases=f"[{cases}]")
        return {TEST_FILE: test} | {file_of(name): self.code(place) for place, name in enumerate(self.modules)}

    def cases(self, count: int, random: Random) -> list[tuple[str, int, int, int]]:
        """Return `count` cases per module: (module, a, b, right value); every wrong operation gives a wrong value."""
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
    """Draw training and held-out repositories; no set of modules occurs in both."""
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
    """Return the command that replaces an operation, with spaces between its tokens as in the code."""
    return f"{EDIT} {old} {BETWEEN} {new} {IN} {file_of(module)}"


def shown(output: str) -> str:
    """Return an output as the agent shows it to the model: words separated by single spaces."""
    return " ".join(output.split())
