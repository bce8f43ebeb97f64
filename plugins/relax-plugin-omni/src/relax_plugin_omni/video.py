# SPDX-License-Identifier: Apache-2.0
"""Video: frames at even distances in time, all of one size, as patches. The header tells how many and how large.

Frames are decoded one after another and only the chosen ones are kept, so memory does not grow with a video's length.
Its sound is a medium of its own, which the processor of sound reads from the same file, or comes with it where asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from relax_core.api import Media, ModalityProcessor, Options, PlaceholderSpan, ProcessedMedia
from relax_core.media.source import content_key, read_source
from relax_plugin_omni.audio import AudioOptions, AudioProcessor
from relax_plugin_omni.containers import Container, picture
from relax_plugin_omni.geometry import Vision, positions_per_second
from relax_plugin_omni.patches import fitted, patches, resized
from relax_plugin_omni.playable import PLAYED, playable
from relax_plugin_omni.video_with_sound import join_sound

TRUNCATED = 0.8
"""Frames that end before this part of the promised length: the rest is missing."""


class VideoOptions(Options):
    """`[[media]] name = "video"`."""

    fps: float = Field(default=2.0, gt=0)
    """Frames taken a second."""
    min_frames: int = Field(default=4, ge=1)
    """A lower bound: more frames are taken of a short video, up to all that it has."""
    max_frames: int = Field(default=128, ge=1)
    """An upper bound: fewer frames are taken of a long video."""
    min_tokens_per_frame: int = Field(default=4, ge=1)
    """Smaller frames are enlarged. A token stands for a part of two frames in most models."""
    max_tokens_per_frame: int = Field(default=256, ge=1)
    """Larger frames are shrunk."""
    sound: bool = False
    """Read the sound of the video too, where it has any: tokens of both in the order of time, for models that see and hear."""
    max_seconds: float = Field(default=600.0, gt=0)
    """Longer videos are refused."""
    max_megapixels: float = Field(default=16.0, gt=0)
    """Videos whose frames are larger as they come are refused."""

    @model_validator(mode="after")
    def _ordered(self) -> VideoOptions:
        for least, most in (("min_frames", "max_frames"), ("min_tokens_per_frame", "max_tokens_per_frame")):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(f"{least} {getattr(self, least)} is above {most} {getattr(self, most)}")
        return self


@dataclass(frozen=True, slots=True)
class Plan:
    """The frames that will be taken of a video."""

    times: tuple[float, ...]
    """Seconds; the frame shown then is taken."""
    high: int
    wide: int
    seconds: float


class VideoProcessor(ModalityProcessor[VideoOptions]):
    """Turns one video into patches."""

    medium: ClassVar[str] = "video"

    def budget(self, media: Media, model: Mapping[str, Any]) -> int:
        """Count tokens from the header."""
        vision = Vision.of(model)
        with Container.of(read_source(media.source), "video") as container:
            plan, sounds = self._plan(container, vision), self.options.sound and container.sounds
        seen = len(plan.times) // vision.temporal * plan.high * plan.wide // vision.side**2
        return seen + (self._listener.budget(media, model) if sounds else 0)

    def process(self, media: Media, data: bytes, model: Mapping[str, Any]) -> ProcessedMedia:
        """Make `pixel_values_videos` [patches, values], `video_grid_thw` [1, 3], how long each of its grids lasts,
        `video_second_per_grid` [1], and the seconds of its frames, `frame_seconds`."""
        vision = Vision.of(model)
        with Container.of(data, "video") as container:
            plan = self._plan(container, vision)
            frames, sounds = self._frames(container, plan), self.options.sound and container.sounds
        values, grid = patches(frames, vision)
        lasts = np.array([plan.seconds / grid[0]], np.float32)
        key, each = content_key(data, "video", self.options, vision), grid[1] * grid[2] // vision.merge**2
        seen = _seen(key, values, grid, lasts, np.array(plan.times, np.float64), each)
        return (
            join_sound(seen, self._listener.process(media, data, model), positions_per_second(model))
            if sounds
            else seen
        )

    @property
    def _listener(self) -> AudioProcessor:
        return AudioProcessor(AudioOptions(max_seconds=self.options.max_seconds))

    def facts(self, media: Media, data: bytes) -> Mapping[str, Any]:
        """Tell seconds, width, height, codec, and how many frames are taken."""
        with Container.of(data, "video") as container:
            seconds, (high, wide) = container.seconds, container.size()
            return {"seconds": round(seconds, 3), "width": wide, "height": high, "codec": container.codec}

    def preview(self, media: Media, data: bytes, most_bytes: int) -> bytes | None:
        """Give the video itself where browsers know its codec, else its beginning in one that they know."""
        own = super().preview(media, data, most_bytes)
        if own is not None:
            with Container.of(data, "video") as container:
                if container.codec in PLAYED:
                    return own
        copy = playable(data, self.options.max_megapixels * 1e6)
        return copy if len(copy) <= most_bytes else None

    def view(self, whole: ProcessedMedia, start_s: float, end_s: float) -> ProcessedMedia:
        """Keep the patches of all frames that are shown between the two."""
        if "input_features" in whole.tensors:
            raise ValueError("a view of a video with its sound: leave the option sound out, or cut the file")
        ((t, h, w),) = whole.tensors["video_grid_thw"].tolist()
        seconds = whole.tensors["frame_seconds"].reshape(t, -1)
        kept = (seconds[:, -1] >= start_s) & (seconds[:, 0] < end_s)
        if not kept.any():
            raise ValueError(f"a view from {start_s:g} to {end_s:g} s, in which no frame of the video lies")
        values = whole.tensors["pixel_values_videos"].reshape(t, h * w, -1)[kept]
        key, grid = f"{whole.key}#t={start_s},{end_s}", (int(kept.sum()), h, w)
        lasts, each = whole.tensors["video_second_per_grid"], whole.num_placeholders // t
        return _seen(key, values.reshape(-1, values.shape[-1]), grid, lasts, seconds[kept].reshape(-1), each)

    def _plan(self, container: Container, vision: Vision) -> Plan:
        options, seconds, (high, wide) = self.options, container.seconds, container.size()
        if seconds > options.max_seconds:
            raise ValueError(f"a video of {seconds:.1f} s; at most {options.max_seconds:g} s")
        if high * wide > options.max_megapixels * 1e6:
            raise ValueError(f"a video of {wide} x {high} pixels; at most {options.max_megapixels:g} megapixels")
        wanted = min(max(math.floor(seconds * options.fps), options.min_frames), options.max_frames)
        count = max(1, wanted // vision.temporal) * vision.temporal
        token = vision.side**2
        high, wide = fitted(
            high, wide, vision.side, options.min_tokens_per_frame * token, options.max_tokens_per_frame * token
        )
        return Plan(tuple((at + 0.5) * seconds / count for at in range(count)), high, wide, seconds)

    def _frames(self, container: Container, plan: Plan) -> np.ndarray:
        """Read uint8 [frames, high, wide, 3]: for each time the last frame that had begun by then."""
        most = self.options.max_megapixels * 1e6
        taken: list[np.ndarray] = []
        shown: Any = None
        end = 0.0
        for second, frame in container.pictures():
            while shown is not None and len(taken) < len(plan.times) and plan.times[len(taken)] < second:
                taken.append(resized(picture(shown, most), plan.high, plan.wide))
            if len(taken) == len(plan.times):
                return np.stack(taken)
            shown, end = frame, second
        if shown is None or (
            end < plan.seconds * TRUNCATED and plan.times[len(taken)] > end + plan.seconds * (1 - TRUNCATED)
        ):
            raise ValueError(f"a video whose frames end after {end:.2f} of {plan.seconds:.2f} s")
        last = resized(picture(shown, most), plan.high, plan.wide)
        return np.stack(taken + [last] * (len(plan.times) - len(taken)))


def _seen(
    key: str, values: np.ndarray, grid: tuple[int, int, int], lasts: np.ndarray, seconds: np.ndarray, each: int
) -> ProcessedMedia:  # fmt: skip
    """Lay a video out; `each`: tokens of the frames of one grid, side by side at the middle of their seconds."""
    tensors = {
        "pixel_values_videos": values, "video_grid_thw": np.array([grid], np.int64), "video_second_per_grid": lasts,
        "frame_seconds": seconds,
    }  # fmt: skip
    middles = seconds.reshape(grid[0], -1)[:, [0, -1]].mean(axis=1)
    return ProcessedMedia(
        key, tensors, grid[0] * each, tuple(PlaceholderSpan("video", each, float(at)) for at in middles)
    )
