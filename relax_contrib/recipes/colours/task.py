# SPDX-License-Identifier: Apache-2.0
"""The task: name the colour of a disc in a noisy picture. Pure functions of a seed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from relax_contrib.recipes.shown import Item, save_picture

if TYPE_CHECKING:
    import numpy as np

COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 220), "yellow": (225, 205, 50)}
QUESTION = "which colour ?"
SIDE = 32


def items(folder: Path, seed: int, count: int) -> list[Item]:
    """Draw items and save their pictures."""
    random = Random(f"colours {seed}")
    return [_item(folder, f"pictures/{number:05}.png", random) for number in range(count)]


def _item(folder: Path, name: str, random: Random) -> Item:
    answer = random.choice(list(COLOURS))
    save_picture(draw(answer, random), folder / name)
    return Item((("image", name),), QUESTION, answer)


def draw(colour: str, random: Random) -> np.ndarray:
    """Return a picture, uint8 [side, side, 3]."""
    import numpy as np

    noise = np.random.default_rng(random.getrandbits(32))
    pixels = noise.integers(60, 160, (SIDE, SIDE, 3)).astype(np.float64)
    radius = random.uniform(6, 11)
    x, y = (random.uniform(radius, SIDE - radius) for _ in range(2))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    inside = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
    pixels[inside] = np.array(COLOURS[colour]) + noise.normal(0, 25, (int(inside.sum()), 3))
    return pixels.clip(0, 255).astype(np.uint8)
