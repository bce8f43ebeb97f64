# SPDX-License-Identifier: Apache-2.0
"""Container files with several streams (mp4, webm, mkv, ...), read by PyAV: first the header, then frame by frame.

A stream is not decoded as a whole: callers bound the number of samples, or stop reading frames.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from PIL import Image


class Container:
    """The first video or audio stream of an open file."""

    def __init__(self, file: Any, kind: Literal["video", "audio"]) -> None:
        streams = getattr(file.streams, kind)
        if not streams:
            raise ValueError(f"a file without {kind}")
        self._file, self._stream, self._kind = file, streams[0], kind
        self._stream.codec_context.thread_count = 1

    @classmethod
    @contextmanager
    def of(cls, data: bytes, kind: Literal["video", "audio"]) -> Iterator[Container]:
        """Open a stream. Raises ValueError instead of every exception, such as FFmpeg's, while the stream is open."""
        import av

        if not data:
            raise ValueError(f"{kind} of no bytes")
        av.logging.set_level(None)
        try:
            # Without playlists and protocols a file can't make FFmpeg open other files or hosts.
            with av.open(io.BytesIO(data), options={"protocol_whitelist": "", "format_whitelist": FORMATS}) as file:
                yield cls(file, kind)
        except av.FFmpegError as error:  # before ValueError, which some FFmpeg errors also are
            raise ValueError(f"{kind} that can't be decoded ({error.strerror})") from error
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{kind} that can't be decoded ({type(error).__name__}: {error})") from error

    @property
    def seconds(self) -> float:
        """Length in seconds, from the header. Raises ValueError if the header has no length."""
        stream = self._stream
        if stream.duration and stream.time_base:
            seconds = float(stream.duration * stream.time_base)
        elif self._file.duration:
            seconds = self._file.duration / 1e6
        else:
            raise ValueError(f"{self._kind} without a length in its header; write the file again with one")
        if seconds <= 0:
            raise ValueError(f"{self._kind} of {seconds:g} s")
        return seconds

    @property
    def sounds(self) -> bool:
        """True if the file has an audio stream."""
        return bool(self._file.streams.audio)

    @property
    def codec(self) -> str:
        """FFmpeg's name of the codec."""
        return str(self._stream.codec_context.name)

    def sound(self) -> tuple[int, int]:
        """Return sampling rate in Hz and number of channels of the audio stream."""
        context = self._stream.codec_context
        return int(context.sample_rate or 0), int(context.channels or 0)

    def size(self) -> tuple[int, int]:
        """Return height and width of the frames in pixels."""
        context = self._stream.codec_context
        return int(context.height or 0), int(context.width or 0)

    def samples(self, most: int) -> np.ndarray:
        """Decode at most `most` samples: float32 [samples], one channel at the stream's own rate."""
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
        """Yield (seconds since the first frame, frame) in display order; `picture` converts a frame to pixels."""
        first: float | None = None
        for frame in self._file.decode(self._stream):
            if frame.time is None:
                continue
            first = frame.time if first is None else first
            yield frame.time - first, frame


FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,ogg,mp3,aac,flac,wav,mpeg,mpegts,flv,gif"


def picture(frame: Any, max_pixels: float) -> Image.Image:
    """Return the frame as an image. Raises ValueError if it exceeds `max_pixels`, since the header may be wrong."""
    if frame.width * frame.height > max_pixels:
        raise ValueError(f"a frame of {frame.width} x {frame.height} pixels; at most {max_pixels / 1e6:g} megapixels")
    image: Image.Image = frame.to_image()
    return image
