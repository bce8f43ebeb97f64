# SPDX-License-Identifier: Apache-2.0
"""Videos as patches of frames at equal intervals. The number and the size of frames follow from the header.

Frames are decoded one after another and only the selected frames are kept, so memory does not grow with a video's
length. A video's sound is either a separate medium, which the audio processor reads from the same file, or joined to
the frames (option `sound`).
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
"""A video counts as truncated if its frames end before this share of the length that the header promises."""


class VideoOptions(Options):
    """Options of `[[media]] name = "video"`."""

    fps: float = Field(default=2.0, gt=0)
    """Number of frames per second of video that the model sees."""
    min_frames: int = Field(default=4, ge=1)
    """Minimum number of frames. A short video is sampled at a higher rate than `fps`; frames are repeated if the video
    has too few."""
    max_frames: int = Field(default=128, ge=1)
    """Maximum number of frames. A long video is sampled at a lower rate than `fps`."""
    min_tokens_per_frame: int = Field(default=4, ge=1)
    """Minimum number of tokens of a frame; smaller frames are enlarged. In most models a token covers two frames."""
    max_tokens_per_frame: int = Field(default=256, ge=1)
    """Maximum number of tokens of a frame; larger frames are shrunk."""
    sound: bool = False
    """Also read the video's sound, if the file has any, and order tokens of video and sound by time. Needs a model with
    vision and audio towers."""
    max_seconds: float = Field(default=600.0, gt=0)
    """Maximum length in seconds; longer videos are refused."""
    max_megapixels: float = Field(default=16.0, gt=0)
    """Maximum size of a frame in megapixels; files with larger frames are refused."""

    @model_validator(mode="after")
    def _ordered(self) -> VideoOptions:
        for least, most in (("min_frames", "max_frames"), ("min_tokens_per_frame", "max_tokens_per_frame")):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(f"{least} {getattr(self, least)} is above {most} {getattr(self, most)}; lower {least}")
        return self


@dataclass(frozen=True, slots=True)
class Plan:
    """The frames to read from a video, their size in pixels, and the video's length in seconds."""

    times: tuple[float, ...]
    """Times in seconds at which the displayed frame is read."""
    high: int
    wide: int
    seconds: float


class VideoProcessor(ModalityProcessor[VideoOptions]):
    """A processor that turns a video into patches."""

    medium: ClassVar[str] = "video"

    def budget(self, media: Media, model: Mapping[str, Any]) -> int:
        """Return the video's number of tokens, computed from its header alone."""
        vision = Vision.of(model)
        with Container.of(read_source(media.source), "video") as container:
            plan, sounds = self._plan(container, vision), self.options.sound and container.sounds
        seen = len(plan.times) // vision.temporal * plan.high * plan.wide // vision.side**2
        return seen + (self._listener.budget(media, model) if sounds else 0)

    def process(self, media: Media, data: bytes, model: Mapping[str, Any]) -> ProcessedMedia:
        """Return the tensors of a video, and of its sound if `sound` is set and the file has an audio stream.

        Tensors: `pixel_values_videos` [patches, values], `video_grid_thw` [1, 3], `video_second_per_grid` [1] (seconds
        that a temporal patch lasts), and `frame_seconds` [frames] (times of the frames in seconds).
        """
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
        """Return `seconds`, `width` and `height` in pixels, and the name of the `codec`."""
        with Container.of(data, "video") as container:
            seconds, (high, wide) = container.seconds, container.size()
            return {"seconds": round(seconds, 3), "width": wide, "height": high, "codec": container.codec}

    def preview(self, media: Media, data: bytes, most_bytes: int) -> bytes | None:
        """Return the video if it fits in `most_bytes` and browsers play it, else a small copy, else None."""
        own = super().preview(media, data, most_bytes)
        if own is not None:
            with Container.of(data, "video") as container:
                if container.codec in PLAYED:
                    return own
        copy = playable(data, self.options.max_megapixels * 1e6)
        return copy if len(copy) <= most_bytes else None

    def view(self, whole: ProcessedMedia, start_s: float, end_s: float) -> ProcessedMedia:
        """Return the patches of the frames from `start_s` to `end_s`."""
        if "input_features" in whole.tensors:
            raise ValueError(
                "a video with its sound can't be viewed in part; leave the option sound out, or cut the file"
            )
        ((t, h, w),) = whole.tensors["video_grid_thw"].tolist()
        seconds = whole.tensors["frame_seconds"].reshape(t, -1)
        kept = (seconds[:, -1] >= start_s) & (seconds[:, 0] < end_s)
        if not kept.any():
            raise ValueError(
                f"a view from {start_s:g} to {end_s:g} s contains no frame of the video; choose times inside it"
            )
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
        """Return uint8 [frames, high, wide, 3]: the frame displayed at each time of the plan."""
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
    """Return a processed video. `each`: tokens of a temporal patch, which are placed at the middle of its times."""
    tensors = {
        "pixel_values_videos": values, "video_grid_thw": np.array([grid], np.int64), "video_second_per_grid": lasts,
        "frame_seconds": seconds,
    }  # fmt: skip
    middles = seconds.reshape(grid[0], -1)[:, [0, -1]].mean(axis=1)
    return ProcessedMedia(
        key, tensors, grid[0] * each, tuple(PlaceholderSpan("video", each, float(at)) for at in middles)
    )
