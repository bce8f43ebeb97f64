# SPDX-License-Identifier: Apache-2.0
"""The task: a noisy picture with a bright square in each quarter; which colour has the fine checkered pattern of the one that
is asked about? Pure functions of a seed.

Pixels of a pattern are by turns above and below the square's grey, in one channel or in none. Shrunk to half its size, as the
whole picture is shown, every pattern is the same grey: its colour is seen in a crop of its quarter alone.
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
"""Words for the quarters, by (column, row)."""
BOXES = {(0, 0): "0,0,500,500", (1, 0): "500,0,1000,500", (0, 1): "0,500,500,1000", (1, 1): "500,500,1000,1000"}
"""Their boxes as a call names them."""
CALL, CLOSE = '<tool_call>{"name":"zoom","arguments":{"box":[', "]}}</tool_call>"
"""Tokens of their own: which box a call names is learnt, how JSON is written is not the lesson."""
WORDS = (
    "which", "colour", "upper", "lower", "left", "right", "?", *COLOURS, *BOXES.values(), CALL, CLOSE,
)  # fmt: skip


class Scene(NamedTuple):
    colours: dict[tuple[int, int], str]
    """Of each quarter's square."""
    asked: tuple[int, int]
    """The quarter that the question is about."""
    seed: int
    """Of its noise, and of the squares' places within their quarters."""

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
    """uint8 [side, side, 3]."""
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
    """The quarter's pixels."""
    column, row = quarter
    return pixels[HALF * row : HALF * (row + 1), HALF * column : HALF * (column + 1)]


def call(quarter: tuple[int, int]) -> str:
    """A turn that looks at a quarter, as the warm start shows it."""
    return f"{CALL} {BOXES[quarter]} {CLOSE}"
