# SPDX-License-Identifier: Apache-2.0
"""The task: a question for the sum of two numbers, as a chat. Pure functions of a seed."""

from __future__ import annotations

import json
from itertools import combinations_with_replacement
from pathlib import Path
from random import Random
from typing import NamedTuple

LARGEST = 19
NUM_EVAL_PAIRS = 64


class Split(NamedTuple):
    """Two lists of (first, second) addends without a common pair; (7, 12) and (12, 7) are the same pair."""

    train: list[tuple[int, int]]
    held_out: list[tuple[int, int]]


def split(seed: int) -> Split:
    random = Random(f"smollm {seed}")
    pairs = list(combinations_with_replacement(range(LARGEST + 1), 2))
    random.shuffle(pairs)
    held_out, train = _both_orders(pairs[:NUM_EVAL_PAIRS]), _both_orders(pairs[NUM_EVAL_PAIRS:])
    random.shuffle(train)
    return Split(train, held_out)


def _both_orders(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [*dict.fromkeys(order for first, second in pairs for order in ((first, second), (second, first)))]


def write(sums: list[tuple[int, int]], path: Path) -> None:
    """Write one row per sum: rewards compare with `answer`, `relax train smollm algorithm=sft` learns `completion`."""
    path.write_text("".join(json.dumps(_row(*addends)) + "\n" for addends in sums), encoding="utf-8")


def _row(first: int, second: int) -> dict[str, object]:
    question = {"role": "user", "content": f"What is {first} + {second}?"}
    return {"prompt": [question], "answer": str(first + second), "completion": str(first + second)}
