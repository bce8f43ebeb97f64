# SPDX-License-Identifier: Apache-2.0
"""Every processor keeps what all promise."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

import media

from relax_core.api import Media
from relax_core.testing.modality_processor import ModalityProcessorSuite

FOLDER = tempfile.TemporaryDirectory()  # until the tests end
MODEL = media.model(Path(FOLDER.name))


class TestImage(ModalityProcessorSuite):
    component = "image"
    model = MODEL
    data = media.image()
    media: ClassVar[Media] = Media("image", media.uri(data))


class TestSound(ModalityProcessorSuite):
    component = "audio"
    model = MODEL
    data = media.sound(0.74)
    media: ClassVar[Media] = Media("audio", media.uri(data))


class TestVideo(ModalityProcessorSuite):
    component = "video"
    model = MODEL
    data = media.video()
    media: ClassVar[Media] = Media("video", media.uri(data))
