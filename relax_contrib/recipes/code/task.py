# SPDX-License-Identifier: Apache-2.0
"""The task: write a program from the description of a calculation with three numbers. Pure functions of a seed.

A program reads lines of three numbers and prints one number for each. Only the output counts, so `b + a` is as good as
`a + b`. A description has a head, an operation, two numbers and a tail. Held-out descriptions never occur in training.
"""

from __future__ import annotations

from itertools import permutations, product
from random import Random
from typing import NamedTuple

OPEN = "```python\nfor line in open(0):\n    a, b, c = map(int, line.split())\n    print("
CLOSE = ")\n```"
"""Beginning and end of every program, one token each: the policy learns only the printed expression."""
HEADS = {"": "{}", "twice": "2 * {}", "negative": "- {}"}
OPERATIONS = {
    "sum": "( {} + {} )", "difference": "( {} - {} )", "product": "( {} * {} )", "larger": "max( {} , {} )",
    "smaller": "min( {} , {} )",
}  # fmt: skip
TAILS = {"": "{}", "plus": "{} + {}", "minus": "{} - {}", "times": "{} * {}"}
WORDS = (*filter(None, HEADS), *OPERATIONS, *filter(None, TAILS), "of", "and", "a", "b", "c", "2")
MARKS = ("?", "+", "-", "*", ",", "(", ")", "max(", "min(")
PARTS = (tuple(HEADS), tuple(OPERATIONS), tuple(permutations("abc")), tuple(TAILS))
NUM_EVAL, NUM_LINES = 128, 4


class Item(NamedTuple):
    head: str
    operation: str
    names: tuple[str, ...]
    tail: str

    @property
    def question(self) -> str:
        first, second, third = self.names
        said = [self.head, self.operation, "of", first, "and", second, *([self.tail, third] if self.tail else ()), "?"]
        return " ".join(filter(None, said))

    @property
    def expression(self) -> str:
        """The expression in Python. `twice sum of a and b plus c ?` is `2 * (a + b) + c`."""
        first, second, third = self.names
        return TAILS[self.tail].format(HEADS[self.head].format(OPERATIONS[self.operation].format(first, second)), third)

    @property
    def program(self) -> str:
        return f"{OPEN} {self.expression} {CLOSE}"

    def case(self, random: Random) -> dict[str, str]:
        """Return input lines and the right output; the numbers are large and differ, so wrong programs rarely pass."""
        lines = [random.sample(range(2, 100), 3) for _ in range(NUM_LINES)]
        values = [eval(self.expression, {}, dict(zip("abc", line, strict=True))) for line in lines]
        return {"input": "\n".join(" ".join(map(str, line)) for line in lines), "output": "\n".join(map(str, values))}


class Split(NamedTuple):
    train: list[Item]
    held_out: list[Item]


def split(seed: int) -> Split:
    items = [Item(*chosen) for chosen in product(*PARTS)]
    Random(f"code {seed}").shuffle(items)
    return Split(items[NUM_EVAL:], items[:NUM_EVAL])


def misread(item: Item, random: Random) -> Item:
    """Return a copy of the item with one part changed; its program may still be right, as with a sum's numbers swapped."""
    part = random.randrange(len(PARTS))
    others = [value for value in PARTS[part] if value != item[part]]
    return Item(*item[:part], random.choice(others), *item[part + 1 :])
