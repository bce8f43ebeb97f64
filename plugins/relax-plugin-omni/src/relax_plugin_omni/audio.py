# SPDX-License-Identifier: Apache-2.0
"""Audio as log-mel features: one channel at 16 kHz.

soundfile decodes audio files; PyAV decodes the audio of videos, and formats that soundfile does not support. The number
of tokens follows from the length in the header. Audio longer than allowed is refused before decoding.
"""

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
"""Minimum number of samples at 16 kHz; shorter audio can't be padded by reflection."""
TRUNCATED = 0.9
"""Audio counts as truncated if it has less than this share of the samples that the header promises."""
HIGHEST_RATE = 384_000
MAX_CHANNELS = 16
WAV_HEAD = 64
"""Upper bound on the size of a WAV file's header, in bytes."""


class AudioOptions(Options):
    """Options of `[[media]] name = "audio"`."""

    max_seconds: float = Field(default=300.0, gt=0)
    """Maximum length in seconds; longer audio is refused."""


@dataclass(frozen=True, slots=True)
class Sound:
    """Number of samples, sampling rate in Hz and number of channels of audio, from the file's header."""

    samples: int
    rate: int
    channels: int

    def check(self, max_seconds: float) -> None:
        if not 0 < self.rate <= HIGHEST_RATE or not 0 < self.channels <= MAX_CHANNELS:
            raise ValueError(
                f"sound of {self.channels} channels at {self.rate} Hz; at most {MAX_CHANNELS} at {HIGHEST_RATE} Hz"
            )
        if self.samples > max_seconds * self.rate:
            raise ValueError(f"sound of {self.samples / self.rate:.1f} s; at most {max_seconds:g} s")
        if self.resampled < MIN_SAMPLES:
            raise ValueError(
                f"sound of {self.samples / self.rate:.4f} s is too short; at least {MIN_SAMPLES / RATE:g} s"
            )

    @property
    def resampled(self) -> int:
        """Number of samples after resampling to 16 kHz."""
        return round(self.samples * RATE / self.rate)


class AudioProcessor(ModalityProcessor[AudioOptions]):
    """A processor that turns audio into log-mel features."""

    medium: ClassVar[str] = "audio"

    def budget(self, media: Media, model: Mapping[str, Any]) -> int:
        """Return the audio's number of tokens, computed from its header alone."""
        sound = header(read_source(media.source), self.options.max_seconds)
        return Hearing.of(model).tokens(sound.resampled // HOP)

    def process(self, media: Media, data: bytes, model: Mapping[str, Any]) -> ProcessedMedia:
        """Return `input_features` [1, bands, frames] and `feature_attention_mask` [1, frames]."""
        hearing = Hearing.of(model)
        features = log_mel(samples(data, self.options.max_seconds), hearing.mel_bands)
        mask = np.ones((1, features.shape[1]), np.int64)
        tensors = {"input_features": features[None], "feature_attention_mask": mask}
        key = content_key(data, "audio", self.options, hearing)
        return _heard(key, tensors, hearing)

    def facts(self, media: Media, data: bytes) -> Mapping[str, Any]:
        """Return `seconds`, sampling `rate` in Hz and number of `channels` of the audio."""
        sound = header(data, self.options.max_seconds)
        return {"seconds": round(sound.samples / sound.rate, 3), "rate": sound.rate, "channels": sound.channels}

    def preview(self, media: Media, data: bytes, most_bytes: int) -> bytes | None:
        """Return the file itself if it fits in `most_bytes`, else its beginning as 16 kHz mono WAV."""
        own = super().preview(media, data, most_bytes)
        if own is not None:
            return own
        import soundfile

        heard = samples(data, self.options.max_seconds)[: max(0, most_bytes - WAV_HEAD) // 2]
        out = io.BytesIO()
        soundfile.write(out, heard, RATE, format="WAV", subtype="PCM_16")
        return out.getvalue()

    def view(self, whole: ProcessedMedia, start_s: float, end_s: float) -> ProcessedMedia:
        """Return the feature frames from `start_s` to `end_s`, still normalised by the loudness of the whole audio."""
        features = whole.tensors["input_features"]
        first, last = (min(max(0, round(second * RATE / HOP)), features.shape[2]) for second in (start_s, end_s))
        if last <= first:
            raise ValueError(
                f"a view from {start_s:g} to {end_s:g} s contains none of the sound; choose times inside it"
            )
        mask = whole.tensors["feature_attention_mask"][:, first:last]
        tensors = {"input_features": features[:, :, first:last], "feature_attention_mask": mask}
        return _heard(f"{whole.key}#t={start_s},{end_s}", tensors, Hearing(features.shape[1], WINDOW))


def _heard(key: str, tensors: Mapping[str, np.ndarray], hearing: Hearing) -> ProcessedMedia:
    tokens = hearing.tokens(tensors["input_features"].shape[2])
    return ProcessedMedia(key, tensors, tokens, (PlaceholderSpan("audio", tokens),))


def header(data: bytes, max_seconds: float) -> Sound:
    """Read a file's header. Raises ValueError if the file is not audio or exceeds a bound."""
    with _opened(data) as opened:
        if isinstance(opened, Container):
            rate, channels = opened.sound()
            sound = Sound(round(opened.seconds * rate), rate, channels)
        else:
            sound = Sound(int(opened.frames), int(opened.samplerate), int(opened.channels))
    sound.check(max_seconds)
    return sound


def samples(data: bytes, max_seconds: float) -> np.ndarray:
    """Decode audio to one channel at 16 kHz, float32 [samples], with the length that the header promises.

    Raises ValueError if the file ends early (see `TRUNCATED`) or a sample is not finite.
    """
    import soxr

    sound = header(data, max_seconds)
    with _opened(data) as opened:
        if isinstance(opened, Container):
            mono = opened.samples(sound.samples)
        else:
            mono = np.asarray(opened.read(sound.samples, dtype="float32", always_2d=True).mean(axis=1), np.float32)
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
    """Open a `soundfile.SoundFile`, or a `Container` if soundfile can't read the data.

    Raises ValueError instead of every exception of a decoder.
    """
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
