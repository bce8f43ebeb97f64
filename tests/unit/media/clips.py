# SPDX-License-Identifier: Apache-2.0
"""Small real media, made from a seed: bytes of files, their address, and the folder of a model that sees and hears."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

VISION = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
CONFIG = {"model_type": "tiny", "vision_config": VISION, "audio_config": {"num_mel_bins": 32, "n_window": 50}}


def model(folder: Path) -> dict[str, str]:
    """A `[model]` table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return {"path": str(folder)}


def uri(data: bytes) -> str:
    return "data:application/octet-stream;base64," + base64.b64encode(data).decode()


def picture(
    seed: int, side: int = 40, height: int | None = None, form: str = "PNG", mode: str = "RGB", **how: Any
) -> bytes:
    """Noise, square unless a height is given."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (height or side, side, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(out, form, **how)
    return out.getvalue()


def sound(seed: int, seconds: float = 1.0, rate: int = 16_000, channels: int = 1, form: str = "WAV") -> bytes:
    """A tone in each channel, with noise."""
    import soundfile

    random, time = np.random.default_rng(seed), np.arange(round(seconds * rate)) / rate
    tones = random.uniform(200, 2000, channels)
    wave = 0.4 * np.sin(2 * np.pi * tones * time[:, None]) + random.normal(0, 0.05, (len(time), channels))
    out = io.BytesIO()
    soundfile.write(out, wave.astype(np.float32), rate, format=form)
    return out.getvalue()


def video(
    seed: int, frames: int = 16, side: int = 32, fps: int = 4, tone_hz: float = 0.0, form: str = "mp4", codec: str = "mpeg4"
) -> bytes:  # fmt: skip
    """A bright square that moves to the right over noise; with a tone where one is named."""
    import av

    random, out = np.random.default_rng(seed), io.BytesIO()
    with av.open(out, "w", format=form) as file:
        stream = file.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        tone = file.add_stream("aac", rate=16_000) if tone_hz else None
        for number in range(frames):
            pixels = random.integers(0, 60, (side, side, 3), np.uint8)
            left = number * (side - side // 4) // max(1, frames - 1)
            pixels[side // 4 : side // 2, left : left + side // 4] = 255
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
        if tone is not None:
            wave = np.sin(2 * np.pi * tone_hz * np.arange(frames * 16_000 // fps) / 16_000).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(wave[None], format="fltp", layout="mono")
            frame.sample_rate = 16_000
            file.mux(tone.encode(frame))
            file.mux(tone.encode())
    return out.getvalue()
