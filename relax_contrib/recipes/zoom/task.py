# SPDX-License-Identifier: Apache-2.0
"""The task: name the colour of the fine checkered pattern in one quarter of a noisy picture. Pure functions of a seed.

Each quarter has a bright square. In one colour channel (in none for `grey`) its pixels alternate above and below the
square's grey. The whole picture is shown at half its size, which averages every pattern to the same grey. Only a crop
of the quarter shows the colour.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

COLOURS = ("red", "green", "blue", "grey")
QUESTION = "which colour {} ?"
SIDE, HALF = 64, 32
SQUARE = 22
BRIGHT, CONTRAST = 190, 60
PLACES = {(0, 0): "upper left", (1, 0): "upper right", (0, 1): "lower left", (1, 1): "lower right"}
"""Names of the quarters in questions, by (column, row)."""
BOXES = {(0, 0): "0,0,500,500", (1, 0): "500,0,1000,500", (0, 1): "0,500,500,1000", (1, 1): "500,500,1000,1000"}
"""Boxes of the quarters in calls, in thousandths, by (column, row)."""
CALL, CLOSE = '<tool_call>{"name":"zoom","arguments":{"box":[', "]}}</tool_call>"
"""Beginning and end of every call, one token each: the policy learns the box, not the JSON."""
WORDS = (
    "which", "colour", "upper", "lower", "left", "right", "?", *COLOURS, *BOXES.values(), CALL, CLOSE,
)  # fmt: skip


class Scene(NamedTuple):
    colours: dict[tuple[int, int], str]
    """Colour of each quarter's square."""
    asked: tuple[int, int]
    """The quarter that the question is about."""
    seed: int
    """Seed of the noise and of the squares' places within their quarters."""

    @property
    def question(self) -> str:
        return QUESTION.format(PLACES[self.asked])

    @property
    def answer(self) -> str:
        return self.colours[self.asked]


def scene(random: Random) -> Scene:
    colours = {quarter: random.choice(COLOURS) for quarter in BOXES}
    return Scene(colours, random.choice(list(BOXES)), random.getrandbits(32))


def draw(scene: Scene) -> np.ndarray:
    """Return the picture, uint8 [side, side, 3]."""
    import numpy as np

    noise = np.random.default_rng(scene.seed)
    pixels = noise.integers(60, 160, (SIDE, SIDE, 3)).astype(np.float64)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    pattern = np.where((rows + columns) % 2, -CONTRAST, CONTRAST)
    for quarter, colour in scene.colours.items():
        left, top = (HALF * at + 2 * int(noise.integers(0, (HALF - SQUARE) // 2 + 1)) for at in quarter)
        inside = np.s_[top : top + SQUARE, left : left + SQUARE]
        pixels[inside] = BRIGHT + noise.normal(0, 5, (SQUARE, SQUARE, 3))
        if colour != "grey":
            pixels[inside][:, :, COLOURS.index(colour)] += pattern[inside]
    return pixels.clip(0, 255).astype(np.uint8)


def crop(pixels: np.ndarray, quarter: tuple[int, int]) -> np.ndarray:
    """Return the quarter's pixels."""
    column, row = quarter
    return pixels[HALF * row : HALF * (row + 1), HALF * column : HALF * (column + 1)]


def call(quarter: tuple[int, int]) -> str:
    """Return a turn that zooms into a quarter, in the form that the warm start teaches."""
    return f"{CALL} {BOXES[quarter]} {CLOSE}"
