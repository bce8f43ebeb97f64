# SPDX-License-Identifier: Apache-2.0
"""Tasks with media: files, a question and its answer, written as rows of a task file."""

from __future__ import annotations

import json
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

RATE = 16_000
"""Sampling rate of sounds in Hz."""


class Item(NamedTuple):
    """A task with media."""

    media: tuple[tuple[str, str], ...]
    """(kind, path below the recipe's folder) of each medium, in the order of the prompt."""
    question: str
    answer: str


def write(items: Sequence[Item], path: Path) -> None:
    """Write one row per item: rewards compare with `answer`, a supervised warm start learns `completion`."""
    path.write_text("".join(json.dumps(_row(item)) + "\n" for item in items))


def _row(item: Item) -> dict[str, object]:
    parts = [*({"type": kind, kind: source} for kind, source in item.media), {"type": "text", "text": item.question}]
    return {"prompt": [{"role": "user", "content": parts}], "answer": item.answer, "completion": item.answer}


def save_picture(pixels: np.ndarray, path: Path) -> None:
    """Save pixels, uint8 [high, wide, 3], as an image."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def save_sound(samples: np.ndarray, path: Path) -> None:
    """Save samples, float [samples] between -1 and 1, as a WAV file of 16 bits."""
    import numpy as np

    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples.clip(-1, 1) * 32767).astype(np.int16).tobytes())


def save_video(frames: np.ndarray, fps: int, path: Path) -> None:
    """Save frames, uint8 [frames, high, wide, 3], as an MP4 file; needs PyAV, a dependency of relax-plugin-omni."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=fps, options={"qscale": "2"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
