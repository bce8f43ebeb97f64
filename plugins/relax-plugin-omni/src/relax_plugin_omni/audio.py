# SPDX-License-Identifier: Apache-2.0
"""Sound. Files of sound are read by soundfile, the sound of videos and what else it does not know by PyAV; one channel,
one rate for all. Its length in the header tells the tokens; nothing longer than allowed is decoded."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from relax_core.api import Media, ModalityProcessor, Options, PlaceholderSpan, ProcessedMedia
from relax_core.media.source import content_key, read_source
from relax_plugin_omni.containers import Container
from relax_plugin_omni.geometry import WINDOW, Hearing
from relax_plugin_omni.mel import HOP, RATE, log_mel

MIN_SAMPLES = 2 * HOP
"""Less can't be padded by reflection nor heard."""
TRUNCATED = 0.9
"""Less of what the header promises than this: the rest is missing."""
HIGHEST_RATE = 384_000
MAX_CHANNELS = 16
WAV_HEAD = 64
"""Bytes of a WAV file that are no samples, at most."""


class AudioOptions(Options):
    """`[[media]] name = "audio"`."""

    max_seconds: float = Field(default=300.0, gt=0)
    """Longer sound is refused."""


@dataclass(frozen=True, slots=True)
class Sound:
    """The facts of a sound file's header."""

    samples: int
    rate: int
    channels: int

    def check(self, max_seconds: float) -> None:
        if not 0 < self.rate <= HIGHEST_RATE or not 0 < self.channels <= MAX_CHANNELS:
            raise ValueError(f"sound of {self.channels} channels at {self.rate} Hz")
        if self.samples > max_seconds * self.rate:
            raise ValueError(f"sound of {self.samples / self.rate:.1f} s; at most {max_seconds:g} s")
        if self.resampled < MIN_SAMPLES:
            raise ValueError(f"sound of {self.samples / self.rate:.4f} s, too short to hear")

    @property
    def resampled(self) -> int:
        """Resample to the towers' rate."""
        return round(self.samples * RATE / self.rate)


class AudioProcessor(ModalityProcessor[AudioOptions]):
    """Turns one sound into log-mel features."""

    medium: ClassVar[str] = "audio"

    def budget(self, media: Media, model: Mapping[str, Any]) -> int:
        """Count tokens from the header."""
        sound = header(read_source(media.source), self.options.max_seconds)
        return Hearing.of(model).tokens(sound.resampled // HOP)

    def process(self, media: Media, data: bytes, model: Mapping[str, Any]) -> ProcessedMedia:
        """Make `input_features` [1, bands, frames] and `feature_attention_mask` [1, frames]."""
        hearing = Hearing.of(model)
        features = log_mel(samples(data, self.options.max_seconds), hearing.mel_bands)
        mask = np.ones((1, features.shape[1]), np.int64)
        tensors = {"input_features": features[None], "feature_attention_mask": mask}
        key = content_key(data, "audio", self.options, hearing)
        return _heard(key, tensors, hearing)

    def facts(self, media: Media, data: bytes) -> Mapping[str, Any]:
        """Tell seconds, rate and channels."""
        sound = header(data, self.options.max_seconds)
        return {"seconds": round(sound.samples / sound.rate, 3), "rate": sound.rate, "channels": sound.channels}

    def preview(self, media: Media, data: bytes, most_bytes: int) -> bytes | None:
        """Give the file itself, or its beginning as the model hears it."""
        own = super().preview(media, data, most_bytes)
        if own is not None:
            return own
        import soundfile

        heard = samples(data, self.options.max_seconds)[: max(0, most_bytes - WAV_HEAD) // 2]
        out = io.BytesIO()
        soundfile.write(out, heard, RATE, format="WAV", subtype="PCM_16")
        return out.getvalue()

    def view(self, whole: ProcessedMedia, start_s: float, end_s: float) -> ProcessedMedia:
        """Keep the feature frames between the two; their loudness stays relative to the whole."""
        features = whole.tensors["input_features"]
        first, last = (min(max(0, round(second * RATE / HOP)), features.shape[2]) for second in (start_s, end_s))
        if last <= first:
            raise ValueError(f"a view from {start_s:g} to {end_s:g} s, in which none of the sound lies")
        mask = whole.tensors["feature_attention_mask"][:, first:last]
        tensors = {"input_features": features[:, :, first:last], "feature_attention_mask": mask}
        return _heard(f"{whole.key}#t={start_s},{end_s}", tensors, Hearing(features.shape[1], WINDOW))


def _heard(key: str, tensors: Mapping[str, np.ndarray], hearing: Hearing) -> ProcessedMedia:
    tokens = hearing.tokens(tensors["input_features"].shape[2])
    return ProcessedMedia(key, tensors, tokens, (PlaceholderSpan("audio", tokens),))


def header(data: bytes, max_seconds: float) -> Sound:
    """Read the file's header, within bounds; ValueError for what is no sound."""
    with _opened(data) as opened:
        if isinstance(opened, Container):
            rate, channels = opened.sound()
            sound = Sound(round(opened.seconds * rate), rate, channels)
        else:
            sound = Sound(int(opened.frames), int(opened.samplerate), int(opened.channels))
    sound.check(max_seconds)
    return sound


def samples(data: bytes, max_seconds: float) -> np.ndarray:
    """Read float32 [samples] at 16 kHz, as many as the header says; ValueError where they end long before."""
    import soxr

    sound = header(data, max_seconds)
    with _opened(data) as opened:
        mono = opened.samples(sound.samples) if isinstance(opened, Container) else _mono(opened, sound.samples)
    if len(mono) < sound.samples * TRUNCATED:
        raise ValueError(f"sound that ends after {len(mono)} of {sound.samples} samples")
    if not np.isfinite(mono).all():
        raise ValueError("sound with samples that are not finite")
    if sound.rate != RATE:
        mono = soxr.resample(mono, sound.rate, RATE)
    exact = np.zeros(sound.resampled, np.float32)
    exact[: len(mono)] = mono[: len(exact)]
    return exact


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Open a `soundfile.SoundFile`, or a `Container` where it can't read them. Whatever decoders raise is a ValueError."""
    import soundfile

    if not data:
        raise ValueError("sound of no bytes")
    try:
        opened = soundfile.SoundFile(io.BytesIO(data))
    except (soundfile.LibsndfileError, RuntimeError, ValueError):
        with Container.of(data, "audio") as container:
            yield container
        return
    try:
        with opened:
            yield opened
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"sound that can't be decoded ({type(error).__name__}: {error})") from error


def _mono(opened: Any, most: int) -> np.ndarray:
    return np.asarray(opened.read(most, dtype="float32", always_2d=True).mean(axis=1), np.float32)
