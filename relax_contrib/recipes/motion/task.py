# SPDX-License-Identifier: Apache-2.0
"""The task: name the direction of a square that moves in a second of video. Pure functions of a seed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from relax_contrib.recipes.shown import Item, save_video

if TYPE_CHECKING:
    import numpy as np

WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""Directions as (rows, columns); in each frame, a square moves by `SPEED` times its direction."""
QUESTION = "which way ?"
SIDE, FRAMES, SPEED, SQUARE = 32, 8, 2, 10


def items(folder: Path, seed: int, count: int) -> list[Item]:
    """Draw items and save their videos."""
    random = Random(f"motion {seed}")
    return [_item(folder, f"videos/{number:05}.mp4", random) for number in range(count)]


def _item(folder: Path, name: str, random: Random) -> Item:
    answer = random.choice(list(WAYS))
    save_video(moving(answer, random), FRAMES, folder / name)
    return Item((("video", name),), QUESTION, answer)


def moving(way: str, random: Random) -> np.ndarray:
    """Return a video, uint8 [frames, side, side, 3]; the square stays within the picture."""
    import numpy as np

    noise = np.random.default_rng(random.getrandbits(32))
    frames = noise.integers(20, 90, (FRAMES, SIDE, SIDE, 3), np.uint8)
    colour = [random.randint(150, 255) for _ in range(3)]
    reach = SIDE - SQUARE - SPEED * (FRAMES - 1)
    start = [random.randint(0, reach) if step == 1 else SIDE - SQUARE - random.randint(0, reach) if step == -1
             else random.randint(0, SIDE - SQUARE) for step in WAYS[way]]  # fmt: skip
    for at, frame in enumerate(frames):
        top, left = (begin + step * SPEED * at for begin, step in zip(start, WAYS[way], strict=True))
        frame[top : top + SQUARE, left : left + SQUARE] = colour
    return frames
