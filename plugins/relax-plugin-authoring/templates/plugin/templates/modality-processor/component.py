"""The modality processor `{{ cookiecutter.name }}`: turns WAV files into frames of samples, one placeholder for each frame.

It runs in a process that can be killed. A medium that cannot be read ends only its sample.
"""

import io
import wave
from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_core.api import Media, ModalityProcessor, Options, ProcessedMedia
from relax_core.media.source import content_key, read_source


class {{ cookiecutter.class_name }}Options(Options):
    """Options of `{{ cookiecutter.name }}`."""

    frames_per_second: int = 25
    """Number of frames, and so of placeholder tokens, for each second of sound."""


class {{ cookiecutter.class_name }}(ModalityProcessor[{{ cookiecutter.class_name }}Options]):
    """A processor of 16-bit WAV files. All channels are mixed into one."""

    medium = "audio"  # image, video or audio

    def budget(self, media: Media, model: Mapping[str, Any]) -> int:
        """Return the number of tokens that the medium will take. Only the header is read, not the sound."""
        with opened(read_source(media.source)) as sound:
            return self._num_frames(sound.getnframes(), sound.getframerate())

    def process(self, media: Media, data: bytes, model: Mapping[str, Any]) -> ProcessedMedia:
        """Return the tensor `sound`, [frames, samples of a frame], between -1 and 1."""
        with opened(data) as sound:
            rate, channels = sound.getframerate(), sound.getnchannels()
            raw = np.frombuffer(sound.readframes(sound.getnframes()), "<i2").reshape(-1, channels)
        samples, size = raw.mean(axis=1, dtype=np.float32) / 32768, rate // self.options.frames_per_second
        frames = self._num_frames(len(samples), rate)
        padded = np.zeros(frames * size, np.float32)
        padded[: len(samples)] = samples
        key = content_key(data, "{{ cookiecutter.name }}", self.options)
        return ProcessedMedia(key, {"sound": padded.reshape(frames, size)}, frames)

    def _num_frames(self, samples: int, rate: int) -> int:
        return max(1, -(-samples // (rate // self.options.frames_per_second)))


def opened(data: bytes) -> wave.Wave_read:
    """Open a WAV file. Raises ValueError with the reason if it cannot be processed."""
    try:
        sound = wave.open(io.BytesIO(data))
    except (wave.Error, EOFError) as error:
        raise ValueError(f"not a readable WAV file: {error}") from error
    if sound.getsampwidth() != 2:
        raise ValueError(f"a WAV file of {8 * sound.getsampwidth()} bits; convert it to 16 bits")
    return sound
