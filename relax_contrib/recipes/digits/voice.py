# SPDX-License-Identifier: Apache-2.0
"""A synthetic voice: words are sequences of sounds, made of harmonics of a pitch and of shaped noise.

This is additive synthesis after the source-filter model of speech. The words are distinguishable, not natural.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

from relax_contrib.recipes.shown import RATE

if TYPE_CHECKING:
    import numpy as np

HOP = 80
"""Samples per frame, in which loudness and formants are constant before smoothing."""


class Sound(NamedTuple):
    """A speech sound: duration, loudness of its voiced and noise parts (0 to 1), and formants."""

    seconds: float
    voiced: float
    noise: float
    formants: tuple[float, float, float]
    """Three formants in Hz; for sounds of noise: centre and width of the band in Hz, and 0."""


class Speaker(NamedTuple):
    """A speaker: the properties of one voice."""

    pitch: float
    """Fundamental frequency in Hz."""
    size: float
    """Factor on the formants' frequencies."""
    pace: float
    """Factor on the sounds' durations."""


_VOWELS = {
    "iy": (280, 2250, 2900), "ih": (400, 1950, 2550), "eh": (550, 1800, 2500), "ah": (680, 1200, 2500),
    "ao": (560, 880, 2400), "uw": (320, 900, 2250), "ay": (740, 1250, 2500), "ow": (480, 900, 2350),
}  # fmt: skip
_NASAL, _GLIDE_W, _GLIDE_R = (260, 1300, 2300), (300, 650, 2200), (420, 1150, 1600)
_HISS = {"s": (5600, 1800, 0), "f": (3600, 3200, 0), "th": (4200, 3400, 0), "z": (5200, 1800, 0), "v": (1800, 2600, 0)}
_BURST = {"t": (4200, 2000, 0), "k": (1900, 900, 0)}


def _sound(name: str) -> Sound:
    if name in _VOWELS:
        return Sound(0.11, 1.0, 0.01, _VOWELS[name])
    if name in _HISS:
        return Sound(0.09, 0.25 if name in "zv" else 0.0, 0.5 if name in "sz" else 0.2, _HISS[name])
    if name in _BURST:
        return Sound(0.025, 0.0, 0.6, _BURST[name])
    return {
        "n": Sound(0.07, 0.5, 0.0, _NASAL), "w": Sound(0.06, 0.7, 0.0, _GLIDE_W), "r": Sound(0.06, 0.7, 0.0, _GLIDE_R),
        ".": Sound(0.05, 0.0, 0.0, (500, 1500, 2500)),
    }[name]  # fmt: skip


WORDS = {
    "zero": "z iy r ow", "one": "w ah n", "two": ". t uw uw", "three": "th r iy iy", "four": "f ao ao r", "five": "f ay iy v",
    "six": "s ih . k s", "seven": "s eh v ah n", "eight": "eh iy . t", "nine": "n ay iy n",
}  # fmt: skip


def spoken(word: str, speaker: Speaker, random: Random) -> np.ndarray:
    """Return a spoken word, float [samples], about half a second."""
    import numpy as np

    sounds = [_sound(name) for name in WORDS[word].split()]
    frames = [max(1, round(s.seconds * speaker.pace * random.uniform(0.85, 1.15) * RATE / HOP)) for s in sounds]
    tracks = np.repeat(np.array([(s.voiced, s.noise, *s.formants) for s in sounds], float), frames, axis=0)
    tracks = _smooth(np.concatenate([tracks, np.zeros((4, 5)) + tracks[-1] * (0, 0, 1, 1, 1)]))
    at = np.arange(len(tracks) * HOP) / HOP
    voiced, *formants = (np.interp(at, np.arange(len(tracks)), track) for track in tracks.T[[0, 2, 3, 4]])
    said = voiced * _sung(speaker, np.stack(formants), random) + _hissed(tracks, random)[: len(at)]
    return 0.6 * said / max(float(np.abs(said).max()), 1e-6)


def _smooth(tracks: np.ndarray) -> np.ndarray:
    """Smooth the tracks over five frames, as a mouth moves gradually."""
    import numpy as np

    return np.stack([np.convolve(np.pad(track, 2, mode="edge"), np.ones(5) / 5, "valid") for track in tracks.T], axis=1)


def _sung(speaker: Speaker, formants: np.ndarray, random: Random) -> np.ndarray:
    """Return the sum of all harmonics below 4 kHz, weighted by the formants."""
    import numpy as np

    count = formants.shape[1]
    pitch = speaker.pitch * (1 + 0.05 * np.linspace(1, -1, count)) * random.uniform(0.95, 1.05)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    out = np.zeros(count)
    for harmonic in range(1, int(4000 / speaker.pitch) + 1):
        hertz = harmonic * pitch
        loud = sum(
            1 / (1 + ((hertz - formant * speaker.size) / width) ** 2)
            for formant, width in zip(formants, (80, 110, 160), strict=True)
        )
        out += loud / harmonic**0.5 * np.sin(harmonic * phase)
    return out


def _hissed(tracks: np.ndarray, random: Random) -> np.ndarray:
    """Return white noise filtered by a time-varying band, with overlapping windows."""
    import numpy as np

    size = 4 * HOP
    noise = np.random.default_rng(random.getrandbits(32)).normal(0, 1, (len(tracks), size))
    hertz, window = np.fft.rfftfreq(size, 1 / RATE), np.hanning(size)
    band = np.exp(-(((hertz - tracks[:, 2:3]) / np.maximum(tracks[:, 3:4] / 2, 200)) ** 2))
    shaped = np.fft.irfft(np.fft.rfft(noise * window) * band, size) * tracks[:, 1:2]
    out = np.zeros(len(tracks) * HOP + size)
    for at, frame in enumerate(shaped):
        out[at * HOP : at * HOP + size] += frame
    return out
