# SPDX-License-Identifier: Apache-2.0
"""Renderings in a form that a model reads: terminal colours as marks in the text, pixels as an image."""

from __future__ import annotations

import base64
import io
import re

import numpy as np

from relax_core.api import Media

COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_ESCAPE = re.compile(r"\x1b\[([\d;]*)([A-Za-z])")


def marked(render: str) -> str:
    """Replace terminal colours by marks such as `[red S]`, since some environments mark the player only by colour.

    If several colours apply to a text, the mark lists the colours in the order of their escape codes.
    """
    text, end = "", 0
    colours: list[str] = []
    for escape in _ESCAPE.finditer(render):
        text += _coloured(render[end : escape.start()], colours)
        end = escape.end()
        for code in (int(code or 0) for code in escape[1].split(";")) if escape[2] == "m" else ():
            if code == 0:
                colours = []
            elif code // 10 in (3, 4, 9, 10) and code % 10 < len(COLOURS):
                colours.append(COLOURS[code % 10])
    return (text + _coloured(render[end:], colours)).strip("\n")


def image(pixels: np.ndarray) -> Media:
    """Return pixels, uint8 [height, width, 3 or 1] or [height, width], as an image. Raises ValueError otherwise."""
    from PIL import Image

    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3)):
        raise ValueError(f"an image must be bytes [height, width, 3], not {pixels.dtype} {list(pixels.shape)}")
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels).convert("RGB").save(file, "PNG")
    return Media("image", f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")


def _coloured(text: str, colours: list[str]) -> str:
    return f"[{' '.join(colours)} {text}]" if colours and text else text
