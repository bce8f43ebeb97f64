# SPDX-License-Identifier: Apache-2.0
"""The TensorBoard event file of one session, and a reader of earlier sessions' files.

This module imports tensorboard, so the sink imports this module only when it opens.
"""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
from tensorboard.plugins.audio import metadata as audio
from tensorboard.plugins.image import metadata as image
from tensorboard.plugins.text import metadata as text
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

_PREFIX = "events.out.tfevents."


class EventFile:
    """An event file, flushed after every record.

    TensorBoard reads files in the order of their names, so the name of a new file sorts after all existing files.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        times = [int(found.group(1)) for path in folder.iterdir() if (found := re.match(rf"{_PREFIX}(\d+)", path.name))]
        stamp = max([int(time.time()), *(before + 1 for before in times)])
        self._file = (folder / f"{_PREFIX}{stamp:010d}.relax").open("xb")
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step, except NaN."""
        event = Event(wall_time=time.time(), step=step)
        for tag, value in values.items():
            if not math.isnan(value):
                event.summary.value.add(tag=tag, simple_value=float(value))
        self._add(event)

    def texts(self, step: int, tag: str, texts: Sequence[str]) -> None:
        """Write Markdown texts for TensorBoard's text page."""
        said = [words.encode() for words in texts]
        self._strings(step, tag, said, text.create_summary_metadata(display_name="", description=""))

    def images(self, step: int, tag: str, images: Sequence[bytes]) -> None:
        """Write image files for TensorBoard's image page."""
        width, height = Image.open(io.BytesIO(images[0])).size
        strings = [str(width).encode(), str(height).encode(), *images]
        self._strings(step, tag, strings, image.create_summary_metadata(display_name="", description=""))

    def sounds(self, step: int, tag: str, sounds: Sequence[tuple[bytes, str]]) -> None:
        """Write WAV files with their labels for TensorBoard's audio page."""
        wav = audio.create_summary_metadata("", "", encoding=audio.Encoding.Value("WAV"))
        self._strings(step, tag, [[data, label.encode()] for data, label in sounds], wav)

    def start(self, step: int) -> None:
        """Make TensorBoard ignore all data written so far from `step` on."""
        self._add(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        self._file.close()

    def _strings(self, step: int, tag: str, strings: Sequence[Any], metadata: SummaryMetadata) -> None:
        event = Event(wall_time=time.time(), step=step)
        event.summary.value.add(tag=tag, tensor=make_tensor_proto(np.array(strings, dtype=object)), metadata=metadata)
        self._add(event)

    def _add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()


def written(folder: Path) -> dict[str, int]:
    """Return the last step of each tag in the folder's event files. A file is read up to its first damaged record."""
    last: dict[str, int] = {}
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                last[value.tag] = max(last.get(value.tag, -1), event.step)
    return last
