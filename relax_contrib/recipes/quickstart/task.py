# SPDX-License-Identifier: Apache-2.0
"""The task: sort a string of digits; the answer must match exactly. Pure functions of a seed."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import NamedTuple

LENGTHS = (2, 6)
NUM_TRAIN, NUM_CHECK, NUM_EVAL = 4096, 256, 512


class Item(NamedTuple):
    prompt: str
    answer: str


class Split(NamedTuple):
    """Three sets with disjoint prompts and the same distribution: one pool is drawn, shuffled and cut."""

    train: list[Item]
    check: list[Item]
    """Items for the stopping rule of the warm start only."""
    held_out: list[Item]


def split(seed: int) -> Split:
    random = Random(f"quickstart {seed}")
    pool: dict[str, str] = {}
    while len(pool) < NUM_TRAIN + NUM_CHECK + NUM_EVAL:
        digits = "".join(random.choices("0123456789", k=random.randint(*LENGTHS)))
        pool[f"s{digits}="] = "".join(sorted(digits))
    items = [Item(*pair) for pair in pool.items()]
    random.shuffle(items)
    return Split(items[:NUM_TRAIN], items[NUM_TRAIN:-NUM_EVAL], items[-NUM_EVAL:])


def write(items: list[Item], path: Path) -> None:
    """Write rows with `answer` for rewards, `completion` for SFT, `chosen` and `rejected` for DPO."""
    path.write_text("".join(json.dumps(row(item)) + "\n" for item in items))


def row(item: Item) -> dict[str, str]:
    return {**item._asdict(), "completion": item.answer, "chosen": item.answer, "rejected": mistaken(item)}


def mistaken(item: Item) -> str:
    """Return a wrong answer: the digits in a wrong order or, if all digits are equal, with one digit changed."""
    random = Random(f"mistake {item.prompt}")
    digits = list(item.answer)
    if len(set(digits)) == 1:
        place = random.randrange(len(digits))
        digits[place] = str((int(digits[place]) + random.randint(1, 9)) % 10)
    while "".join(digits) == item.answer:
        random.shuffle(digits)
    return "".join(digits)
