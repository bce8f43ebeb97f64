# SPDX-License-Identifier: Apache-2.0
"""Previews of videos for people who read samples: the beginning as a small file that browsers play."""

from __future__ import annotations

import io
from fractions import Fraction

from relax_plugin_omni.containers import Container, picture

PLAYED = ("h264", "vp8", "vp9", "libvpx", "libvpx-vp9", "av1", "libdav1d", "libaom-av1")
MAX_SECONDS = 10.0
MAX_SIDE = 192
FPS = 4
_MILLISECOND = Fraction(1, 1000)


def playable(data: bytes, max_pixels: float) -> bytes:
    """Return a preview as a WebM file (VP8) without sound: 4 frames per second, at most 10 seconds.

    Raises ValueError if the video can't be decoded.
    """
    import av

    out = io.BytesIO()
    with Container.of(data, "video") as container, av.open(out, "w", format="webm") as file:
        stream = file.add_stream("libvpx", rate=FPS, options={"deadline": "realtime", "cpu-used": "8"})
        stream.codec_context.thread_count = (
            1  # with more threads, libvpx takes eight times the CPU time for frames as small as these
        )
        stream.pix_fmt, stream.bit_rate, stream.time_base = "yuv420p", 300_000, _MILLISECOND
        due = 0.0
        for second, frame in container.pictures():
            if second > MAX_SECONDS:
                break
            if second + 1e-6 < due:
                continue
            due = second + 1 / FPS
            shown = picture(frame, max_pixels)
            shown.thumbnail((MAX_SIDE, MAX_SIDE))
            high, wide = (max(2, side // 2 * 2) for side in (shown.height, shown.width))
            if not stream.codec_context.is_open:
                stream.width, stream.height = wide, high
            made = av.VideoFrame.from_image(shown.resize((stream.width, stream.height)))
            made.pts, made.time_base = round(second * 1000), _MILLISECOND
            file.mux(stream.encode(made))
        file.mux(stream.encode())
    return out.getvalue()
