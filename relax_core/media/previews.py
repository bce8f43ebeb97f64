# SPDX-License-Identifier: Apache-2.0
"""The copies of media that a run directory keeps for people, as the report page and sinks read them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from relax_core.api.modality import browser_type
from relax_core.api.task import MediaKind

KINDS: tuple[str, ...] = get_args(MediaKind)
REMEMBERED_STEPS = 256
"""Number of steps whose shown media are remembered; a sampled step is less than this number ahead of training."""
_SUFFIXES = {"audio/mpeg": "mp3", "audio/mp4": "m4a", "image/jpeg": "jpg"}


@dataclass(frozen=True, slots=True)
class ShownMedium:
    """The copy of a medium that a sample shows."""

    kind: str
    """`image`, `video` or `audio`."""
    number: int
    """Number of the medium among the shown media of its step, from 1."""
    task: str
    """Id of the sample's task."""
    form: str
    """MIME type, such as `image/png`."""
    data: bytes

    @property
    def suffix(self) -> str:
        """Suffix of a file of this type, such as `png`."""
        return _SUFFIXES.get(self.form, self.form.partition("/")[2])


class SampleMedia:
    """The media that a sink shows of a run's samples: the first media of each step, each medium once a step.

    Invariant: a step has at most `limit` shown media. `[[media]] preview_kb` limits the bytes of one medium.
    """

    def __init__(self, run_dir: str, limit: int, forms: tuple[str, ...] = ("image/", "video/", "audio/")) -> None:
        """`forms`: beginnings of the MIME types that the sink can show."""
        self._run_dir, self._limit, self._forms = Path(run_dir), limit, forms
        self._shown: OrderedDict[int, set[str]] = OrderedDict()
        """Keys of the media shown, by step."""

    def take(self, step: int, samples: Sequence[Mapping[str, Any]]) -> list[ShownMedium]:
        """Return the media to show of some samples of a step, as `Sink.samples` receives them.

        Media of other types, and media without a copy in the run directory, are left out.
        """
        shown = self._shown.setdefault(step, set())
        while len(self._shown) > REMEMBERED_STEPS:
            self._shown.popitem(last=False)
        media: list[ShownMedium] = []
        for sample in samples:
            messages = sample.get("messages") or sample.get("prompt")
            contents = [message.get("content") for message in messages or () if isinstance(message, Mapping)]
            for part in (part for content in contents if isinstance(content, list | tuple) for part in content):
                if len(shown) >= self._limit:
                    return media
                if not isinstance(part, Mapping) or not isinstance(part.get("key"), str):
                    continue
                kind, key = str(part.get("type")), part["key"]
                data = None if key in shown else read_preview(self._run_dir, kind, key)
                form = browser_type(data) if data else ""
                if data and form.startswith(kind) and form.startswith(self._forms):
                    shown.add(key)
                    media.append(ShownMedium(kind, len(shown), str(sample.get("task_id")), form, data))
        return media


def read_preview(run_dir: Path, kind: str, key: str) -> bytes | None:
    """Return the copy of a medium by its key in the media store; None if the run directory has no copy."""
    if kind not in KINDS or not key.isalnum():
        return None
    for folder in (run_dir, *sorted(run_dir.glob("stages/*"))):
        try:
            return (folder / "media" / "previews" / f"{key}.{kind}").read_bytes()
        except FileNotFoundError:  # an old copy may be deleted at any time
            continue
    return None
