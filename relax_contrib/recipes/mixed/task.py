# SPDX-License-Identifier: Apache-2.0
"""The task: a picture or video of a coloured disc, a tone, or a picture with a tone. Pure functions of a seed.

The question asks for the colour or for the height of the tone.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from relax_contrib.recipes.colours import task as colours
from relax_contrib.recipes.shown import Item, save_picture, save_sound, save_video
from relax_contrib.recipes.tones import task as tones

FRAMES = 4
WORDS = tuple(dict.fromkeys([*colours.QUESTION.split(), *colours.COLOURS, *tones.QUESTION.split(), *tones.HERTZ]))
KINDS = (("image",), ("video",), ("audio",), ("audio",), ("image", "audio"), ("audio", "image"))


def items(folder: Path, seed: int, count: int) -> list[Item]:
    """Draw items and save their media."""
    random = Random(f"mixed {seed}")
    return [_item(folder, number, random) for number in range(count)]


def _item(folder: Path, number: int, random: Random) -> Item:
    kinds, colour, height = random.choice(KINDS), random.choice(list(colours.COLOURS)), random.choice(list(tones.HERTZ))
    names = {
        "image": f"pictures/{number:05}.png",
        "video": f"videos/{number:05}.mp4",
        "audio": f"sounds/{number:05}.wav",
    }
    for kind in kinds:
        _save(kind, folder / names[kind], colour, height, random)
    about_tone = kinds == ("audio",) or ("audio" in kinds and random.random() < 0.5)
    question, answer = (tones.QUESTION, height) if about_tone else (colours.QUESTION, colour)
    return Item(tuple((kind, names[kind]) for kind in kinds), question, answer)


def _save(kind: str, path: Path, colour: str, height: str, random: Random) -> None:
    import numpy as np

    if kind == "audio":
        save_sound(tones.tone(height, random), path)
    elif kind == "image":
        save_picture(colours.draw(colour, random), path)
    else:
        save_video(np.stack([colours.draw(colour, random) for _ in range(FRAMES)]), FRAMES, path)
