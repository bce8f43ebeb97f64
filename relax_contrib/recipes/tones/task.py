# SPDX-License-Identifier: Apache-2.0
"""The task: classify half a second of a noisy tone as low, mid or high. Pure functions of a seed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from relax_contrib.recipes.shown import RATE, Item, save_sound

if TYPE_CHECKING:
    import numpy as np

HERTZ = {"low": (180.0, 320.0), "mid": (600.0, 1000.0), "high": (1800.0, 3000.0)}
QUESTION = "which tone ?"
SECONDS = 0.5


def items(folder: Path, seed: int, count: int) -> list[Item]:
    """Draw items and save their sounds."""
    random = Random(f"tones {seed}")
    return [_item(folder, f"sounds/{number:05}.wav", random) for number in range(count)]


def _item(folder: Path, name: str, random: Random) -> Item:
    answer = random.choice(list(HERTZ))
    save_sound(tone(answer, random), folder / name)
    return Item((("audio", name),), QUESTION, answer)


def tone(height: str, random: Random) -> np.ndarray:
    """Return a noisy tone, float [samples]."""
    import numpy as np

    time = np.arange(round(SECONDS * RATE)) / RATE
    noise = np.random.default_rng(random.getrandbits(32)).normal(0, random.uniform(0.02, 0.1), len(time))
    wave = np.sin(2 * np.pi * (random.uniform(*HERTZ[height]) * time + random.random()))
    return random.uniform(0.2, 0.6) * wave + noise
