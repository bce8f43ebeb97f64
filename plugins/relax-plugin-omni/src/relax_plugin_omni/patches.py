# SPDX-License-Identifier: Apache-2.0
"""Pictures as rows of patches, in the order in which Qwen-VL's vision towers read them, computed with numpy alone.

The arithmetic equals that of transformers' `Qwen2VLImageProcessor`; a test compares both.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from relax_plugin_omni.geometry import Vision

MAX_ASPECT = 200


def fitted(height: int, width: int, side: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return a new height and width: multiples of `side`, near the picture's aspect ratio, within the pixel bounds.

    A narrow picture may exceed the bounds. Raises ValueError if a side is 0 or the aspect ratio exceeds `MAX_ASPECT`.
    """
    if min(height, width) < 1 or max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(
            f"a picture of {width} x {height}; the longer side may be at most {MAX_ASPECT} times the shorter"
        )
    high, wide = (round(length / side) * side for length in (height, width))
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        high, wide = (max(side, math.floor(length / shrink / side) * side) for length in (height, width))
    elif high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        high, wide = (math.ceil(length * grow / side) * side for length in (height, width))
    return high, wide


def resized(picture: Image.Image, high: int, wide: int) -> np.ndarray:
    """Return the picture resized, as uint8 [high, wide, 3]."""
    return np.asarray(picture.convert("RGB").resize((wide, high), Image.Resampling.BICUBIC))


def patches(frames: np.ndarray, vision: Vision) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut frames, uint8 [frames, high, wide, 3], into patches.

    Returns float32 [patches, 3 * temporal * patch * patch] and the grid (t, h, w), the number of patches along time,
    height and width. An image is a video of one frame. The last frame is repeated to a multiple of `temporal` frames.
    """
    missing = -len(frames) % vision.temporal
    whole = np.concatenate([frames, *[frames[-1:]] * missing])
    values = (whole.astype(np.float32) / 255 - np.float32(vision.mean)) / np.float32(vision.std)
    count, high, wide, channels = values.shape
    t, h, w = count // vision.temporal, high // vision.patch, wide // vision.patch
    merge, patch = vision.merge, vision.patch
    cut = values.reshape(t, vision.temporal, h // merge, merge, patch, w // merge, merge, patch, channels)
    ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(ordered.reshape(t * h * w, -1), np.float32), (t, h, w)
