# SPDX-License-Identifier: Apache-2.0
"""The task: name a spoken digit; held-out items have new voices. Pure functions of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from relax_contrib.recipes.digits.voice import WORDS, Speaker, spoken
from relax_contrib.recipes.shown import Item, save_sound

QUESTION = "which digit ?"


def speakers(seed: int, count: int) -> list[Speaker]:
    random = Random(f"speakers {seed}")
    return [
        Speaker(random.uniform(85, 240), random.uniform(0.88, 1.16), random.uniform(0.8, 1.2)) for _ in range(count)
    ]


def items(folder: Path, part: str, voices: Sequence[Speaker], seed: int, count: int) -> list[Item]:
    """Draw items and save their sounds."""
    random = Random(f"digits {part} {seed}")
    return [_item(folder, f"sounds/{part}-{number:05}.wav", voices, random) for number in range(count)]


def _item(folder: Path, name: str, voices: Sequence[Speaker], random: Random) -> Item:
    answer = random.choice(list(WORDS))
    save_sound(spoken(answer, random.choice(list(voices)), random), folder / name)
    return Item((("audio", name),), QUESTION, answer)
