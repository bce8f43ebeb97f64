# SPDX-License-Identifier: Apache-2.0
"""Files that hold several streams (mp4, webm, mkv, ...), read by PyAV: what the header says, then frame after frame.

Nothing is taken whole: who asks for frames says how many it wants at most.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from PIL import Image


class Container:
    """One stream of an open file."""

    def __init__(self, file: Any, kind: Literal["video", "audio"]) -> None:
        streams = getattr(file.streams, kind)
        if not streams:
            raise ValueError(f"a file without {kind}")
        self._file, self._stream, self._kind = file, streams[0], kind
        self._stream.codec_context.thread_count = 1

    @classmethod
    @contextmanager
    def of(cls, data: bytes, kind: Literal["video", "audio"]) -> Iterator[Container]:
        """Open a stream; whatever FFmpeg raises over foreign bytes is a ValueError about them."""
        import av

        if not data:
            raise ValueError(f"{kind} of no bytes")
        av.logging.set_level(None)
        try:
            # No playlists and no protocols: a file must not name other files or hosts.
            with av.open(io.BytesIO(data), options={"protocol_whitelist": "", "format_whitelist": FORMATS}) as file:
                yield cls(file, kind)
        except av.FFmpegError as error:  # some of them are ValueErrors too
            raise ValueError(f"{kind} that can't be decoded ({error.strerror})") from error
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{kind} that can't be decoded ({type(error).__name__}: {error})") from error

    @property
    def seconds(self) -> float:
        """Length, as the header says. Raises ValueError where it says none."""
        stream = self._stream
        if stream.duration and stream.time_base:
            seconds = float(stream.duration * stream.time_base)
        elif self._file.duration:
            seconds = self._file.duration / 1e6
        else:
            raise ValueError(f"{self._kind} whose header tells no length")
        if seconds <= 0:
            raise ValueError(f"{self._kind} of {seconds:g} s")
        return seconds

    @property
    def sounds(self) -> bool:
        """Tell whether the file has a stream of sound."""
        return bool(self._file.streams.audio)

    @property
    def codec(self) -> str:
        """Name of the codec, as FFmpeg calls it."""
        return str(self._stream.codec_context.name)

    def sound(self) -> tuple[int, int]:
        """Rate and channels of the sound."""
        context = self._stream.codec_context
        return int(context.sample_rate or 0), int(context.channels or 0)

    def size(self) -> tuple[int, int]:
        """Height and width of the pictures."""
        context = self._stream.codec_context
        return int(context.height or 0), int(context.width or 0)

    def samples(self, most: int) -> np.ndarray:
        """Yield float32 [samples], one channel, at the stream's own rate."""
        import av

        resampler = av.AudioResampler(format="flt", layout="mono")
        parts: list[np.ndarray] = []
        count = 0
        for frame in self._file.decode(self._stream):
            for piece in resampler.resample(frame):
                parts.append(piece.to_ndarray().reshape(-1))
                count += len(parts[-1])
            if count >= most:
                break
        return np.concatenate(parts)[:most].astype(np.float32) if parts else np.zeros(0, np.float32)

    def pictures(self) -> Iterator[tuple[float, Any]]:
        """Yield (second, frame) in order of display; a frame becomes pixels by `picture` only."""
        first: float | None = None
        for frame in self._file.decode(self._stream):
            if frame.time is None:
                continue
            first = frame.time if first is None else first
            yield frame.time - first, frame


FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,ogg,mp3,aac,flac,wav,mpeg,mpegts,flv,gif"


def picture(frame: Any, max_pixels: float) -> Image.Image:
    """Return the frame as an image; ValueError where a stream grew beyond what its header said."""
    if frame.width * frame.height > max_pixels:
        raise ValueError(f"a frame of {frame.width} x {frame.height} pixels")
    image: Image.Image = frame.to_image()
    return image
