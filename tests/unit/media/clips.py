# SPDX-License-Identifier: Apache-2.0
"""Small real media, made from a seed: bytes of files."""

from __future__ import annotations

import io

import numpy as np


def picture(seed: int, side: int = 40) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def sound(seed: int, seconds: float) -> bytes:
    import soundfile

    random, time = np.random.default_rng(seed), np.arange(round(seconds * 16_000)) / 16_000
    wave = 0.4 * np.sin(2 * np.pi * random.uniform(200, 2000) * time) + random.normal(0, 0.05, len(time))
    out = io.BytesIO()
    soundfile.write(out, wave.astype(np.float32), 16_000, format="WAV")
    return out.getvalue()


def video(seed: int, frames: int, side: int = 32, fps: int = 4, tone_hz: float = 0.0) -> bytes:
    """With a tone where one is named."""
    import av

    random, out = np.random.default_rng(seed), io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        tone = file.add_stream("aac", rate=16_000) if tone_hz else None
        for _ in range(frames):
            coarse = random.integers(0, 256, (side // 8, side // 8, 3), np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(coarse.repeat(8, 0).repeat(8, 1), format="rgb24")))
        file.mux(stream.encode())
        if tone is not None:
            wave = np.sin(2 * np.pi * tone_hz * np.arange(frames * 16_000 // fps) / 16_000).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(wave[None], format="fltp", layout="mono")
            frame.sample_rate = 16_000
            file.mux(tone.encode(frame))
            file.mux(tone.encode())
    return out.getvalue()
