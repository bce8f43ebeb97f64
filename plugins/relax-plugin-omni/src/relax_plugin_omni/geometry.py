# SPDX-License-Identifier: Apache-2.0
"""The geometry of media, read from the model's files: patch sizes, colour normalisation, mel bands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.api import ConfigError

FIELD = "model.path"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Colour mean and deviation of Qwen-VL's vision towers, used if the model folder does not contain these values.
MEAN = STD = (0.5, 0.5, 0.5)
WINDOW = 50
"""Default of an audio tower's `n_window`; all supported audio towers have this value."""


@dataclass(frozen=True, slots=True)
class Vision:
    """The geometry of the vision tower (vision encoder)."""

    patch: int
    merge: int
    """Number of patches along each side of the square that becomes one token."""
    temporal: int
    """Number of video frames in one patch."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def side(self) -> int:
        """Number of pixels along each side of the square that becomes one token."""
        return self.patch * self.merge

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> Vision:
        """Read the geometry from the model folder. Raises ConfigError if the model has no vision tower."""
        folder = Path(str(model.get("path", "")))
        tower = _part(folder, "vision_config")
        written = _processor(folder)
        mean, std = (tuple(map(float, written.get(key, MEAN))) for key in ("image_mean", "image_std"))
        return cls(
            int(tower["patch_size"]), int(tower.get("spatial_merge_size", 2)), int(tower.get("temporal_patch_size", 2)),
            mean, std,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hearing:
    """The geometry of the audio tower (audio encoder)."""

    mel_bands: int
    window: int
    """Number of feature frames in half a chunk; the tower processes audio in chunks."""

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> Hearing:
        """Read the geometry from the model folder. Raises ConfigError if the model has no audio tower."""
        tower = _part(Path(str(model.get("path", ""))), "audio_config")
        return cls(int(tower["num_mel_bins"]), int(tower.get("n_window", WINDOW)))

    def tokens(self, frames: int) -> int:
        """Return the number of tokens that the tower makes from `frames` feature frames."""
        chunk = self.window * 2
        rest = (frames % chunk - 1) // 2 + 1
        return ((rest - 1) // 2 + 1 - 1) // 2 + 1 + frames // chunk * 13


def positions_per_second(model: Mapping[str, Any]) -> float:
    """Return the number of position ids per second of sound in a model with vision and audio towers."""
    config = _json(Path(str(model.get("path", ""))) / "config.json")
    return float(config.get("thinker_config", config).get("position_id_per_seconds", 25))


def _part(folder: Path, name: str) -> dict[str, Any]:
    config = _json(folder / "config.json")
    known = config.get("thinker_config", config)
    part = known.get(name)
    if not isinstance(part, dict):
        raise ConfigError(
            FIELD, str(folder), f"its config.json has no {name}; remove these media, or use a model with this tower"
        )
    return part


def _processor(folder: Path) -> dict[str, Any]:
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            written = _json(folder / name)
            part = written.get("image_processor", written)
            return part if isinstance(part, dict) else {}
    return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            FIELD, str(path), f"the file can't be read ({error}); name a Hugging Face model folder"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(FIELD, str(path), "the file is not a JSON object; copy the folder again")
    return value
