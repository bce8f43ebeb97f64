# SPDX-License-Identifier: Apache-2.0
"""The task: a noisy picture with a disc somewhere; which colour is it? Pure functions of a seed."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 220), "yellow": (225, 205, 50)}
QUESTION = "which colour ?"
SIDE = 32
NUM_TRAIN, NUM_CHECK, NUM_EVAL = 1024, 128, 256


class Item(NamedTuple):
    picture: str
    """Path below the recipe's folder."""
    answer: str


class Split(NamedTuple):
    train: list[Item]
    check: list[Item]
    """Read by the warm start's stop rule only."""
    held_out: list[Item]


def split(folder: Path, seed: int) -> Split:
    """Draw and save all pictures."""
    from PIL import Image

    random = Random(f"colours {seed}")
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    items: list[Item] = []
    for number in range(NUM_TRAIN + NUM_CHECK + NUM_EVAL):
        answer = random.choice(list(COLOURS))
        name = f"pictures/{number:05}.png"
        Image.fromarray(draw(answer, random)).save(folder / name)
        items.append(Item(name, answer))
    return Split(items[:NUM_TRAIN], items[NUM_TRAIN:-NUM_EVAL], items[-NUM_EVAL:])


def draw(colour: str, random: Random) -> np.ndarray:
    """uint8 [side, side, 3]."""
    import numpy as np

    noise = np.random.default_rng(random.getrandbits(32))
    pixels = noise.integers(60, 160, (SIDE, SIDE, 3)).astype(np.float64)
    radius = random.uniform(6, 11)
    x, y = (random.uniform(radius, SIDE - radius) for _ in range(2))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    inside = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
    pixels[inside] = np.array(COLOURS[colour]) + noise.normal(0, 25, (int(inside.sum()), 3))
    return pixels.clip(0, 255).astype(np.uint8)


def write(items: list[Item], path: Path) -> None:
    path.write_text("".join(json.dumps(row(item)) + "\n" for item in items))


def row(item: Item) -> dict[str, object]:
    parts = [{"type": "image", "image": item.picture}, {"type": "text", "text": QUESTION}]
    return {"prompt": [{"role": "user", "content": parts}], "answer": item.answer, "completion": item.answer}
