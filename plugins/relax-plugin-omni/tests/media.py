# SPDX-License-Identifier: Apache-2.0
"""Small real media, made from a seed, and the folder of a model that sees and hears."""

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


def image(width: int = 40, height: int = 40, form: str = "PNG", mode: str = "RGB", seed: int = 0, **how: Any) -> bytes:
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(out, form, **how)
    return out.getvalue()


def sound(
    seconds: float = 1.0,
    rate: int = 16_000,
    channels: int = 1,
    form: str = "WAV",
    subtype: str | None = None,
    seed: int = 0,
) -> bytes:
    import soundfile

    random = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    wave = np.stack([0.4 * np.sin(2 * np.pi * 440 * (n + 1) * time) for n in range(channels)], axis=1)
    out = io.BytesIO()
    soundfile.write(
        out, (wave + random.normal(0, 0.01, wave.shape)).astype(np.float32), rate, format=form, subtype=subtype
    )
    return out.getvalue()


def video(
    frames: int = 16,
    width: int = 64,
    height: int = 64,
    fps: int = 8,
    form: str = "mp4",
    codec: str = "mpeg4",
    audio: bool = False,
) -> bytes:
    """A square that moves to the right over noise; with a tone where asked."""
    import av

    random, out = np.random.default_rng(0), io.BytesIO()
    with av.open(out, "w", format=form) as file:
        stream = file.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        tone = file.add_stream("aac", rate=16_000) if audio else None
        for number in range(frames):
            pixels = random.integers(0, 40, (height, width, 3), np.uint8)
            left = number * (width - 16) // max(1, frames - 1)
            pixels[16:32, left : left + 16] = 255
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
        if tone is not None:
            wave = np.sin(2 * np.pi * 440 * np.arange(frames * 16_000 // fps) / 16_000).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(wave[None], format="fltp", layout="mono")
            frame.sample_rate = 16_000
            file.mux(tone.encode(frame))
            file.mux(tone.encode())
    return out.getvalue()
