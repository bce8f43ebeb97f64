# SPDX-License-Identifier: Apache-2.0
"""The task: digit strings to be sorted, judged by equality. Pure functions of a seed."""

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
    """Disjoint by prompt, alike in distribution: drawn as one pool, shuffled, then cut."""

    train: list[Item]
    check: list[Item]
    """Read by the warm start's stop rule only."""
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
    path.write_text("".join(json.dumps(item._asdict()) + "\n" for item in items))
