# SPDX-License-Identifier: Apache-2.0
"""A video and its sound as one medium, ordered by time: a temporal patch, the sound until the next patch, and so on.

Times are counted in position ids, one for each token of sound, as in Qwen-Omni's own processor.
"""

from __future__ import annotations

import math

from relax_core.api import PlaceholderSpan, ProcessedMedia
from relax_core.media.source import content_key


def join_sound(seen: ProcessedMedia, heard: ProcessedMedia, positions_per_second: float) -> ProcessedMedia:
    """Join a processed video and its processed sound into one medium with a new key."""
    grid_s, sound = float(seen.tensors["video_second_per_grid"][0]), heard.num_placeholders
    layout: list[PlaceholderSpan] = []
    placed = 0
    for number, frames in enumerate(seen.layout):
        due = min(sound, math.ceil(number * grid_s * positions_per_second))
        if due > placed:
            layout.append(PlaceholderSpan("audio", due - placed, placed / positions_per_second))
            placed = due
        layout.append(frames)
    if placed < sound:
        layout.append(PlaceholderSpan("audio", sound - placed, placed / positions_per_second))
    key = content_key(bytes.fromhex(seen.key), heard.key, positions_per_second)
    return ProcessedMedia(key, {**seen.tensors, **heard.tensors}, seen.num_placeholders + sound, tuple(layout))
