# SPDX-License-Identifier: Apache-2.0
"""A video and its sound as one medium: frames where they begin, and between them what is heard until the next.

Times are counted in positions, one for each token of sound, as Qwen-Omni's own processor does.
"""

from __future__ import annotations

import math

from relax_core.api import PlaceholderSpan, ProcessedMedia
from relax_core.media.source import content_key


def join_sound(seen: ProcessedMedia, heard: ProcessedMedia, positions_per_second: float) -> ProcessedMedia:
    """Join what is seen and what is heard, under a key of their own."""
    grid_s, sound = float(seen.tensors["video_second_per_grid"][0]), heard.num_placeholders
    layout: list[PlaceholderSpan] = []
    told = 0
    for number, frames in enumerate(seen.layout):
        due = min(sound, math.ceil(number * grid_s * positions_per_second))
        if due > told:
            layout.append(PlaceholderSpan("audio", due - told, told / positions_per_second))
            told = due
        layout.append(frames)
    if told < sound:
        layout.append(PlaceholderSpan("audio", sound - told, told / positions_per_second))
    key = content_key(bytes.fromhex(seen.key), heard.key, positions_per_second)
    return ProcessedMedia(key, {**seen.tensors, **heard.tensors}, seen.num_placeholders + sound, tuple(layout))
