# SPDX-License-Identifier: Apache-2.0
"""Every processor keeps what all promise."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

from relax_core.api import Media
from relax_core.testing.modality_processor import ModalityProcessorSuite
from tests.unit.media import clips

FOLDER = tempfile.TemporaryDirectory()  # until the tests end
MODEL = clips.model(Path(FOLDER.name))


class TestImage(ModalityProcessorSuite):
    component = "image"
    model = MODEL
    data = clips.picture(0)
    media: ClassVar[Media] = Media("image", clips.uri(data))


class TestSound(ModalityProcessorSuite):
    component = "audio"
    model = MODEL
    data = clips.sound(0, 0.74)
    media: ClassVar[Media] = Media("audio", clips.uri(data))


class TestVideo(ModalityProcessorSuite):
    component = "video"
    model = MODEL
    data = clips.video(0)
    media: ClassVar[Media] = Media("video", clips.uri(data))
