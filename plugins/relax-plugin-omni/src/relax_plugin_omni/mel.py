# SPDX-License-Identifier: Apache-2.0
"""Log-mel features of sound at 16 kHz, as in Whisper and Qwen's audio towers, computed with numpy alone.

The arithmetic equals that of transformers' `WhisperFeatureExtractor`; a test compares both.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

RATE = 16_000
HOP = 160
_WINDOW = 400
_BLOCK = 4096
"""Number of frames in one FFT call, which bounds its memory."""


def log_mel(sound: np.ndarray, bands: int) -> np.ndarray:
    """Return log-mel features, float32 [bands, samples // 160], of sound, float32 [samples]."""
    padded = np.pad(sound.astype(np.float64), _WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::HOP][: len(sound) // HOP]
    window = np.hanning(_WINDOW + 1)[:-1]
    filters = _filters(bands)
    blocks = [
        filters @ (np.abs(np.fft.rfft(frames[at : at + _BLOCK] * window)) ** 2).T
        for at in range(0, len(frames), _BLOCK)
    ]
    log = np.log10(np.maximum(np.concatenate(blocks, axis=1), 1e-10))
    return ((np.maximum(log, log.max() - 8.0) + 4.0) / 4.0).astype(np.float32)


@lru_cache(maxsize=4)
def _filters(bands: int) -> np.ndarray:
    """Return filters [bands, bins]: triangles of area 1 between points that are equidistant on Slaney's mel scale."""
    bins = np.linspace(0, RATE / 2, _WINDOW // 2 + 1)
    points = _hertz(np.linspace(_mel(0.0), _mel(RATE / 2), bands + 2))
    widths = np.diff(points)
    slopes = points[:, None] - bins[None]
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    area = 2.0 / (points[2:] - points[:-2])
    filters: np.ndarray = np.maximum(0, np.minimum(rising, falling)) * area[:, None]
    return filters


_KNEE_HZ, _KNEE_MEL, _STEP = 1000.0, 15.0, 27.0 / np.log(6.4)


def _mel(hertz: float) -> float:
    linear = 3.0 * hertz / 200.0
    return linear if hertz < _KNEE_HZ else _KNEE_MEL + float(np.log(hertz / _KNEE_HZ)) * _STEP


def _hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < _KNEE_MEL, 200.0 * mels / 3.0, _KNEE_HZ * np.exp((mels - _KNEE_MEL) / _STEP))
